"""Packs: folder format, versions, assignment to environment types."""

import json
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from leases.errors import Conflict, InvalidPack, InvalidRequest
from leases.models import EnvironmentType
from leases.packs import folder, installation
from leases.packs.check import check_pack
from leases.packs.folder import list_shipped_folders, read_folder
from sandboxes.models import PackAssignment, PackOrigin, PackVersion
from tests.conftest import NOW

ACTION = {"type": "object", "properties": {"action": {"enum": ["left", "right"]}}, "required": ["action"]}
POLICY = """
def choose_action(state):
    return {"action": state["legal_actions"][0]}
def describe_state(state):
    return "two ways"
"""
OWN_TURN_SCRIPT = '[environment_type]\nturn_argv = ["python3", "{skill}/turn.py"]'
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a valid pack folder, with other files or without (None), and further lines of pack.toml."""

    def write_folder(*, version: str = "1", toml: str = "", **files: str | None) -> Path:
        contents: dict[str, str | None] = {
            "pack.toml": f'format = 1\nname = "maze"\nversion = "{version}"\n{toml}\n',
            "skill/prompt.md": 'Choose a legal action: {"action": "left"}',
            "state.schema.json": '{"type": "object", "required": ["legal_actions"]}',
            "action.schema.json": json.dumps(ACTION),
            "examples/fork.json": '{"environment_type": "maze", "legal_actions": ["left", "right"]}',
            **files,
        }
        for name, text in contents.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if text is None:
                path.unlink(missing_ok=True)
            else:
                path.write_text(text)
        return tmp_path

    return write_folder


def add(path: Path) -> PackVersion:
    return installation.add_version(read_folder(path), now=NOW)[0]


@pytest.mark.parametrize(
    ("files", "message"),
    {
        "no manifest": ({"pack.toml": None}, "pack.toml: cannot be read"),
        "not TOML": ({"pack.toml": "format"}, "pack.toml: cannot be read"),
        "format": ({"pack.toml": "format = 2"}, "pack.toml: format: must be 1"),
        "unknown key": ({"toml": "limit = 1"}, "pack.toml: unknown key limit"),
        "unknown default": ({"toml": "[environment_type]\nlimit = 1"}, "environment_type: unknown key limit"),
        "version": ({"version": "latest"}, 'pack.toml: version: must be a version such as "1.2.0"'),
        "name": ({"pack.toml": 'format = 1\nname = "../x"\nversion = "1"'}, "pack.toml: name: must be lower-case letters"),
        "no prompt": ({"skill/prompt.md": None}, "skill/prompt.md: is required"),
        "hidden file": ({"skill/.pack.json": "{}"}, "skill/.pack.json: is not a regular file with a plain name"),
        "no schema": ({"action.schema.json": None}, "action.schema.json: cannot be read"),
        "invalid schema": ({"state.schema.json": '{"type": "thing"}'}, "state.schema.json: is not a JSON Schema"),
        "schema elsewhere": ({"toml": '[schemas]\nstate = "../s.json"'}, "schemas: ../s.json is not in the folder"),
        "example": ({"examples/fork.json": "[]"}, "examples/fork.json: is not a JSON object"),
    }.values(),
)
def test_invalid_folder_is_refused_by_file_and_key(write: Write, files: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidPack, match=message.replace("(", r"\(").replace("[", r"\[")):
        read_folder(write(**files))


def test_skill_above_the_limits_or_with_a_link_is_refused(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(**{"skill/tools/a.py": "x"})
    monkeypatch.setattr(folder, "MAX_FILES", 1)
    with pytest.raises(InvalidPack, match="more than 1 files"):
        read_folder(path)
    (path / "skill/tools/a.py").unlink()
    (path / "skill/tools/a.py").symlink_to("/etc/passwd")
    with pytest.raises(InvalidPack, match="is a symbolic link"):
        read_folder(path)


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('ttl = "soon"', "environment_type.ttl: 'soon' is not a duration"),
        ('ttl = "5d"\nmax_ttl = "1d"', "max_ttl"),
        ("llm_limit = -1", "environment_type.llm_limit: Ensure this value is greater than or equal to 0"),
        ("llm_token_limit = -1", "environment_type.llm_token_limit: Ensure this value is greater than or equal to 0"),
        ("llm_token_limit = 1.5", "environment_type.llm_token_limit: must be a whole number"),
        ("llm_token_limit = true", "environment_type.llm_token_limit: must be a whole number"),
        ("llm_token_limit = 9223372036854775808", "environment_type.llm_token_limit: Ensure this value is less than"),
        ('policy = "open"', "environment_type.policy: there is no policy 'open'"),
        ('expiry_conditions = ["not a condition"]', "environment_type.expiry_conditions"),
        ("turn_argv = []", "environment_type.turn_argv"),
    ],
)
def test_invalid_default_is_refused_and_nothing_stored(write: Write, line: str, message: str) -> None:
    with pytest.raises(InvalidPack, match=message):
        add(write(toml=f"[environment_type]\n{line}"))
    assert not PackVersion.objects.filter(pack="maze").exists()


@pytest.mark.django_db
def test_version_is_immutable(write: Write) -> None:
    version = add(write())
    assert add(write()) == version
    with pytest.raises(Conflict, match="Raise the version"):
        add(write(**{"skill/prompt.md": "Another."}))
    newer = add(write(version="2", **{"skill/prompt.md": "Another."}))
    assert installation.find_version("maze") == newer
    assert installation.find_version("maze", "1") == version
    with pytest.raises(InvalidRequest, match="has no version 3: 2, 1"):
        installation.find_version("maze", "3")


@pytest.mark.django_db
def test_assignment_creates_the_type_and_an_upgrade_keeps_an_operators_changes(write: Write) -> None:
    defaults = '[environment_type]\nexpiry_conditions = ["maze.left"]\nturn_argv = ["python3", "{skill}/turn.py"]\n'
    installation.assign(add(write(toml=f'{defaults}ttl = "1h"\nsleep_after = "2m"')), "maze", now=NOW)
    row = EnvironmentType.objects.get(name="maze")
    assert (row.expiry_conditions, row.ttl, row.sleep_after) == (["maze.left"], timedelta(hours=1), "2m")
    assert row.turn_argv == ["python3", "/data/skills/maze/turn.py"]
    EnvironmentType.objects.filter(pk=row.pk).update(sleep_after="9m")  # by an operator
    later = '[environment_type]\nttl = "2h"\nsleep_after = "3m"\nllm_limit = 1.5\nllm_token_limit = 9'
    newer = add(write(version="2", toml=later))
    planned = installation.assign(newer, "maze", now=NOW, dry_run=True)
    assert PackAssignment.objects.get(environment_type="maze").version.version == "1"
    assigned = installation.assign(newer, "maze", now=NOW)
    assert assigned == planned
    assert assigned.kept == ["sleep_after"]
    assert sorted(assigned.changed) == ["expiry_conditions", "llm_limit", "llm_token_limit", "ttl", "turn_argv"]
    row.refresh_from_db()
    assert (row.expiry_conditions, row.ttl, row.sleep_after) == ([], timedelta(hours=2), "9m")
    assert (row.llm_limit, row.llm_token_limit) == (Decimal("1.5"), 9)


@pytest.mark.django_db
def test_shipped_packs_are_installed_and_upgraded_with_the_release(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    assert installation.install_shipped_packs(now=NOW) == []  # done by the migration
    assert {row.environment_type: row.version.pack for row in PackAssignment.objects.select_related("version")} == {
        path.name: path.name for path in list_shipped_folders()
    }
    path = write()
    monkeypatch.setattr(installation, "list_shipped_folders", lambda: [path])
    assert [each.environment_type for each in installation.install_shipped_packs(now=NOW)] == ["maze"]
    write(**{"skill/prompt.md": "Changed without another version."})
    [assigned] = installation.install_shipped_packs(now=NOW)
    assert assigned.version.version.startswith("1+")
    own = add(write(version="1.0.1-mine", **{"skill/prompt.md": "Of an operator."}))
    installation.assign(own, "maze", now=NOW)
    write(version="2")
    assert installation.install_shipped_packs(now=NOW) == []
    assert PackVersion.objects.get(pack="maze", version="2").origin == PackOrigin.SHIPPED
    assert PackAssignment.objects.get(environment_type="maze").version == own


@pytest.mark.parametrize("path", list_shipped_folders(), ids=lambda path: path.name)
def test_shipped_pack_passes_its_check(path: Path) -> None:
    result = check_pack(read_folder(path))
    assert (result.problems, result.turns > 1) == ([], True)


@pytest.mark.parametrize(
    ("files", "problem"),
    {
        "prompt without an answer": ({"skill/prompt.md": "Play."}, "teaches no answer"),
        "taught answer against the schema": (
            {"skill/prompt.md": '{"action": "up"}'}, 'teaches {"action": "up"}, which is not a valid action',
        ),
        "taught key that is not checked": ({"skill/prompt.md": '{"move": "left"}'}, "'action' is a required property"),
        "example against the schema": ({"examples/fork.json": '{"ways": 2}'}, "$: 'legal_actions' is a required property"),
        "no example": ({"examples/fork.json": None}, "examples has no state to play"),
        "policy with an illegal action": (
            {"skill/policy.py": POLICY.replace('state["legal_actions"][0]', '"up"')}, "is not a valid action: $.action: 'up'",
        ),
        "turn script that fails": (
            {"skill/turn.py": "raise SystemExit('no way')", "toml": OWN_TURN_SCRIPT},
            "exit code 1: no way",
        ),
        "turn script that ignores the model": (
            {
                "skill/turn.py": "print('{\"action\": \"left\"}')",
                "toml": OWN_TURN_SCRIPT,
            },
            "the turn script changed a legal answer",
        ),
    }.values(),
)  # fmt: skip
def test_check_reports_a_broken_contract(write: Write, files: dict[str, Any], problem: str) -> None:
    assert any(problem in each for each in check_pack(read_folder(write(**files))).problems)


def test_check_accepts_a_pack_with_a_policy_and_one_without(write: Write) -> None:
    assert check_pack(read_folder(write())).problems == []
    assert check_pack(read_folder(write(**{"skill/policy.py": POLICY}))).problems == []

"""Skills of packs in an agent's /data: first delivery, upgrade with edits kept, interruption."""

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import pytest

from leases.models import Lease
from leases.packs import installation
from leases.packs.folder import PackFolder
from sandboxes.models import PackVersion
from sandboxes.models.state import DataFile
from sandboxes.providers.base import DATA
from sandboxes.providers.memory import File, Link, MemoryProvider
from tests.conftest import NOW
from tests.support.storage.state import LATER, sandbox_of, sh

pytestmark = pytest.mark.django_db
FIRST = {"prompt.md": b"first", "policy.py": b"first", "old.md": b"first", "notes.md": b"first", "gone.md": b"first"}
SECOND = {"prompt.md": b"second", "policy.py": b"second", "notes.md": b"first", "gone.md": b"second", "tools/new.py": b"#!new"}


def store(version: str, skill: Mapping[str, bytes]) -> PackVersion:
    schemas = {"state": {}, "action": {}}
    return installation.add_version(PackFolder("maze", version, "", {}, schemas, skill, {}), now=NOW)[0]


def assign(version: str, skill: Mapping[str, bytes]) -> None:
    installation.assign(store(version, skill), "maze", now=NOW)


def skill_files(lease: Lease, memory: MemoryProvider) -> dict[str, str]:
    """Return the text of the skill's files in the lease's sandbox, without the marker."""
    prefix = f"{DATA}/skills/maze/"
    return {
        path.removeprefix(prefix): entry.content.decode()
        for path, entry in memory.files(sandbox_of(lease).ref).items()
        if path.startswith(prefix) and isinstance(entry, File) and not path.endswith(".pack.json")
    }


@pytest.fixture
def lease(grant: Callable[..., Lease], memory: MemoryProvider) -> Callable[[str], Lease]:
    """Grants a lease of the agent in an environment of type `maze`, which uses the first version of its pack."""
    assign("1", FIRST)
    return lambda environment: grant(environment=environment, environment_type="maze")


def test_upgrade_changes_files_that_the_agent_has_not_edited(lease: Callable[[str], Lease], memory: MemoryProvider) -> None:
    one = lease("one")
    sh(one, f"echo mine >{DATA}/skills/maze/policy.py; echo mine >{DATA}/skills/maze/own.md")
    del memory.files(sandbox_of(one).ref)[f"{DATA}/skills/maze/gone.md"]
    sh(one, "true")
    assert skill_files(one, memory)["old.md"] == "first"
    assign("2", SECOND)
    two = lease("two")
    sh(two, "true")
    edited = {"policy.py": "mine\n", "own.md": "mine\n"}  # and gone.md stays removed
    assert skill_files(two, memory) == {"prompt.md": "second", "notes.md": "first", "tools/new.py": "#!new", **edited}
    assert memory.files(sandbox_of(two).ref)[f"{DATA}/skills/maze/tools/new.py"].mode == 0o755
    assert not DataFile.objects.get(path="skills/maze/tools/new.py").removed
    installation.assign(installation.find_version("maze", "1"), "maze", now=NOW)  # back to the older version
    three = lease("three")
    sh(three, "true")
    assert skill_files(three, memory) == {"prompt.md": "first", "notes.md": "first", "old.md": "first", **edited}


def test_running_sandbox_keeps_its_version(lease: Callable[[str], Lease], memory: MemoryProvider) -> None:
    one = lease("one")
    sh(one, "true")
    assign("2", SECOND)
    sh(one, "true", now=LATER)
    assert skill_files(one, memory)["prompt.md"] == "first"


def test_interrupted_upgrade_is_completed(
    lease: Callable[[str], Lease], memory: MemoryProvider, crash_at: Callable[[str], AbstractContextManager[None]]
) -> None:
    sh(lease("one"), "true")
    assign("2", SECOND)
    two = lease("two")
    with crash_at("skill written"):
        sh(two, "true")
    sh(two, "true", now=LATER)
    assert skill_files(two, memory) == {path: content.decode() for path, content in SECOND.items()}
    marker = memory.files(sandbox_of(two).ref)[f"{DATA}/skills/maze/.pack.json"]
    assert isinstance(marker, File) and json.loads(marker.content)["version"] == "2"


@pytest.mark.parametrize("marker", ["", "[]", "{}", '{"files": {"../../note": "' + "0" * 64 + '"}}', '{"files": {"a": 1}}'])
def test_skill_whose_marker_is_invalid_belongs_to_the_agent(
    marker: str, lease: Callable[[str], Lease], memory: MemoryProvider
) -> None:
    one = lease("one")
    sh(one, f"echo kept >{DATA}/note")
    memory.files(sandbox_of(one).ref)[f"{DATA}/skills/maze/.pack.json"] = File(marker.encode())
    sh(one, "true")
    assign("2", SECOND)
    two = lease("two")
    sh(two, "true")
    assert skill_files(two, memory) == {path: content.decode() for path, content in FIRST.items()}
    assert sh(two, f"cat {DATA}/note") == "kept"


def test_entries_of_another_kind_in_place_of_files_are_kept(lease: Callable[[str], Lease], memory: MemoryProvider) -> None:
    one = lease("one")
    sh(one, "true")
    files = memory.files(sandbox_of(one).ref)
    files[f"{DATA}/skills/maze/prompt.md"] = Link("/etc/passwd")
    files[f"{DATA}/skills/maze/tools"] = File(b"not a directory")
    sh(one, "true")
    assign("2", SECOND)
    two = lease("two")
    sh(two, "true")
    files = memory.files(sandbox_of(two).ref)
    assert isinstance(files[f"{DATA}/skills/maze/prompt.md"], Link)
    assert skill_files(two, memory)["tools"] == "not a directory"
    assert skill_files(two, memory)["policy.py"] == "second"


def test_environment_type_without_a_pack_gets_no_skill(grant: Callable[..., Lease], memory: MemoryProvider) -> None:
    one = grant(environment="one", environment_type="run")
    sh(one, "true")
    assert [path for path in memory.files(sandbox_of(one).ref) if path.startswith(f"{DATA}/skills")] == []

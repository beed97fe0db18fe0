"""Tables of the suite: parts, rules of changed paths, and the reasons of marks."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.emulators.registry import EMULATORS
from tests.lanes import changes
from tests.lanes.changes import RULES, find_rule, select_parts
from tests.lanes.table import FAST, MATRIX, PARTS, POSTGRES, REPO, SQLITE, VENDORS, Part
from tests.lint.base import BASE_VARIABLE

REASON = re.compile(r"mark\.matrix\(\"([^\"]*)\"")
NAMED_TEST = re.compile(r"\b(?:tests/[\w/]+|test_\w+)(?:\.py\b)?")
MATRIX_NAMES = {part.name for part in MATRIX}


def list_test_directories() -> set[str]:
    """Directories of test modules, each named by its first two levels: tests/unit, tests/docker."""
    return {"/".join(path.relative_to(REPO).parts[:2]) for path in (REPO / "tests").rglob("test_*.py")}


def test_every_directory_of_tests_is_named_in_one_rule() -> None:
    named = [path for rule in RULES for path in rule.paths]
    assert {directory: named.count(directory) for directory in list_test_directories()} == dict.fromkeys(
        list_test_directories(), 1
    )


def test_rules_name_existing_paths_once_and_parts_of_the_matrix() -> None:
    paths = [path for rule in RULES for path in rule.paths]
    assert len(paths) == len(set(paths))
    assert [path for path in paths if not (REPO / path).exists()] == []
    assert {part for rule in RULES for part in rule.parts} <= MATRIX_NAMES


def test_a_change_of_a_file_with_matrix_tests_adds_a_part_that_runs_them() -> None:
    files = [path for path in (REPO / "tests").rglob("test_*.py") if re.search(r"\bmark\.matrix\b", path.read_text())]
    names = {str(path.relative_to(REPO)) for path in files} - {"tests/unit/lanes/test_table.py"}
    assert len(names) > 20
    unwatched = {
        name for name in names
        if not any(name.startswith(f"{path}/") or name == path for part in select_parts([name]) for path in PARTS[part].paths)
    }  # fmt: skip
    assert unwatched == set()


def test_reasons_of_matrix_marks_name_tests_that_exist() -> None:
    """A mark says which cheaper test has its outcome."""
    paths = [*(REPO / "tests").rglob("*.py")]
    modules = {str(path.relative_to(REPO)) for path in paths} | {path.name for path in paths}
    named = {name for path in paths for reason in REASON.findall(path.read_text()) for name in NAMED_TEST.findall(reason)}
    assert len(named) > 10
    assert {name for name in named if name not in modules and not (REPO / name).is_dir()} == set()


def test_vendors_are_those_with_an_emulator() -> None:
    assert {*VENDORS} == {*EMULATORS}


def test_every_directory_of_tests_is_in_a_fast_part() -> None:
    covered = {path for part in FAST for path in part.paths}
    assert list_test_directories() == {"/".join(Path(path).parts[:2]) for path in covered}


def test_parts_have_names_of_their_own_and_find_files() -> None:
    assert len(PARTS) == len(FAST) + len(MATRIX)
    for part in PARTS.values():
        assert part.list_files(), part.name
        assert part.database in (SQLITE, POSTGRES)
        assert all((REPO / path).exists() for path in (*part.paths, *part.ignored)), part.name


def test_fast_parts_keep_a_budget_and_leave_the_matrix_out() -> None:
    for part in FAST:
        assert part.budget, part.name
        assert part.marks.endswith("not matrix"), part.name
    assert all(part.budget is None for part in MATRIX)


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("sandboxes/providers/daytona/provider.py", ["daytona"]),
        ("sandboxes/providers/remote/provider.py", [*VENDORS]),
        ("leases/coding/git.py", ["e2e-matrix", "docker-matrix"]),
        ("sandboxes/providers/kubernetes", ["kubernetes"]),
        ("sandboxes/providers/kubernetes_notes.py", []),
        ("leases/atproto/service.py", ["database-matrix"]),
        ("tests/unit/sandboxes/test_pool.py", []),
        ("tests/unit/sandboxes/kubernetes/test_faults.py", ["kubernetes"]),
        ("a_new_folder/module.py", []),
    ],
)
def test_the_longest_path_decides(path: str, parts: list[str]) -> None:
    assert select_parts([path]) == parts


def test_changes_of_several_folders_add_each_part_once() -> None:
    added = select_parts(["sandboxes/providers/modal/a.py", "tests/emulators/modal.py", "sandboxes/providers/runloop/a.py"])
    assert added == ["modal", "runloop"]  # in the order of the table
    assert find_rule("README.md") is None


def run_git(directory: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.invalid"]
    subprocess.run(["git", *identity, *arguments], cwd=directory, check=True, capture_output=True)


def commit(directory: Path, name: str) -> None:
    (directory / name).write_text(name)
    run_git(directory, "add", name)
    run_git(directory, "commit", "-m", name)


def test_changes_are_those_since_the_last_commit_of_the_remote_branch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BASE_VARIABLE, raising=False)
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    origin.mkdir()
    run_git(origin, "init", "--initial-branch=main")
    commit(origin, "first")
    monkeypatch.setattr(changes, "REPO", origin)
    assert changes.list_changes() == []  # no remote branch: no addition
    run_git(tmp_path, "clone", str(origin), str(clone))
    monkeypatch.setattr(changes, "REPO", clone)
    assert changes.list_changes() == []
    commit(clone, "committed")
    (clone / "first").write_text("changed")
    (clone / "untracked").write_text("")
    assert changes.list_changes() == ["committed", "first", "untracked"]
    run_git(clone, "push", "origin", "main:pushed")
    run_git(clone, "branch", "--set-upstream-to=origin/pushed")
    assert changes.list_changes() == ["first", "untracked"]


def test_a_part_with_a_pattern_takes_files_and_directories_whose_fixtures_match(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.lanes.table.REPO", tmp_path)
    for name, text in {
        "tests/a/test_one.py": "mark.docker", "tests/a/test_two.py": "mark.dockerless", "tests/a/support.py": "mark.docker",
        "tests/b/conftest.py": "mark.docker", "tests/b/test_three.py": "",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    part = Part("x", ("tests/a", "tests/b"), "docker", SQLITE, containing=r"\bmark\.docker\b")
    assert part.list_files() == ["tests/a/test_one.py", "tests/b"]
    assert replace(part, ignored=("tests/a",)).list_files() == ["tests/b"]
    assert replace(part, ignored=("tests/a/test_one.py",)).list_files() == ["tests/b"]

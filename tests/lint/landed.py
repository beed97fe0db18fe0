"""Migrations of the base: databases exist to which they are applied, so none is edited, renamed or removed."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

from tests.lint.base import REPO, run_git

MIGRATIONS = ":(glob)*/migrations/*.py"
# Commit whose migrations were replaced by new initial ones (docs/decisions/0011). Against this commit and those before it,
# every migration counts as new, and none is missed.
REPLACED_AT = ""


@dataclass(frozen=True)
class Finding:
    path: str
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.rule}: {self.text}"


def list_landed(base: str, repo: Path = REPO) -> set[tuple[str, str]]:
    """Return app and name of the migrations that the base has."""
    if is_replaced(base, repo):
        return set()
    paths = run_git("ls-tree", "-r", "--name-only", base, repo=repo)
    return {split_path(path) for path in paths if is_migration(path)}


def check_landed(base: str, repo: Path = REPO) -> Iterator[Finding]:
    """Compare the migrations of the base with the working tree."""
    if is_replaced(base, repo):
        return
    for line in run_git("diff", "--name-status", "--no-renames", base, "--", MIGRATIONS, repo=repo):
        status, path = line.split("\t")
        if is_migration(path) and status != "A":
            act = "removed or renamed" if status == "D" else "edited"
            yield Finding(path, "landed", f"{act}, but databases have it applied. Add a migration instead.")


def is_replaced(base: str, repo: Path = REPO) -> bool:
    """Return whether all migrations of the base were replaced since."""
    return bool(REPLACED_AT) and run_git("merge-base", base, REPLACED_AT, repo=repo) == [base]


def is_migration(path: str) -> bool:
    parts = PurePath(path).parts
    return len(parts) == 3 and parts[1] == "migrations" and parts[2].endswith(".py") and parts[2] != "__init__.py"


def split_path(path: str) -> tuple[str, str]:
    parts = PurePath(path).parts
    return parts[0], PurePath(parts[2]).stem

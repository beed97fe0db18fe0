"""Parts of the matrix that have passed on a tree, so that an interrupted `make test-all` can be resumed."""

import hashlib
import json
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.lanes.processes import Result
from tests.lanes.table import PARTS, REPO

DIRECTORY = REPO / "build" / "test-all"  # ignored by Git


@dataclass
class Record:
    """Tests of each part that has passed, for one content of the work tree."""

    path: Path
    passed: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of_present_tree(cls) -> "Record":
        path = DIRECTORY / f"{compute_tree_digest()}.json"
        return cls(path, json.loads(path.read_text()) if path.exists() else {})

    def has_passed(self, part: str) -> bool:
        return part in self.passed

    def add(self, result: Result) -> None:
        """Keep the tests of a part that has passed, and forget an earlier success of one that has failed."""
        self.passed.pop(result.part.name, None)
        if result.passed:
            self.passed[result.part.name] = [cost.test for cost in result.costs]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.passed))

    def find_missing(self, tests: Iterable[str]) -> list[str]:
        """Return the tests that no part has run, unless a part that would run them has not passed."""
        if set(PARTS) - set(self.passed):
            return []
        run = {test for tests_of_part in self.passed.values() for test in tests_of_part}
        return sorted(set(tests) - run)


def compute_tree_digest() -> str:
    """Return a digest of the commit and of all changes to it, untracked files included."""
    digest = hashlib.sha256()
    for argv in (["rev-parse", "HEAD^{tree}"], ["diff", "HEAD"]):
        digest.update(subprocess.run(["git", *argv], cwd=REPO, capture_output=True, check=True).stdout)
    argv = ["git", "ls-files", "-z", "--others", "--exclude-standard"]
    for name in filter(None, subprocess.run(argv, cwd=REPO, capture_output=True, check=True).stdout.split(b"\0")):
        digest.update(name + b"\0" + (REPO / name.decode()).read_bytes())
    return digest.hexdigest()[:16]

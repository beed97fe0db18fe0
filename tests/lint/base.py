"""Commit that a change is compared with: the last one that the remote branch has too."""

import os
import subprocess
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
BASE_VARIABLE = "TEST_BASE"  # a commit, in place of the remote branch's
REMOTE_BRANCHES = ("@{upstream}", "refs/remotes/origin/HEAD", "refs/remotes/origin/main")
NO_BASE = f"There is no remote branch to compare with. {BASE_VARIABLE} names a commit."


def find_base(repo: Path = REPO) -> str:
    """Return the commit to compare with, or "" without one. Raise ValueError if TEST_BASE names none."""
    if chosen := os.environ.get(BASE_VARIABLE):
        if not (commits := run_git("rev-parse", "--verify", "--quiet", f"{chosen}^{{commit}}", repo=repo)):
            raise ValueError(f"{BASE_VARIABLE}: {chosen} is not a commit.")
        return commits[0]
    for branch in REMOTE_BRANCHES:
        if commits := run_git("merge-base", "HEAD", branch, repo=repo):
            return commits[0]
    return ""


def run_git(*arguments: str, repo: Path = REPO) -> list[str]:
    """Return the lines that a command of Git prints, none if it fails: no repository, or no such branch."""
    done = subprocess.run(["git", *arguments], cwd=repo, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else []

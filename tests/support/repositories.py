"""Bare Git repositories with a small Python project, made by the system's git."""

import subprocess
from pathlib import Path

PROJECT = {
    "calc.py": "def add(a, b):\n    return a - b\n",
    "test_calc.py": "from calc import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n",
    ".github/workflows/ci.yml": "on: push\n",
}
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin:/usr/local/bin", "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_AUTHOR_NAME": "Mallory", "GIT_AUTHOR_EMAIL": "mallory@example.org",
    "GIT_COMMITTER_NAME": "Mallory", "GIT_COMMITTER_EMAIL": "mallory@example.org",
}  # fmt: skip


def run_git(directory: Path, *args: str, stdin: bytes = b"") -> bytes:
    return subprocess.run(["git", *args], cwd=directory, env=ENVIRONMENT, input=stdin, capture_output=True, check=True).stdout


def git(directory: Path, *args: str, stdin: bytes = b"") -> str:
    return run_git(directory, *args, stdin=stdin).decode().strip()


def write_files(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def create_project(folder: Path) -> Path:
    """Create a bare repository whose branch main has the project with a failing test. Return its path."""
    work, bare = folder / "project", folder / "project.git"
    work.mkdir(parents=True)
    git(work, "init", "--quiet", "-b", "main")
    write_files(work, PROJECT)
    git(work, "add", "-A")
    git(work, "commit", "--quiet", "-m", "Start")
    git(folder, "clone", "--quiet", "--bare", str(work), str(bare))
    return bare


def merge(bare: Path, branch: str) -> None:
    """Merge a branch into main, as a maintainer does."""
    tree = git(bare, "rev-parse", f"{branch}^{{tree}}")
    commit = git(bare, "commit-tree", tree, "-p", "main", "-p", branch, "-m", f"Merge {branch}")
    git(bare, "update-ref", "refs/heads/main", commit)

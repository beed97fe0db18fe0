"""Distributions of this repository, built without a package index, and directories with some installed packages only."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD = "from setuptools import setup; setup()"


def build_tree(source: Path, names: list[str], directory: Path) -> Path:
    """Build a project from these of its files and directories. Return a directory with the content of its wheel."""
    copy, tree = directory / "source", directory / "tree"
    copy.mkdir(parents=True)
    for name in names:  # setuptools writes beside its sources
        path = source / name
        if path.is_dir():
            shutil.copytree(path, copy / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
        else:
            shutil.copy(path, copy / name)
    subprocess.run([sys.executable, "-c", BUILD, "-q", "build", "--build-lib", str(tree)], cwd=copy, check=True)
    return tree


def link_package(name: str, directory: Path) -> None:
    """Link an installed package and the packages that it requires, without extras, into a directory."""
    directory.mkdir(exist_ok=True)
    distribution = importlib.metadata.distribution(name)
    for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
        if not (directory / top).exists():
            (directory / top).symlink_to(str(distribution.locate_file(top)))
    for requirement in distribution.requires or ():
        required = re.match(r"[A-Za-z0-9._-]+", requirement)
        if required and "extra ==" not in requirement and is_installed(required[0]):
            link_package(required[0], directory)


def is_installed(name: str) -> bool:
    """Return whether a package is installed. A requirement under another Python or system is not."""
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True

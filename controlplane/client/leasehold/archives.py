"""Directories as tar archives, packed and unpacked on this machine."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from .errors import LeaseholdError

HAS_FILTERS = hasattr(tarfile, "data_filter")  # Python 3.11.4 and newer


def pack_directory(directory: Path, target: str, archive: BinaryIO) -> None:
    """Write a tar whose names are below the directory `target` of the sandbox. Owners of files are not kept."""
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path, name in list_entries(directory, target):
            tar.add(path, arcname=name, recursive=False, filter=_without_owner)


def list_entries(directory: Path, target: str) -> Iterator[tuple[Path, str]]:
    """Yield each file, link and directory below a directory with its name in the tar, parents first."""
    if not directory.is_dir():
        raise NotADirectoryError(str(directory))
    for folder, folders, files in os.walk(directory):
        for name in sorted(folders + files):
            path = Path(folder, name)
            yield path, str(PurePosixPath(target, path.relative_to(directory).as_posix()))


def unpack_archive(archive: BinaryIO, source: str, directory: Path) -> None:
    """Unpack the entries below the directory `source` of the sandbox. No entry can be written outside of `directory`.

    The archive comes from a sandbox and is not trusted: links that lead outside and special files are errors."""
    if not HAS_FILTERS:
        raise LeaseholdError("Unpacking needs the filters of tarfile: Python 3.11.4 or newer.", code="python_too_old")
    archive.seek(0)
    directory.mkdir(parents=True, exist_ok=True)
    prefix = f"{source}/" if source else ""
    with tarfile.open(fileobj=archive) as tar:
        for member in tar:
            name = member.name.removeprefix("./")
            if not name.startswith(prefix) or name in ("", "."):
                continue
            link = member.linkname.removeprefix("./").removeprefix(prefix) if member.islnk() else member.linkname
            tar.extract(member.replace(name=name.removeprefix(prefix), linkname=link), directory, filter="data")


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member

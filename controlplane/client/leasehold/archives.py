"""Directories as tar archives, packed and unpacked on this machine."""

from __future__ import annotations

import contextlib
import math
import os
import posixpath
import shutil
import stat
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from .errors import LeaseholdError

HAS_DESCRIPTORS = {os.open, os.mkdir, os.unlink, os.symlink, os.link, os.stat} <= os.supports_dir_fd  # not on Windows
MAX_LINKS_ON_A_PATH = 40  # as Linux counts them
Parts = tuple[str, ...]  # of a path below the directory


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


def unpack_archive(archive: BinaryIO, source: str, directory: Path) -> list[str]:
    """Unpack the entries below the directory `source` of the sandbox. Return the names of the links that were left out.

    The archive comes from a sandbox and is not trusted. No entry can be written outside of `directory`. A link that leads
    outside, such as that of a virtual environment to the interpreter, is left out. Raise LeaseholdError for a name that leads
    outside, a special file, an entry below a link, and an archive or a disk that fails. Entries before that have been written.

    1. Create directories and files. Directories are opened one by one without following links, those that were there before
       included, and a file replaces an entry of its name.
    2. Create the links, when no further entry can be written through them."""
    if not HAS_DESCRIPTORS:
        raise LeaseholdError("Unpacking a directory needs a POSIX system: it follows no links.", code="not_supported")
    try:
        return _unpack(archive, source, directory)
    except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError) as error:
        detail = f"The archive could not be unpacked into {directory}: {error or type(error).__name__}"
        raise LeaseholdError(detail, code="unpack_failed") from error


def _unpack(archive: BinaryIO, source: str, directory: Path) -> list[str]:
    archive.seek(0)
    directory.mkdir(parents=True, exist_ok=True)
    links: dict[Parts, Parts] = {}
    files: set[Parts] = set()
    omitted: set[Parts] = set()
    with _Tree(directory) as tree, tarfile.open(fileobj=archive, mode="r:") as tar:
        for member in tar:
            path = _find_path(member.name, source)
            if not path:
                continue
            links.pop(path, None)
            omitted.discard(path)
            if member.isdir():
                tree.make_directory(path)
            elif member.isreg() and not member.issparse():
                tree.write_file(path, tar, member)
                files.add(path)
            elif member.islnk():
                target = _find_path(member.linkname, source)
                if target not in files:
                    raise _refuse(member, "a hard link to a file that is not in the archive")
                tree.link_file(target, path)
                files.add(path)
            elif not member.issym():
                raise _refuse(member, "neither a file, a directory nor a link")
            elif (resolved := _resolve_link(path, member)) is not None:
                links[path] = resolved
            else:
                omitted.add(path)
        # Without an omitted link another one may lead through a link that was there before: look again until all are inside.
        while refused := {path for path, target in links.items() if not tree.is_inside(path, target, links)}:
            omitted |= refused
            links = {path: target for path, target in links.items() if path not in refused}
        for path, target in links.items():
            tree.make_link(path, target)
    return sorted("/".join(path) for path in omitted)


def _find_path(name: str, source: str) -> Parts:
    """Return a name below `source` as parts, empty for `source` itself and for a name elsewhere. Raise LeaseholdError."""
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise LeaseholdError(f"The archive has an entry outside of the directory: {name[:200]!r}", code="unsafe_archive")
    prefix = tuple(part for part in source.split("/") if part)
    return parts[len(prefix) :] if parts[: len(prefix)] == prefix else ()


def _resolve_link(path: Parts, member: tarfile.TarInfo) -> Parts | None:
    """Return the path to which a link leads, if `..` stands only at its beginning. None if that is, or may be, outside.

    The parents of a link are no links, so that no other entry can change where such a link leads."""
    target = [part for part in member.linkname.split("/") if part not in ("", ".")]
    parents = 0
    while parents < len(target) and target[parents] == "..":
        parents += 1
    if member.linkname.startswith("/") or "\0" in member.linkname or ".." in target[parents:] or parents > len(path) - 1:
        return None
    return (*path[: len(path) - 1 - parents], *target[parents:])


def _refuse(member: tarfile.TarInfo, reason: str) -> LeaseholdError:
    return LeaseholdError(f"{member.name[:200]!r} is {reason}.", code="unsafe_archive")


class _Tree:
    """Directory on this machine that is written through descriptors, without following links."""

    def __init__(self, directory: Path) -> None:
        self._root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)

    def __enter__(self) -> _Tree:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._root)

    def make_directory(self, path: Parts) -> None:
        with self._open(path):
            pass

    def write_file(self, path: Parts, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Write a file with the executable bits of the archive. An existing one is replaced, not written into."""
        content = tar.extractfile(member)
        assert content is not None
        with self._replace(path) as parent:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with open(os.open(path[-1], flags, 0o600, dir_fd=parent), "wb") as file:
                shutil.copyfileobj(content, file)
                os.fchmod(file.fileno(), member.mode & 0o755 | 0o600)
                file.flush()
                if math.isfinite(member.mtime):
                    with contextlib.suppress(OverflowError, OSError):  # not a time of this file system
                        os.utime(file.fileno(), (member.mtime, member.mtime))

    def link_file(self, target: Parts, path: Parts) -> None:
        """Create another name of a file."""
        if target == path:
            return
        with self._open(target[:-1]) as source, self._replace(path) as parent:
            os.link(target[-1], path[-1], src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)

    def is_inside(self, path: Parts, target: Parts, links: Mapping[Parts, Parts]) -> bool:
        """Return False if a link is below another one, leads through one that was there before, or leads in circles."""
        is_refused = any(path[:depth] in links for depth in range(len(path)))
        rest, reached, followed = list(target), tuple[str, ...](), 0
        while rest and not is_refused:
            reached = (*reached, rest.pop(0))
            if reached in links:
                rest, reached, followed = [*links[reached], *rest], (), followed + 1
                is_refused = followed > MAX_LINKS_ON_A_PATH
            else:
                is_refused = self._is_link(reached)
        return not is_refused

    def make_link(self, path: Parts, target: Parts) -> None:
        """Create a link to a path of the directory. It stays valid if the directory is moved."""
        relative = posixpath.relpath("/" + "/".join(target), "/" + "/".join(path[:-1]))
        with self._replace(path) as parent:
            os.symlink(relative, path[-1], dir_fd=parent)

    def _is_link(self, path: Parts) -> bool:
        try:
            with self._open(path[:-1], make=False) as parent:
                return stat.S_ISLNK(os.stat(path[-1], dir_fd=parent, follow_symlinks=False).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    @contextlib.contextmanager
    def _replace(self, path: Parts) -> Iterator[int]:
        """Remove a file or link, and yield the descriptor of its directory."""
        with self._open(path[:-1]) as parent:
            try:
                os.unlink(path[-1], dir_fd=parent)
            except FileNotFoundError:
                pass
            except IsADirectoryError as error:
                message = f"{'/'.join(path)[:200]!r} is a directory, and a file or link in the archive."
                raise LeaseholdError(message, code="unsafe_archive") from error
            yield parent

    @contextlib.contextmanager
    def _open(self, path: Parts, *, make: bool = True) -> Iterator[int]:
        """Yield the descriptor of a directory, which is created with its parents if `make`."""
        descriptor = os.dup(self._root)
        try:
            for depth, name in enumerate(path, 1):
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, dir_fd=descriptor)
                try:
                    below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
                except NotADirectoryError as error:  # a file, or a link
                    if not make:
                        raise
                    message = f"{'/'.join(path[:depth])[:200]!r} is no directory, and an entry of the archive is below it."
                    raise LeaseholdError(message, code="unsafe_archive") from error
                os.close(descriptor)
                descriptor = below
            yield descriptor
        finally:
            os.close(descriptor)


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member

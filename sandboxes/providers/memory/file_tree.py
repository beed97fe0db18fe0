"""File tree of a memory sandbox: entries by absolute path."""

import io
import itertools
import tarfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import BinaryIO

from sandboxes.image.files import KEPT_MODE_BITS, Omissions, build_last_member, format_exact_mtime, parse_exact_mtime
from sandboxes.image.files import BadPath as InvalidMember
from sandboxes.providers.arguments import split_sandbox_path
from sandboxes.providers.base import FileStat
from sandboxes.providers.errors import BadPath, FileExists, NoSuchFile

_stamps = itertools.count(1)


@dataclass(frozen=True)
class _Stamped:
    """Modification time and unique stamp of an immutable entry. A change replaces the entry."""

    mtime_ns: int = field(default_factory=time.time_ns, kw_only=True, compare=False)
    stamp: int = field(default_factory=lambda: next(_stamps), kw_only=True, compare=False, init=False)


@dataclass(frozen=True)
class File(_Stamped):
    """Regular file. The same object under several paths is a file with hard links."""

    content: bytes
    mode: int = 0o644


@dataclass(frozen=True)
class Link(_Stamped):
    """Symbolic link."""

    target: str


@dataclass(frozen=True)
class Folder(_Stamped):
    """Directory."""

    mode: int = 0o755


Entry = File | Link | Folder
Files = dict[str, Entry]  # absolute path -> entry; all parent directories of an entry are present


def check_parents(files: Files, path: str) -> None:
    """Raise BadPath if the path is malformed or a parent is not a directory. Missing parents are allowed."""
    root, parts = split_sandbox_path(path)
    for parent in itertools.accumulate(parts[:-1], lambda a, b: f"{a}/{b}", initial=root):
        if not isinstance(files.get(parent, Folder()), Folder):
            raise BadPath(f"{parent} is not a directory.")


def get_regular_file(files: Files, path: str) -> File:
    """Return the regular file at a path. Raise NoSuchFile, BadPath."""
    check_parents(files, path)
    entry = files.get(path)
    if entry is None:
        raise NoSuchFile(f"There is no file {path}.")
    if not isinstance(entry, File):
        raise BadPath(f"{path} is not a regular file.")
    return entry


def put_entry(files: Files, path: str, entry: Entry) -> None:
    """Add or replace an entry and add missing parents. Raise BadPath if a non-directory would replace a directory."""
    check_parents(files, path)
    if isinstance(files.get(path), Folder) and not isinstance(entry, Folder):
        raise BadPath(f"{path} is a directory.")
    files[path] = entry
    while (path := path.rpartition("/")[0]) and path not in files:
        files[path] = Folder()


def move_entry(files: Files, source: str, target: str, *, overwrite: bool) -> None:
    """Rename an entry and all entries below it. Raise NoSuchFile, FileExists, BadPath as Provider.move_file does."""
    check_parents(files, source)
    check_parents(files, target)
    if source not in files:
        raise NoSuchFile(f"There is no file {source}.")
    if target.startswith(source + "/"):
        raise BadPath(f"{target} is below {source}.")
    if target in files and not overwrite:
        raise FileExists(f"{target} exists.")
    if target == source:
        return
    moves_folder, replaced = isinstance(files[source], Folder), files.get(target)
    if replaced and (isinstance(replaced, Folder) != moves_folder or list_below(files, target)):
        raise BadPath(f"{target} is of another kind, or a directory that is not empty.")
    moved = [(source, files[source]), *list_below(files, source)]
    for path, _ in moved:
        del files[path]
    for path, entry in moved:
        files.pop(target + path[len(source) :], None)
        put_entry(files, target + path[len(source) :], entry)


def list_below(files: Files, directory: str) -> list[tuple[str, Entry]]:
    """List all entries below a directory as (path, entry), parents before children."""
    return sorted(
        ((path, entry) for path, entry in [*files.items()] if path.startswith(directory + "/")), key=lambda pair: pair[0]
    )


def stat_entry(entry: Entry) -> FileStat:
    """Return an entry's metadata."""
    stamp, mtime = f"{entry.stamp}", max(entry.mtime_ns // 10**9, 0)
    if isinstance(entry, File):
        return FileStat("file", entry.mode & 0o777, len(entry.content), mtime, stamp)
    if isinstance(entry, Link):
        return FileStat("link", 0o777, 0, mtime, stamp, entry.target)
    return FileStat("directory", entry.mode & 0o777, 0, mtime, stamp)


def write_tar(out: BinaryIO, entries: Iterable[tuple[str, Entry]], *, exact: bool) -> None:
    """Write entries by their names in the tar, as files.pack does."""
    first_names, omissions = dict[int, str](), Omissions()
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for name, entry in entries:
            member, content = _build_tar_member(name, entry)
            if exact:
                if not isinstance(entry, Link):
                    member.mode = entry.mode & KEPT_MODE_BITS
                    omissions.note_mode(name, entry.mode)
                if record := format_exact_mtime(entry.mtime_ns):
                    member.pax_headers = {"mtime": record}
                first = first_names.setdefault(id(entry), name)
                if isinstance(entry, File) and first != name:
                    member.type, member.linkname, member.size, content = tarfile.LNKTYPE, first, 0, None
            tar.addfile(member, content)
        if exact:
            tar.addfile(build_last_member(omissions.kinds))


def _build_tar_member(name: str, entry: Entry) -> tuple[tarfile.TarInfo, BinaryIO | None]:
    """Return an entry's tar header, and its content if it is a file."""
    member, stat = tarfile.TarInfo(name), stat_entry(entry)
    member.mode, member.mtime, member.size, member.linkname = stat.mode, stat.mtime, stat.size, stat.target
    if isinstance(entry, File):
        return member, io.BytesIO(entry.content)
    member.type = tarfile.SYMTYPE if isinstance(entry, Link) else tarfile.DIRTYPE
    return member, None


def unpack_member(files: Files, root: str, member: tarfile.TarInfo, tar: tarfile.TarFile) -> None:
    """Add a tar member below `root`. Raise BadPath for paths outside of it and for special files."""
    path, mode, mtime_ns = _resolve_member_path(root, member.name), member.mode & KEPT_MODE_BITS, _parse_mtime(member)
    if path == root:
        return
    if member.isdir():
        if not isinstance(files.get(path, Folder()), Folder):
            raise BadPath(f"{member.name} exists and is not a directory.")
        put_entry(files, path, Folder(mode, mtime_ns=mtime_ns))
    elif member.issym():
        put_entry(files, path, Link(member.linkname, mtime_ns=mtime_ns))
    elif member.islnk():
        target = files.get(_resolve_member_path(root, member.linkname))
        if not isinstance(target, File):
            raise BadPath(f"{member.name} is a hard link to {member.linkname}, which is not a file.")
        put_entry(files, path, target)
    elif member.isreg():
        content = tar.extractfile(member)
        assert content is not None
        put_entry(files, path, File(content.read(), mode, mtime_ns=mtime_ns))
    else:
        raise BadPath(f"{member.name} is a device or a pipe.")


def _parse_mtime(member: tarfile.TarInfo) -> int:
    try:
        return parse_exact_mtime(member)
    except InvalidMember as error:
        raise BadPath(f"{error}.") from None


def _resolve_member_path(root: str, name: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts:
        raise BadPath(f"{name!r} is outside of {root}.")
    return "/".join([root, *parts])

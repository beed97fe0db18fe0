"""File operations below a root directory that never follow a symbolic link.

    files.py VERB ROOT ...    paths are read from stdin; see main()

Directories are opened one component at a time, relative to their parent and with O_NOFOLLOW. A program that modifies the tree
concurrently can make a call fail, but cannot redirect it. For the same reason modes and times are never changed by path.
Files and directories whose owner has no permissions on them are opened nevertheless, so that state is always saved: permissions
are granted temporarily, and the mode is restored.
One file with the standard library only: sandboxes execute it by its path as an isolated Python (-I -S), which imports no module
beside it. Providers on the host import the same file. Modules that few operations need are imported by these, because their
imports take longer than reading or writing a small file."""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import stat
import sys
import time
from functools import cache

TYPE_CHECKING = False  # as in typing, whose import takes milliseconds
if TYPE_CHECKING:
    import re
    import tarfile
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from typing import IO, Any, BinaryIO, Self

NO_FILE, BAD_PATH, TOO_LARGE, EXISTS = 3, 4, 5, 6  # exit codes of the command line
CHUNK_BYTES = 1 << 18
MAX_OPEN_DIRECTORIES = 200  # descriptors held for one path
MAX_CLEAR_DEPTH = 50  # `clear` moves deeper directories to the root instead of descending
MAX_PATH_BYTES = 4000  # of a relative path; system calls accept up to 4096, so only malicious programs create longer paths
MAX_MTIME_SECONDS = 8**11 - 1  # maximum of a plain tar header
MAX_STORED_MTIME_SECONDS = 1 << 40  # beyond what any file system stores, and within what os.utime accepts
MIN_HOLE_BYTES = 64 << 10  # shorter holes of a sparse file are written as zeros
MAX_EXTENTS = 4096  # parts of a sparse file that have data; the rest of a file with more is written as it is read
MAX_SPARSE_DATA_BYTES = 8**11 - 1  # maximum of a plain tar header, without which tarfile does not find the next member
MAX_LINKED_FILES = 100_000  # files with several names that are recognized in one tree: a sandbox has little memory
MAX_REPORTED_PATHS, MAX_REPORTED_CHARACTERS = 5, 200  # of each kind of omission, and of each of these paths
OMISSIONS_RECORD = "LEASEHOLD.omitted"  # pax record of the last member
KEPT_MODE_BITS = 0o1777  # permissions and the sticky bit
UNLIMITED = 1 << 60
# Symbolic link, not a directory, socket, name too long.
_WRONG_TYPE_ERRNOS = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.ENAMETOOLONG)
_NOT_EMPTY_ERRNOS = (errno.ENOTEMPTY, errno.EEXIST)
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_REGULAR_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # O_NONBLOCK: opening a pipe must not block
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}

_SPECIAL_KINDS = {stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
_NO_HARD_LINKS_ERRNOS = (errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)

# Fields of FileStat in sandboxes/providers/base.py: kind, mode, size, mtime, stamp, target.
StatFields = tuple[str, int, int, int, str, str]


class BadPath(Exception):
    """The path leaves the root, contains a symbolic link, or is not a regular file."""


class TooLarge(Exception):
    """The content exceeds the limit."""


class Exists(Exception):
    """The target of a move exists."""


def read(root: str, parts: Sequence[str], limit: int) -> bytes:
    """Read one regular file. Raise FileNotFoundError, BadPath, or TooLarge above `limit` bytes."""
    with _DirectoryTree(root) as tree, _open_regular(tree.open(parts[:-1]), parts[-1]) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise TooLarge(f"{'/'.join(parts)} is larger than {limit} bytes")
    return content


def read_range(root: str, parts: Sequence[str], start: int, length: int) -> tuple[bytes, int]:
    """Return (at most `length` bytes from offset `start`, file size). Raise FileNotFoundError, BadPath."""
    with _DirectoryTree(root) as tree, _open_regular(tree.open(parts[:-1]), parts[-1]) as file:
        size = os.fstat(file.fileno()).st_size
        return os.pread(file.fileno(), min(length, size - start), start) if start < size else b"", size


def write(root: str, parts: Sequence[str], content: bytes) -> None:
    """Create or atomically replace one file, creating missing parent directories. Raise BadPath."""
    with _DirectoryTree(root, writing=True) as tree:
        parent = tree.open(parts[:-1], make=True)
        status = _lstat_or_none(parent, parts[-1])
        if status is not None and not stat.S_ISREG(status.st_mode):
            raise BadPath(f"{'/'.join(parts)} is not a regular file")
        new = _temporary_name()
        try:
            with _create_file(parent, new) as file:
                file.write(content)
                os.fchmod(file.fileno(), stat.S_IMODE(status.st_mode) if status else 0o644)
            os.rename(new, parts[-1], src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            _unlink(parent, new)
            raise


def remove(root: str, parts: Sequence[str]) -> None:
    """Remove one regular file. Raise FileNotFoundError, BadPath."""
    with _DirectoryTree(root, writing=True) as tree:
        parent = tree.open(parts[:-1])
        if not stat.S_ISREG(os.lstat(parts[-1], dir_fd=parent).st_mode):
            raise BadPath(f"{'/'.join(parts)} is not a regular file")
        os.unlink(parts[-1], dir_fd=parent)


def make_directory(root: str, parts: Sequence[str]) -> None:
    """Create a directory and its missing parents. An existing directory is success. Raise BadPath."""
    with _DirectoryTree(root, writing=True) as tree:
        tree.open(parts, make=True)


def move(root: str, source: Sequence[str], target: Sequence[str], *, overwrite: bool) -> None:
    """Rename one file, link or directory, creating missing parents of the target. Links are not followed.

    With `overwrite` a file or link replaces a file or link, and a directory an empty directory. Raise FileNotFoundError for the
    source, Exists without `overwrite`, and BadPath."""
    with contextlib.ExitStack() as stack:
        tree, target_tree, moved = (stack.enter_context(_DirectoryTree(root, writing=True)) for _ in range(3))
        old_parent, name = tree.open(source[:-1]), source[-1]
        is_directory = stat.S_ISDIR(os.lstat(name, dir_fd=old_parent).st_mode)
        if is_directory:
            if tuple(target[: len(source)]) == tuple(source) and len(target) > len(source):
                raise BadPath(f"{'/'.join(target)} is below {'/'.join(source)}")
            moved.open(source)  # another parent is an entry of the directory, which has to be writable
        new_parent, new_name = target_tree.open(target[:-1], make=True), target[-1]
        if not overwrite:
            _reserve_name(new_parent, new_name, "/".join(target), is_directory=is_directory)
        try:
            os.rename(name, new_name, src_dir_fd=old_parent, dst_dir_fd=new_parent)
        except OSError as error:
            if not overwrite:
                _remove_entry(new_parent, new_name)
            if error.errno in (*_NOT_EMPTY_ERRNOS, errno.EISDIR, errno.ENOTDIR):
                raise BadPath(f"{'/'.join(target)} is of another kind, or a directory that is not empty") from error
            if error.errno in (errno.EXDEV, errno.EINVAL):
                raise BadPath(f"{'/'.join(source)} cannot be moved to {'/'.join(target)}: {error.strerror}") from error
            raise


def _reserve_name(parent: int, name: str, path: str, *, is_directory: bool) -> None:
    """Create an empty entry for a rename to replace, which unlike a check cannot overtake a program. Raise Exists, BadPath."""
    try:
        with _translate_errors(name, "is not a valid name"):
            if is_directory:
                os.mkdir(name, 0o700, dir_fd=parent)
            else:
                _create_file(parent, name).close()
    except FileExistsError as error:
        raise Exists(f"{path} exists") from error


def remove_files(root: str, paths: Iterable[str], *, seconds: float = math.inf) -> None:
    """Remove files, links and empty directories, deepest first. Absent paths, and paths behind a link, are skipped.

    Raise TimeoutError after `seconds`."""
    with _DirectoryTree(root, writing=True, until=time.monotonic() + seconds) as tree:
        for parts in sorted((_split_path(path) for path in paths), reverse=True):
            with contextlib.suppress(FileNotFoundError, BadPath):
                _remove_entry(tree.open(parts[:-1]), parts[-1])


def clear(root: str, recreated: Sequence[str] = (), *, seconds: float = math.inf) -> None:
    """Remove everything below `root`, regardless of depth and modes, then create the directories `recreated`.

    Raise TimeoutError after `seconds`, with a part removed."""
    with _DirectoryTree(root, writing=True) as tree:
        top = tree.open(())
        _empty_recursively(top, top, 0, time.monotonic() + seconds)
        for name in recreated:
            tree.open((name,), make=True)


def size(root: str, *, max_entries: int = UNLIMITED, seconds: float = math.inf) -> int:
    """Return the bytes that `pack` with `exact` stores of all regular files: of each file once, without the holes."""
    total, linked = 0, _LinkedFiles()
    for parent, name, path, status in _walk(root, max_entries=max_entries, until=time.monotonic() + seconds):
        if stat.S_ISREG(status.st_mode) and linked.find_first(status) is None:
            total += _measure_data(parent, name, status)
            linked.add(status, path)
    return total


def _measure_data(parent: int, name: str, status: os.stat_result) -> int:
    if not _may_have_holes(status):
        return status.st_size
    try:
        with _open_regular(parent, name) as file:
            return sum(length for _, length in _find_extents(file.fileno(), status.st_size))
    except (FileNotFoundError, BadPath):
        return 0  # removed or replaced since it was listed
    except PermissionError:  # another owner
        return status.st_size


def scan(
    root: str, under: str = "", *, deep: bool = True, max_entries: int, seconds: float = math.inf
) -> Iterator[tuple[str, StatFields]]:
    """Yield (path, fields) for all entries below a directory, parents before children.

    Paths longer than MAX_PATH_BYTES are omitted. Raise FileNotFoundError or BadPath for `under`, TimeoutError after `seconds`,
    and TooLarge above `max_entries` entries or if all paths, or all link targets, exceed max(1 MiB, 160 bytes *
    max_entries)."""
    target_budget = _name_budget_bytes(max_entries)
    for parent, name, path, status in _walk(root, under, deep=deep, max_entries=max_entries, until=time.monotonic() + seconds):
        kind, target, size, changed = status.st_mode & 0o170000, "", 0, status.st_ctime_ns
        if kind == stat.S_IFREG:
            size = status.st_size
        elif kind == stat.S_IFDIR:
            changed = status.st_mode & 0o777  # its entries are listed separately: only the mode counts
        elif kind == stat.S_IFLNK:
            try:
                target = _read_link(parent, name)
            except (FileNotFoundError, BadPath):
                continue  # removed or replaced since it was listed
            target_budget -= len(os.fsencode(target))
            if target_budget < 0:
                raise TooLarge("the link targets are too long in total")
        stamp = "%x.%x.%x" % (status.st_ino, changed, size)  # noqa: UP031 - twice as fast as an f-string
        yield path, (_KINDS.get(kind, "other"), status.st_mode & 0o777, size, _mtime_seconds(status), stamp, target)


def pack(
    root: str,
    out: BinaryIO,
    *,
    only: Collection[str] | None = None,
    exclude: Sequence[str] = (),
    exact: bool = False,
    seconds: float = math.inf,
) -> None:
    """Write all directories, regular files and symbolic links below `root` as a tar, sorted by name.

    Sockets, pipes, devices and paths longer than MAX_PATH_BYTES are omitted. A file whose size changes during the read is
    truncated or padded with zeros to its initial size. `only` and `exclude` as in Provider.get_files.

    With `exact` the tar also has hard links, holes of sparse files (in the GNU format 1.0), modification times to the
    nanosecond, and the sticky bit. Its last member is the root, with what is not kept in the pax record OMISSIONS_RECORD."""
    import tarfile

    skip, until, omissions = build_exclude_filter(exclude), time.monotonic() + seconds, Omissions()
    if only is None:
        entries = _walk(root, skip=skip, until=until, note_long_path=omissions.note_long_path)
    else:
        entries = _walk_selected(root, only, skip, until)
    linked = _LinkedFiles() if exact else None
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, bufsize=CHUNK_BYTES) as tar:
        for parent, name, path, status in entries:
            member = tarfile.TarInfo(path)
            member.mode, member.mtime = stat.S_IMODE(status.st_mode), _mtime_seconds(status)
            if exact:
                _describe_exactly(member, status)
                omissions.note(parent, name, path, status)
            try:
                if linked and (first := linked.find_first(status)) is not None:
                    member.type, member.linkname = tarfile.LNKTYPE, first
                    tar.addfile(member)
                elif stat.S_ISREG(status.st_mode):
                    _pack_file(tar, member, parent, name, linked, omissions)
                elif stat.S_ISDIR(status.st_mode):
                    member.type = tarfile.DIRTYPE
                    tar.addfile(member)
                elif stat.S_ISLNK(status.st_mode):
                    member.type, member.linkname = tarfile.SYMTYPE, _read_link(parent, name)
                    tar.addfile(member)
            except (FileNotFoundError, BadPath):
                pass  # removed or replaced since it was listed
            tar.members = []  # type: ignore[attr-defined]  # tarfile remembers all members, and a sandbox has little memory
        if exact:
            tar.addfile(build_last_member(omissions.kinds))


def _pack_file(
    tar: tarfile.TarFile, member: tarfile.TarInfo, parent: int, name: str, linked: _LinkedFiles | None, omissions: Omissions
) -> None:
    with _open_regular(parent, name) as file:
        status = os.fstat(file.fileno())
        member.size = status.st_size
        extents = _find_extents(file.fileno(), member.size) if linked and _may_have_holes(status) else []
        if linked and not linked.add(status, member.name):
            omissions.add("hard_link", member.name)
        if extents and sum(length for _, length in extents) < min(member.size, MAX_SPARSE_DATA_BYTES):
            tar.addfile(member, _describe_holes(member, file, extents))
        else:
            os.lseek(file.fileno(), 0, os.SEEK_SET)  # not file.seek, which trusts a position that _find_extents has changed
            tar.addfile(member, _ExactReader(file, member.size))


def _describe_exactly(member: tarfile.TarInfo, status: os.stat_result) -> None:
    """Set the mode and the modification time of a member as `pack` with `exact` stores them."""
    member.mode = status.st_mode & KEPT_MODE_BITS
    if record := format_exact_mtime(status.st_mtime_ns):
        member.pax_headers = {"mtime": record}


def format_exact_mtime(mtime_ns: int) -> str:
    """Return the value of the pax record `mtime`; "" if a plain header holds the time exactly."""
    seconds, nanoseconds = divmod(abs(mtime_ns), 10**9)
    if not nanoseconds and mtime_ns >= 0 and seconds <= MAX_MTIME_SECONDS:
        return ""
    fraction = f".{nanoseconds:09}" if nanoseconds else ""
    return f"{'-' if mtime_ns < 0 else ''}{seconds}{fraction}"


def parse_exact_mtime(member: tarfile.TarInfo) -> int:
    """Return the modification time of a member in nanoseconds, limited to MAX_STORED_MTIME_SECONDS. Raise BadPath."""
    import re

    match = re.fullmatch(r"(-?)([0-9]{1,20})(?:[.]([0-9]*))?", member.pax_headers.get("mtime", ""))
    try:
        nanoseconds = int(member.mtime) * 10**9
    except (ValueError, OverflowError) as error:  # not a number, or infinite
        raise BadPath(f"{member.name!r} has a modification time that no file has") from error
    if match:
        nanoseconds = int(match[2]) * 10**9 + int((match[3] or "")[:9].ljust(9, "0"))
        nanoseconds = -nanoseconds if match[1] else nanoseconds
    limit = MAX_STORED_MTIME_SECONDS * 10**9
    return min(max(nanoseconds, -limit), limit)


def _describe_holes(member: tarfile.TarInfo, file: BinaryIO, extents: list[tuple[int, int]]) -> _ExtentReader:
    """Make a member sparse. Return the content to store for it: the map of its extents, and their data."""
    ends_with_hole = sum(extents[-1]) < member.size
    numbers = [number for extent in [*extents, *[(member.size, 0)] * ends_with_hole] for number in extent]
    table = "".join(f"{number}\n" for number in [len(numbers) // 2, *numbers]).encode()
    table += bytes(-len(table) % 512)
    member.pax_headers = {
        **member.pax_headers, "GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": member.name,
        "GNU.sparse.realsize": str(member.size),
    }  # fmt: skip
    member.name, member.size = "GNUSparseFile.0/file", len(table) + sum(length for _, length in extents)
    return _ExtentReader(table, file.fileno(), extents)


def _may_have_holes(status: os.stat_result) -> bool:
    return status.st_size - status.st_blocks * 512 >= MIN_HOLE_BYTES


def _find_extents(fd: int, size: int) -> list[tuple[int, int]]:
    """Return the (offset, length) of the parts of a file that have data, in order, and at least one.

    Holes shorter than MIN_HOLE_BYTES count as data, and so does everything after MAX_EXTENTS parts."""
    extents: list[tuple[int, int]] = []
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
            end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        except OSError as error:
            if error.errno == errno.ENXIO:  # the rest is a hole
                break
            return [(0, size)]  # the file system does not say
        if start >= size:
            break
        if extents and start - sum(extents[-1]) < MIN_HOLE_BYTES:
            start = extents.pop()[0]
        elif len(extents) == MAX_EXTENTS - 1:
            end = size
        extents.append((start, end - start))
    return extents or [(0, 0)]


class _LinkedFiles:
    """First path of each regular file with several names, until all of its names have been seen."""

    def __init__(self) -> None:
        self._first: dict[tuple[int, int, int], tuple[int, str]] = {}  # identity -> (names not seen yet, first path)

    def find_first(self, status: os.stat_result) -> str | None:
        """Return the first path of the same unchanged file; None for a file that has not been seen."""
        if status.st_nlink < 2 or not stat.S_ISREG(status.st_mode):
            return None
        remaining, first = self._first.pop(self._identify(status), (0, None))
        if remaining > 1 and first is not None:
            self._first[self._identify(status)] = remaining - 1, first
        return first

    def add(self, status: os.stat_result, path: str) -> bool:
        """Remember a file that has several names. Return False if there are too many such files."""
        if status.st_nlink > 1:
            if len(self._first) >= MAX_LINKED_FILES:
                return False
            self._first[self._identify(status)] = status.st_nlink - 1, path
        return True

    @staticmethod
    def _identify(status: os.stat_result) -> tuple[int, int, int]:
        # With the time of the last change: a program may remove the file meanwhile, and the next file has the same inode.
        return status.st_dev, status.st_ino, status.st_ctime_ns


class Omissions:
    """Entries and attributes that an exact tar does not keep: by kind, the count and the first paths."""

    def __init__(self) -> None:
        self.kinds: dict[str, tuple[int, list[str]]] = {}

    def add(self, kind: str, path: str) -> None:
        count, paths = self.kinds.get(kind, (0, []))
        if len(paths) < MAX_REPORTED_PATHS:
            paths = [*paths, path[:MAX_REPORTED_CHARACTERS]]
        self.kinds[kind] = count + 1, paths

    def note_long_path(self, path: str) -> None:
        self.add("long_path", path)

    def note_mode(self, path: str, mode: int) -> None:
        if mode & (stat.S_ISUID | stat.S_ISGID):
            self.add("set_id_bit", path)

    def note(self, parent: int, name: str, path: str, status: os.stat_result) -> None:
        """Note what is not kept of an entry."""
        kind = stat.S_IFMT(status.st_mode)
        if kind in _SPECIAL_KINDS:
            self.add(_SPECIAL_KINDS[kind], path)
        elif kind != stat.S_IFLNK:
            self.note_mode(path, status.st_mode)
            if _has_extended_attributes(parent, name):
                self.add("extended_attribute", path)


def _has_extended_attributes(parent: int, name: str) -> bool:
    """Return whether an entry has attributes that its owner has set, or an access control list."""
    try:
        names = os.listxattr(f"/proc/self/fd/{parent}/{name}", follow_symlinks=False)
    except OSError:  # not supported, or removed since it was listed
        return False
    return any(attribute.startswith(("user.", "system.posix_acl_")) for attribute in names)


def build_last_member(omissions: Mapping[str, tuple[int, Sequence[str]]]) -> tarfile.TarInfo:
    """Return the last member of an exact tar: the root, with the omissions by kind."""
    import tarfile

    member = tarfile.TarInfo(".")
    member.type, member.mode = tarfile.DIRTYPE, 0o755
    if omissions:
        import json

        member.pax_headers = {OMISSIONS_RECORD: json.dumps(omissions, separators=(",", ":"))}
    return member


def unpack(root: str, source: BinaryIO) -> None:
    """Unpack a tar over the content of `root`.

    Raise BadPath for a member that is outside of `root`, would be written through a symbolic link, or is a device or a pipe,
    and for a truncated tar. Symbolic links may have any target: virtual environments contain absolute ones, and links are
    never followed here."""
    import tarfile

    try:
        _unpack(root, source)
    except (tarfile.TarError, ValueError) as error:  # ValueError: numbers in pax records
        raise BadPath(str(error)) from error


def _unpack(root: str, source: BinaryIO, *, below: tuple[str, ...] = ()) -> None:
    import tarfile

    directories: list[tuple[tuple[str, ...], int, int]] = []
    with (
        _DirectoryTree(root, writing=True) as tree,
        tarfile.open(fileobj=source, mode="r|", bufsize=CHUNK_BYTES, tarinfo=_build_member_type()) as tar,
    ):
        for member in tar:
            parts = below + _resolve_member_path(member.name)
            if member.isdir():
                tree.open(parts, make=True)
                directories.append((parts, member.mode & KEPT_MODE_BITS, parse_exact_mtime(member)))
            elif parts:
                _write_member(tree, parts, member, tar)
            tar.members = []  # type: ignore[attr-defined]  # as in pack
        if not getattr(tar, "ended", False):
            raise BadPath("the tar is truncated")
        for parts, mode, mtime in reversed(directories):  # last, because a mode may forbid writing; deepest first
            if parts:
                directory = tree.open(parts)
                os.utime(directory, ns=(mtime, mtime))
                tree.modes[directory] = mode


def seed(root: str, kind: str, source: BinaryIO) -> None:
    """Unpack a tar to skills/`kind` below `root`, unless the path is occupied. Concurrent readers see all of it or nothing.

    Raise BadPath as `unpack` does."""
    import tarfile

    with _DirectoryTree(root, writing=True) as tree:
        try:
            if _lstat_or_none(tree.open(("skills",), make=True), kind) is not None:
                return
        except BadPath:  # `skills` is a file or a link of the agent
            return
        new = _temporary_name()
        try:
            tree.open(("skills", new), make=True)
            _unpack(root, source, below=("skills", new))
            parent = tree.open(("skills",))
            os.rename(new, kind, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException as error:
            parent = tree.open(("skills",))
            _empty_directory(parent, parent, new, 0, math.inf)
            _remove_entry(parent, new)
            if isinstance(error, tarfile.TarError):
                raise BadPath(str(error)) from error
            exists_now = isinstance(error, OSError) and error.errno in (*_NOT_EMPTY_ERRNOS, errno.ENOTDIR)
            if not exists_now:
                raise


def build_exclude_filter(exclude: Sequence[str]) -> Callable[[str], bool]:
    """Return a predicate that tells whether a relative path matches one of the patterns.

    Patterns with a slash match the whole path, others its last element. Parents of the path are not considered."""
    names = _compile_patterns(pattern for pattern in exclude if "/" not in pattern)
    paths = _compile_patterns(pattern for pattern in exclude if "/" in pattern)
    return lambda path: bool(exclude) and bool(names.match(path.rpartition("/")[2]) or paths.match(path))


def list_path_prefixes(path: str) -> Iterator[str]:
    """Yield all prefixes of a path: a, a/b, a/b/c."""
    return itertools.accumulate(path.split("/"), "{}/{}".format)


def _compile_patterns(patterns: Iterable[str]) -> re.Pattern[str]:
    import fnmatch
    import re

    return re.compile("|".join(map(fnmatch.translate, patterns)) or r"(?!)")


def _write_member(tree: _DirectoryTree, parts: tuple[str, ...], member: tarfile.TarInfo, tar: tarfile.TarFile) -> None:
    parent, name = tree.open(parts[:-1], make=True), parts[-1]
    status, mtime = _lstat_or_none(parent, name), parse_exact_mtime(member)
    if status is not None and stat.S_ISDIR(status.st_mode):
        raise BadPath(f"{member.name} exists and is a directory")
    if member.issym():
        _unlink(parent, name)
        os.symlink(member.linkname, name, dir_fd=parent)
        os.utime(name, ns=(mtime, mtime), dir_fd=parent, follow_symlinks=False)
    elif member.isreg():
        _unlink(parent, name)
        with _create_file(parent, name) as file:
            _write_content(member, tar, file)
            os.utime(file.fileno(), ns=(mtime, mtime))
            os.fchmod(file.fileno(), member.mode & KEPT_MODE_BITS)
    elif member.islnk():
        _link_member(tree, _resolve_member_path(member.linkname), parts)
    else:
        raise BadPath(f"{member.name} is a device or a pipe")


def _write_content(member: tarfile.TarInfo, tar: tarfile.TarFile, file: BinaryIO) -> None:
    content: Any = tar.extractfile(member)
    extents: list[tuple[int, int]] = getattr(member, "sparse", None) or [(0, member.size)]
    position = 0
    for offset, length in extents:
        if offset < position or length < 0 or offset + length > member.size:
            raise BadPath(f"{member.name!r} has an invalid map of holes")
        content.raw.seek(offset)  # of the unbuffered file: the buffered one of Python 3.11 cannot seek in a stream
        file.seek(offset)
        _copy(content.raw, file, length)
        position = offset + length
    file.truncate(member.size)  # after a hole at the end


def _copy(source: IO[bytes], target: BinaryIO, length: int) -> None:
    """Copy `length` bytes, or fewer up to the end of the source."""
    while length > 0 and (chunk := source.read(min(length, CHUNK_BYTES))):
        target.write(chunk)
        length -= len(chunk)


def _link_member(tree: _DirectoryTree, old: tuple[str, ...], new: tuple[str, ...]) -> None:
    source_directory = os.dup(tree.open(old[:-1]))
    try:
        parent = tree.open(new[:-1])
        status = _lstat_or_none(source_directory, old[-1]) if old else None
        if status is None or not stat.S_ISREG(status.st_mode):
            raise BadPath(f"{'/'.join(new)} is a hard link to something that is not a regular file")
        if old != new:
            _unlink(parent, new[-1])
            try:
                os.link(old[-1], new[-1], src_dir_fd=source_directory, dst_dir_fd=parent, follow_symlinks=False)
            except OSError as error:
                if error.errno not in _NO_HARD_LINKS_ERRNOS:
                    raise
                _copy_file(source_directory, old[-1], parent, new[-1])
    finally:
        os.close(source_directory)


def _copy_file(source_directory: int, old: str, parent: int, new: str) -> None:
    """Copy a file, its mode and its modification time. For file systems without hard links, or with too few for one file."""
    with _open_regular(source_directory, old) as source, _create_file(parent, new) as file:
        status = os.fstat(source.fileno())
        _copy(source, file, status.st_size)
        file.flush()
        os.utime(file.fileno(), ns=(status.st_mtime_ns, status.st_mtime_ns))
        os.fchmod(file.fileno(), status.st_mode & KEPT_MODE_BITS)


@cache
def _build_member_type() -> type[tarfile.TarInfo]:
    import tarfile

    class EndCheckingTarInfo(tarfile.TarInfo):
        """Records on the tar that the end-of-archive block was read. A stream truncated between members looks complete."""

        @classmethod
        def fromtarfile(cls, tar: tarfile.TarFile) -> Self:
            try:
                return super().fromtarfile(tar)
            except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
                tar.ended = True  # type: ignore[attr-defined]
                raise

    return EndCheckingTarInfo


def _resolve_member_path(name: str) -> tuple[str, ...]:
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise BadPath(f"{name!r} is outside of the directory")
    return parts


def _walk(
    root: str,
    under: str = "",
    *,
    deep: bool = True,
    skip: Callable[[str], bool] | None = None,
    note_long_path: Callable[[str], object] | None = None,
    max_entries: int = UNLIMITED,
    until: float = math.inf,
) -> Iterator[tuple[int, str, str, os.stat_result]]:
    """Yield (descriptor of the parent, name, path relative to root, lstat) for all entries below a directory."""
    name_budget = _name_budget_bytes(max_entries)
    with _DirectoryTree(root, until=until) as tree:
        tree.open(_split_path(under))
        pending = [under]
        while pending:
            directory = pending.pop()
            try:
                parent = tree.open(_split_path(directory))
            except (FileNotFoundError, BadPath):
                continue  # removed since it was listed
            with os.scandir(parent) as entries:
                names = sorted(entry.name for entry in itertools.islice(entries, max_entries + 1))
            prefix, subdirectories = directory and directory + "/", list[str]()
            max_entries -= len(names)
            name_budget -= len(names) * len(os.fsencode(prefix)) + len(os.fsencode("".join(names)))
            if max_entries < 0 or name_budget < 0:
                raise TooLarge("too many entries")
            for name in names:
                path = prefix + name
                if skip and skip(path):
                    continue
                if _is_too_long(path):
                    if note_long_path:
                        note_long_path(path)
                    continue
                try:
                    status = os.lstat(name, dir_fd=parent)
                except FileNotFoundError:
                    continue
                if status.st_mode & 0o170000 == stat.S_IFDIR:
                    subdirectories.append(path)
                yield parent, name, path, status
            if deep:
                pending.extend(reversed(subdirectories))


def _walk_selected(
    root: str, only: Iterable[str], skip: Callable[[str], bool], until: float
) -> Iterator[tuple[int, str, str, os.stat_result]]:
    """Yield the existing entries among the given paths, as `_walk` does."""
    with _DirectoryTree(root, until=until) as tree:
        for parts in sorted({_split_path(path) for path in only}):
            path = "/".join(parts)
            if not any(map(skip, list_path_prefixes(path))) and not _is_too_long(path):
                with contextlib.suppress(FileNotFoundError, BadPath):
                    parent = tree.open(parts[:-1])
                    yield parent, parts[-1], path, os.lstat(parts[-1], dir_fd=parent)


class _DirectoryTree:
    """Directories below a root, opened without following links.

    The descriptors on the path to the last opened directory are cached, because the next one is usually close. At most
    MAX_OPEN_DIRECTORIES are cached, because descriptors are limited."""

    def __init__(self, root: str, *, writing: bool = False, until: float = math.inf) -> None:
        self._required_mode, self._deadline = 0o700 if writing else 0o500, until
        self.modes: dict[int, int] = {}  # descriptor -> mode to restore when it is closed
        self._path: list[str] = []
        self._open = [self._enter(None, root)]
        self._deep_descriptor: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._close_below(-1)

    def open(self, parts: Sequence[str], make: bool = False) -> int:
        """Return a descriptor of one directory, valid until the next call. Create missing directories if `make`.

        Raise FileNotFoundError, BadPath, or TimeoutError after the deadline."""
        if time.monotonic() > self._deadline:
            raise TimeoutError(errno.ETIMEDOUT, "deadline exceeded", "/".join(parts[:3]))
        pairs = enumerate(zip(self._path, parts, strict=False))
        self._close_below(next((depth for depth, (old, new) in pairs if old != new), min(len(self._path), len(parts))))
        for part in parts[len(self._path) : MAX_OPEN_DIRECTORIES]:
            self._open.append(self._enter(self._open[-1], part, make))
            self._path.append(part)
        for part in parts[MAX_OPEN_DIRECTORIES:]:
            child = self._enter(self._open[-1] if self._deep_descriptor is None else self._deep_descriptor, part, make)
            if self._deep_descriptor is not None:
                self._close(self._deep_descriptor)
            self._deep_descriptor = child
        return self._open[-1] if self._deep_descriptor is None else self._deep_descriptor

    def _enter(self, parent: int | None, name: str, make: bool = False) -> int:
        if make:
            with contextlib.suppress(FileExistsError), _translate_errors(name, "is not a directory"):
                os.mkdir(name, 0o755, dir_fd=parent)
        child, mode = _open_directory(parent, name, "is not a directory")
        current_mode = stat.S_IMODE(os.fstat(child).st_mode)
        if current_mode & self._required_mode != self._required_mode:
            with contextlib.suppress(PermissionError):  # another owner: the operation may be permitted nevertheless
                os.fchmod(child, current_mode | 0o700)
                mode = current_mode
        if mode is not None:
            self.modes[child] = mode
        return child

    def _close_below(self, depth: int) -> None:
        if self._deep_descriptor is not None:
            self._close(self._deep_descriptor)
            self._deep_descriptor = None
        while len(self._open) > depth + 1:
            self._close(self._open.pop())
        del self._path[max(depth, 0) :]

    def _close(self, directory: int) -> None:
        with contextlib.suppress(PermissionError):
            if directory in self.modes:
                os.fchmod(directory, self.modes.pop(directory))
        os.close(directory)


def _empty_recursively(top: int, directory: int, depth: int, until: float) -> None:
    """Remove all entries of a directory, repeatedly until it is empty: programs may be creating more."""
    has_entries = True
    while has_entries:
        has_entries = False
        with os.scandir(directory) as entries:
            for entry in entries:
                if time.monotonic() > until:
                    raise TimeoutError(errno.ETIMEDOUT, "deadline exceeded", entry.name)
                has_entries = True
                if entry.is_dir(follow_symlinks=False):
                    _empty_directory(top, directory, entry.name, depth, until)
                _remove_entry(directory, entry.name)


def _empty_directory(top: int, parent: int, name: str, depth: int, until: float) -> None:
    try:
        directory, _ = _open_directory(parent, name, "is no longer a directory")
    except (FileNotFoundError, BadPath):
        return
    try:
        with contextlib.suppress(PermissionError):  # another owner: an empty directory can be removed nevertheless
            os.fchmod(directory, 0o700)
        if depth < MAX_CLEAR_DEPTH:
            _empty_recursively(top, directory, depth + 1, until)
        else:
            os.rename(name, _temporary_name(), src_dir_fd=parent, dst_dir_fd=top)
    finally:
        os.close(directory)


def _remove_entry(parent: int, name: str) -> None:
    """Remove an entry, unless it is a directory that is not empty. An absent entry is success."""
    try:
        _unlink(parent, name)
    except IsADirectoryError:
        try:
            os.rmdir(name, dir_fd=parent)
        except OSError as error:
            if error.errno not in (*_NOT_EMPTY_ERRNOS, errno.ENOENT, errno.ENOTDIR):
                raise


def _open(parent: int | None, name: str, flags: int, problem: str) -> tuple[int, int | None]:
    """Return (descriptor, mode to restore or None). Raise BadPath with `problem` if the entry has the wrong type."""
    with _translate_errors(name, problem):
        try:
            return os.open(name, flags, dir_fd=parent), None
        except PermissionError:
            handle = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=parent)  # needs no permissions on the entry
        try:
            mode = os.fstat(handle).st_mode
            if stat.S_ISDIR(mode) or stat.S_ISREG(mode):
                os.chmod(f"/proc/self/fd/{handle}", stat.S_IMODE(mode) | 0o700)
        finally:
            os.close(handle)
        return os.open(name, flags, dir_fd=parent), stat.S_IMODE(mode)


def _open_directory(parent: int | None, name: str, problem: str) -> tuple[int, int | None]:
    child, mode = _open(parent, name, _DIRECTORY_FLAGS, problem)
    if _follows_links() and not os.path.samestat(os.fstat(child), os.lstat(name, dir_fd=parent)):
        os.close(child)
        raise BadPath(f"{name!r} {problem}")
    return child, mode


@cache
def _follows_links() -> bool:
    """Return whether the kernel ignores O_NOFOLLOW when opening a directory. Older versions of gVisor do."""
    try:
        os.close(os.open("/proc/self", _DIRECTORY_FLAGS))  # a link to a directory, on Linux
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _translate_errors(name: str, problem: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _WRONG_TYPE_ERRNOS:
            raise BadPath(f"{name!r} {problem}") from error
        raise


def _open_regular(parent: int, name: str) -> BinaryIO:
    fd, mode = _open(parent, name, _REGULAR_FILE_FLAGS, "is not a regular file")
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise BadPath(f"{name!r} is not a regular file")
    if mode is not None:
        os.fchmod(fd, mode)
    return os.fdopen(fd, "rb")


def _lstat_or_none(parent: int, name: str) -> os.stat_result | None:
    try:
        return os.lstat(name, dir_fd=parent)
    except FileNotFoundError:
        return None


def _read_link(parent: int, name: str) -> str:
    try:
        return os.readlink(name, dir_fd=parent)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise BadPath(f"{name!r} is not a symbolic link") from error
        raise


def _create_file(parent: int, name: str) -> BinaryIO:
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=parent)
    return os.fdopen(fd, "wb")


def _unlink(parent: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent)


def _temporary_name() -> str:
    return f".{os.getpid()}-{os.urandom(8).hex()}.tmp"


def _split_path(path: str) -> tuple[str, ...]:
    return tuple(path.split("/")) if path else ()


def _is_too_long(path: str) -> bool:
    # The first test is fast. A character has at most four bytes.
    return len(path) > MAX_PATH_BYTES // 4 and len(os.fsencode(path)) > MAX_PATH_BYTES


def _name_budget_bytes(max_entries: int) -> int:
    """Limit on the total length of the names of `max_entries` entries, in bytes: 16 MB for 100,000."""
    return max(160 * max_entries, 1 << 20)


def _mtime_seconds(status: os.stat_result) -> int:
    mtime = int(status[stat.ST_MTIME])  # an exact integer, unlike the attribute st_mtime
    return mtime if 0 <= mtime <= MAX_MTIME_SECONDS else min(max(mtime, 0), MAX_MTIME_SECONDS)


class _ExactReader:
    """Reader that returns exactly `size` bytes, the length already written to the tar header. Pads with zeros."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.remaining = file, size

    def read(self, limit: int = CHUNK_BYTES, /) -> bytes:
        wanted = min(limit, self.remaining)
        content = self.file.read(wanted)
        self.remaining -= wanted
        return content.ljust(wanted, b"\0")


class _ExtentReader:
    """Reader of the map of a sparse file, and then of its extents. Pads with zeros an extent that the file no longer has."""

    def __init__(self, table: bytes, fd: int, extents: list[tuple[int, int]]) -> None:
        self.table, self.fd, self.extents = table, fd, extents[::-1]

    def read(self, limit: int = CHUNK_BYTES, /) -> bytes:
        """Return exactly `limit` bytes, except at the end: a tar would else be shorter than its headers say."""
        chunks, wanted = [self.table[:limit]], limit - len(self.table[:limit])
        self.table = self.table[limit:]
        while wanted and self.extents:
            offset, length = self.extents.pop()
            chunk = os.pread(self.fd, min(length, wanted), offset).ljust(min(length, wanted), b"\0")
            chunks.append(chunk)
            wanted -= len(chunk)
            if len(chunk) < length:
                self.extents.append((offset + len(chunk), length - len(chunk)))
        return b"".join(chunks)


def main(argv: Sequence[str]) -> int:
    """Execute one command line. Return the exit code.

    Paths are read from stdin, each terminated by NUL, because a command line is limited in length."""
    out, source = sys.stdout.buffer, sys.stdin.buffer
    try:
        match list(argv):
            case ["read", root, limit]:
                out.write(read(root, _decode_path(source.read()), int(limit)))
            case ["read_range", root, start, length]:
                content, file_size = read_range(root, _decode_path(source.read()), int(start), int(length))
                out.write(b"%d\n" % file_size + content)
            case ["write", root]:
                path, _, content = source.read().partition(b"\0")
                write(root, _decode_path(path), content)
            case ["remove", root]:
                remove(root, _decode_path(source.read()))
            case ["mkdir", root]:
                make_directory(root, _decode_path(source.read()))
            case ["move", root, ("keep" | "overwrite") as existing]:
                old, new = _decode_paths(source.read())
                move(root, _split_path(old), _split_path(new), overwrite=existing == "overwrite")
            case ["remove_files", root]:
                remove_files(root, _decode_paths(source.read()))
            case ["clear", root, *recreated]:
                clear(root, recreated)
            case ["size", root]:
                print(size(root))
            case ["look", root, depth, max_entries]:
                [under] = _decode_paths(source.read())
                for path, fields in scan(root, under, deep=depth == "deep", max_entries=int(max_entries)):
                    out.write(encode_entry(path, *fields))
            case ["pack", root, selection, excluded]:
                words, pattern_count = _decode_paths(source.read()), int(excluded)
                only = words[pattern_count:] if selection == "only" else None
                pack(root, out, only=only, exclude=words[:pattern_count], exact=selection == "exact")
            case ["unpack", root]:
                unpack(root, source)
            case ["unpack_and_look", root, max_entries]:
                unpack(root, source)
                for path, fields in scan(root, max_entries=int(max_entries)):
                    out.write(encode_entry(path, *fields))
            case ["seed", root, kind]:
                seed(root, kind, source)
            case _:
                print("usage: files.py VERB ROOT ...", file=sys.stderr)
                return 2
        sys.stdout.flush()
    except FileNotFoundError as error:
        print(f"no such file: {error.filename}", file=sys.stderr)
        return NO_FILE
    except BadPath as error:
        print(error, file=sys.stderr)
        return BAD_PATH
    except TooLarge as error:
        print(error, file=sys.stderr)
        return TOO_LARGE
    except Exists as error:
        print(error, file=sys.stderr)
        return EXISTS
    except OSError as error:  # for example a full disk, or missing permissions
        print(error, file=sys.stderr)
        return 1
    return 0


def encode_entry(path: str, kind: str, mode: int, size: int, mtime: int, stamp: str, target: str) -> bytes:
    """Encode one entry for `look`: fields terminated by NUL."""
    return os.fsencode(f"{path}\0{kind}\0{mode:o}\0{size}\0{mtime}\0{stamp}\0{target}\0")


def _decode_paths(words: bytes) -> list[str]:
    return [os.fsdecode(word) for word in words.split(b"\0")[:-1]]


def _decode_path(path: bytes) -> tuple[str, ...]:
    return _split_path(os.fsdecode(path.rstrip(b"\0")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Files of a sandbox, read and written without following a symbolic link. Standard library only: this runs inside
sandboxes (`python3 files.py read /workspace LIMIT`, with the path on stdin) and is imported where there is no inside.

Directories are opened one component at a time, each relative to the one above and with O_NOFOLLOW: what a program does
to the tree meanwhile can make a call fail, and cannot lead it elsewhere. For the same reason nothing changes the mode
or the times of a file by its name.
A directory or file whose owner took away its own rights is opened all the same: state is saved whatever its mode. It is
lent the rights, and afterwards has its mode back."""

import contextlib
import errno
import fnmatch
import itertools
import math
import os
import re
import shutil
import stat
import sys
import tarfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache
from typing import BinaryIO, Self

NO_FILE, BAD_PATH, TOO_LARGE = 3, 4, 5  # exit codes
CHUNK_BYTES = 1 << 18
MAX_OPEN_DIRECTORIES = 200  # directories
MAX_CLEAR_DEPTH = 50  # directories below which `clear` brings up what it finds, instead of going there
MAX_PATH_BYTES = 4000  # bytes of a relative path; no system call takes more than 4096, so such files are made only on purpose
MAX_MTIME_SECONDS = 8**11 - 1  # seconds since 1970 that a tar's plain header can hold
UNLIMITED = 1 << 60
SKILLS_DIRECTORY = "/opt/leasehold/skills"
_WRONG_TYPE_ERRNOS = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.ENAMETOOLONG)  # a link, no directory, a socket, no name
_NOT_EMPTY_ERRNOS = (errno.ENOTEMPTY, errno.EEXIST)
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_REGULAR_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # NONBLOCK: opening a pipe must not wait for its writer
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}

StatFields = tuple[
    str, int, int, int, str, str
]  # of a Stat in sandboxes/providers/base.py: kind, mode, size, mtime, stamp, target


class BadPath(Exception):
    """The path leaves the root, goes through a symbolic link, or names no regular file."""


class TooLarge(Exception):
    """There is more than the limit."""


def read(root: str, parts: Sequence[str], limit: int) -> bytes:
    """The content of one regular file. FileNotFoundError, BadPath; TooLarge past `limit` bytes."""
    with _DirectoryTree(root) as tree, _open_regular(tree.open(parts[:-1]), parts[-1]) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise TooLarge(f"{'/'.join(parts)} is larger than {limit} bytes")
    return content


def read_range(root: str, parts: Sequence[str], start: int, length: int) -> tuple[bytes, int]:
    """At most `length` bytes of a regular file from `start`, and its size. FileNotFoundError, BadPath."""
    with _DirectoryTree(root) as tree, _open_regular(tree.open(parts[:-1]), parts[-1]) as file:
        size = os.fstat(file.fileno()).st_size
        return os.pread(file.fileno(), min(length, size - start), start) if start < size else b"", size


def write(root: str, parts: Sequence[str], content: bytes) -> None:
    """Replace or make one file, with the directories above it; whoever reads meanwhile sees the old one or the new."""
    with _DirectoryTree(root, writing=True) as tree:
        above = tree.open(parts[:-1], make=True)
        found = _lstat_or_none(above, parts[-1])
        if found is not None and not stat.S_ISREG(found.st_mode):
            raise BadPath(f"{'/'.join(parts)} is no regular file")
        new = _temporary_name()
        try:
            with _create_file(above, new) as file:
                file.write(content)
                os.fchmod(file.fileno(), stat.S_IMODE(found.st_mode) if found else 0o644)
            os.rename(new, parts[-1], src_dir_fd=above, dst_dir_fd=above)
        except BaseException:
            _unlink(above, new)
            raise


def remove(root: str, parts: Sequence[str]) -> None:
    """Remove one regular file. FileNotFoundError, BadPath."""
    with _DirectoryTree(root, writing=True) as tree:
        above = tree.open(parts[:-1])
        if not stat.S_ISREG(os.lstat(parts[-1], dir_fd=above).st_mode):
            raise BadPath(f"{'/'.join(parts)} is no regular file")
        os.unlink(parts[-1], dir_fd=above)


def remove_files(root: str, paths: Iterable[str], *, seconds: float = math.inf) -> None:
    """Remove files, links, and directories that are empty by then: the deepest first. What is not there, and what lies
    behind a link, is no error."""
    with _DirectoryTree(root, writing=True, until=time.monotonic() + seconds) as tree:
        for parts in sorted((_split_path(path) for path in paths), reverse=True):
            with contextlib.suppress(FileNotFoundError, BadPath):
                _remove_entry(tree.open(parts[:-1]), parts[-1])


def clear(root: str, again: Sequence[str] = (), *, seconds: float = math.inf) -> None:
    """Remove everything below `root`, however deep and whatever its mode, and make the directories `again`. TimeoutError
    after that many seconds, with some of it done."""
    with _DirectoryTree(root, writing=True) as tree:
        top = tree.open(())
        _empty_recursively(top, top, 0, time.monotonic() + seconds)
        for name in again:
            tree.open((name,), make=True)


def size(root: str, *, most: int = UNLIMITED, seconds: float = math.inf) -> int:
    """Sum of the sizes of all regular files, in bytes; a file with two names counts twice."""
    below = _walk(root, most=most, until=time.monotonic() + seconds)
    return sum(found.st_size for _, _, _, found in below if stat.S_ISREG(found.st_mode))


def scan(
    root: str, under: str = "", *, deep: bool = True, most: int, seconds: float = math.inf
) -> Iterator[tuple[str, StatFields]]:
    """What is below a directory, each after the directory it is in. FileNotFoundError or BadPath for `under`; TooLarge
    past `most` entries, past as many times 160 bytes, and a MiB, of paths, and past as much of targets; TimeoutError
    past `seconds`. Paths longer than LONGEST are left out."""
    room = _name_budget_bytes(most)
    for above, name, path, found in _walk(root, under, deep=deep, most=most, until=time.monotonic() + seconds):
        kind, target, size, changed = found.st_mode & 0o170000, "", 0, found.st_ctime_ns
        if kind == stat.S_IFREG:
            size = found.st_size
        elif kind == stat.S_IFDIR:
            changed = found.st_mode & 0o777  # what is in it is listed: only the mode is its own
        elif kind == stat.S_IFLNK:
            try:
                target = _read_link(above, name)
            except (FileNotFoundError, BadPath):
                continue  # it went away, or became something else, since it was listed
            room -= len(os.fsencode(target))
            if room < 0:
                raise TooLarge("what the links here point to is too long together")
        stamp = "%x.%x.%x" % (found.st_ino, changed, size)  # noqa: UP031 - it takes half the time
        yield path, (_KINDS.get(kind, "other"), found.st_mode & 0o777, size, _mtime_seconds(found), stamp, target)


def pack(
    root: str, out: BinaryIO, *, only: Collection[str] | None = None, exclude: Sequence[str] = (), seconds: float = math.inf
) -> None:
    """Write everything under `root` as a tar, sorted by name: directories, regular files and symbolic links (as links).
    Sockets, pipes and paths longer than LONGEST are left out. A file that changes size meanwhile is cut or filled up
    with zeros to the size it had. `only` and `exclude` as in the port's get_files."""
    skip, until = build_exclude_filter(exclude), time.monotonic() + seconds
    entries = _walk(root, skip=skip, until=until) if only is None else _walk_selected(root, only, skip, until)
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, bufsize=CHUNK_BYTES) as tar:
        for above, name, path, found in entries:
            member = tarfile.TarInfo(path)
            member.mode, member.mtime = stat.S_IMODE(found.st_mode), _mtime_seconds(found)
            try:
                if stat.S_ISREG(found.st_mode):
                    with _open_regular(above, name) as file:
                        member.size = os.fstat(file.fileno()).st_size
                        tar.addfile(member, _ExactReader(file, member.size))
                elif stat.S_ISDIR(found.st_mode):
                    member.type = tarfile.DIRTYPE
                    tar.addfile(member)
                elif stat.S_ISLNK(found.st_mode):
                    member.type, member.linkname = tarfile.SYMTYPE, _read_link(above, name)
                    tar.addfile(member)
            except (FileNotFoundError, BadPath):
                pass  # it went away, or became something else, since it was listed
            tar.members = []  # type: ignore[attr-defined]  # else it remembers every member: a sandbox has little memory


def unpack(root: str, source: BinaryIO) -> None:
    """Put a tar's members over what is under `root`. BadPath for a member that names no place inside, would be written
    through a symbolic link, or is a device or pipe, and for a tar that ends too early. A symbolic link itself may point
    anywhere: a virtual environment is full of such, and nothing here follows them."""
    directories: list[tuple[tuple[str, ...], int, float]] = []
    with (
        _DirectoryTree(root, writing=True) as tree,
        tarfile.open(fileobj=source, mode="r|", bufsize=CHUNK_BYTES, tarinfo=_EndCheckingTarInfo) as tar,
    ):
        for member in tar:
            parts = _resolve_member_path(member.name)
            if member.isdir():
                tree.open(parts, make=True)
                directories.append((parts, member.mode & 0o777, member.mtime))
            elif parts:
                _write_member(tree, parts, member, tar)
            tar.members = []  # type: ignore[attr-defined]  # as in pack
        if not getattr(tar, "ended", False):
            raise BadPath("the tar ends too early")
        for parts, mode, mtime in reversed(directories):  # last, as a directory may forbid writing; the deepest first
            if parts:
                here = tree.open(parts)
                os.utime(here, (mtime, mtime))
                tree.modes[here] = mode


def seed(source: str, under: str, root: str, kind: str) -> None:
    """Copy the directory `under` of one root to skills/`kind` of another, unless there is something there already, or in
    its way. Without such a directory nothing happens."""
    with _DirectoryTree(source) as there, _DirectoryTree(root, writing=True) as tree:
        try:
            there.open(_split_path(under))
            if _lstat_or_none(tree.open(("skills",), make=True), kind) is not None:
                return
        except (FileNotFoundError, BadPath):
            return
        new = _temporary_name()
        try:
            tree.open(("skills", new), make=True)
            for parent, name, path, found in _walk(source, under):
                parts = ("skills", new, *_split_path(path[len(under) + 1 :]))
                if stat.S_ISDIR(found.st_mode):
                    tree.open(parts, make=True)
                elif stat.S_ISREG(found.st_mode):
                    with _open_regular(parent, name) as file, _create_file(tree.open(parts[:-1]), name) as copy:
                        shutil.copyfileobj(file, copy)
                        os.fchmod(copy.fileno(), found.st_mode & 0o755 | 0o644)
            above = tree.open(("skills",))
            os.rename(new, kind, src_dir_fd=above, dst_dir_fd=above)
        except BaseException as error:
            above = tree.open(("skills",))
            _empty_directory(above, above, new, 0, math.inf)
            _remove_entry(above, new)
            if not isinstance(error, OSError) or error.errno not in (
                *_NOT_EMPTY_ERRNOS,
                errno.ENOTDIR,
            ):  # else: it is there now
                raise


def build_exclude_filter(exclude: Sequence[str]) -> Callable[[str], bool]:
    """Does a relative path match one of these patterns? Those with a slash match all of it, the others its last element;
    nothing is said about what is below."""
    names = _compile_patterns(pattern for pattern in exclude if "/" not in pattern)
    paths = _compile_patterns(pattern for pattern in exclude if "/" in pattern)
    return lambda path: bool(exclude) and bool(names.match(path.rpartition("/")[2]) or paths.match(path))


def list_path_prefixes(path: str) -> Iterator[str]:
    """a, a/b, a/b/c."""
    return itertools.accumulate(path.split("/"), "{}/{}".format)


def _compile_patterns(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, patterns)) or r"(?!)")


def _write_member(tree: "_DirectoryTree", parts: tuple[str, ...], member: tarfile.TarInfo, tar: tarfile.TarFile) -> None:
    above, name = tree.open(parts[:-1], make=True), parts[-1]
    found = _lstat_or_none(above, name)
    if found is not None and stat.S_ISDIR(found.st_mode):
        raise BadPath(f"{member.name} is a directory here")
    if member.issym():
        _unlink(above, name)
        os.symlink(member.linkname, name, dir_fd=above)
        os.utime(name, (member.mtime, member.mtime), dir_fd=above, follow_symlinks=False)
    elif member.isreg():
        _unlink(above, name)
        content = tar.extractfile(member)
        assert content is not None
        with _create_file(above, name) as file:
            while chunk := content.read(CHUNK_BYTES):
                file.write(chunk)
            file.flush()
            os.utime(file.fileno(), (member.mtime, member.mtime))
            os.fchmod(file.fileno(), member.mode & 0o777)
    elif member.islnk():
        _link_member(tree, _resolve_member_path(member.linkname), parts)
    else:
        raise BadPath(f"{member.name} is a device or a pipe")


def _link_member(tree: "_DirectoryTree", old: tuple[str, ...], new: tuple[str, ...]) -> None:
    there = os.dup(tree.open(old[:-1]))
    try:
        above = tree.open(new[:-1])
        found = _lstat_or_none(there, old[-1]) if old else None
        if found is None or not stat.S_ISREG(found.st_mode):
            raise BadPath(f"{'/'.join(new)} is a second name for no regular file")
        if old != new:
            _unlink(above, new[-1])
            os.link(old[-1], new[-1], src_dir_fd=there, dst_dir_fd=above, follow_symlinks=False)
    finally:
        os.close(there)


class _EndCheckingTarInfo(tarfile.TarInfo):
    """Notes on its tar that the end-of-archive block was seen: a stream cut off between two members looks complete."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            tar.ended = True  # type: ignore[attr-defined]
            raise


def _resolve_member_path(name: str) -> tuple[str, ...]:
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise BadPath(f"{name!r} leaves the directory")
    return parts


def _walk(
    root: str,
    under: str = "",
    *,
    deep: bool = True,
    skip: Callable[[str], bool] | None = None,
    most: int = UNLIMITED,
    until: float = math.inf,
) -> Iterator[tuple[int, str, str, os.stat_result]]:
    """(open directory, name in it, path relative to root, lstat) of everything below a directory."""
    room = _name_budget_bytes(most)
    with _DirectoryTree(root, until=until) as tree:
        tree.open(_split_path(under))
        waiting = [under]
        while waiting:
            here = waiting.pop()
            try:
                above = tree.open(_split_path(here))
            except (FileNotFoundError, BadPath):
                continue  # it went away since it was listed
            with os.scandir(above) as entries:
                names = sorted(entry.name for entry in itertools.islice(entries, most + 1))
            prefix, below = here and here + "/", list[str]()
            most -= len(names)
            room -= len(names) * len(os.fsencode(prefix)) + len(os.fsencode("".join(names)))
            if most < 0 or room < 0:
                raise TooLarge("there are too many files here")
            for name in names:
                path = prefix + name
                if _is_too_long(path) or (skip and skip(path)):
                    continue
                try:
                    found = os.lstat(name, dir_fd=above)
                except FileNotFoundError:
                    continue
                if found.st_mode & 0o170000 == stat.S_IFDIR:
                    below.append(path)
                yield above, name, path, found
            if deep:
                waiting.extend(reversed(below))


def _walk_selected(
    root: str, only: Iterable[str], skip: Callable[[str], bool], until: float
) -> Iterator[tuple[int, str, str, os.stat_result]]:
    """As _walk, of those paths that are there."""
    with _DirectoryTree(root, until=until) as tree:
        for parts in sorted({_split_path(path) for path in only}):
            path = "/".join(parts)
            if not any(map(skip, list_path_prefixes(path))) and not _is_too_long(path):
                with contextlib.suppress(FileNotFoundError, BadPath):
                    above = tree.open(parts[:-1])
                    yield above, parts[-1], path, os.lstat(parts[-1], dir_fd=above)


class _DirectoryTree:
    """The directories under a root. The way to the last one opened stays open, as the next is seldom far; but not all
    of a very long way, as descriptors are few."""

    def __init__(self, root: str, *, writing: bool = False, until: float = math.inf) -> None:
        self._required_mode, self._deadline = 0o700 if writing else 0o500, until
        self.modes: dict[int, int] = {}  # of open directories: the mode that one gets when it is closed
        self._way: list[str] = []
        self._open = [self._enter(None, root)]
        self._deep_descriptor: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._close_below(-1)

    def open(self, parts: Sequence[str], make: bool = False) -> int:
        """A descriptor of one directory, good until the next call. FileNotFoundError, BadPath; TimeoutError if it is
        too late."""
        if time.monotonic() > self._deadline:
            raise TimeoutError(errno.ETIMEDOUT, "this takes too long", "/".join(parts[:3]))
        pairs = enumerate(zip(self._way, parts, strict=False))
        self._close_below(next((at for at, (old, new) in pairs if old != new), min(len(self._way), len(parts))))
        for part in parts[len(self._way) : MAX_OPEN_DIRECTORIES]:
            self._open.append(self._enter(self._open[-1], part, make))
            self._way.append(part)
        for part in parts[MAX_OPEN_DIRECTORIES:]:
            below = self._enter(self._open[-1] if self._deep_descriptor is None else self._deep_descriptor, part, make)
            if self._deep_descriptor is not None:
                self._close(self._deep_descriptor)
            self._deep_descriptor = below
        return self._open[-1] if self._deep_descriptor is None else self._deep_descriptor

    def _enter(self, above: int | None, name: str, make: bool = False) -> int:
        if make:
            with contextlib.suppress(FileExistsError), _translate_errors(name, "on the way is a link or no directory"):
                os.mkdir(name, 0o755, dir_fd=above)
        below, mode = _open_directory(above, name, "on the way is a link or no directory")
        found = stat.S_IMODE(os.fstat(below).st_mode)
        if found & self._required_mode != self._required_mode:
            with contextlib.suppress(PermissionError):  # another's: then what is done in it may still be allowed
                os.fchmod(below, found | 0o700)
                mode = found
        if mode is not None:
            self.modes[below] = mode
        return below

    def _close_below(self, depth: int) -> None:
        if self._deep_descriptor is not None:
            self._close(self._deep_descriptor)
            self._deep_descriptor = None
        while len(self._open) > depth + 1:
            self._close(self._open.pop())
        del self._way[max(depth, 0) :]

    def _close(self, directory: int) -> None:
        with contextlib.suppress(PermissionError):
            if directory in self.modes:
                os.fchmod(directory, self.modes.pop(directory))
        os.close(directory)


def _empty_recursively(top: int, here: int, depth: int, until: float) -> None:
    """Remove whatever is in `here`, until a look finds nothing: programs may be making more."""
    found = True
    while found:
        found = False
        with os.scandir(here) as entries:
            for entry in entries:
                if time.monotonic() > until:
                    raise TimeoutError(errno.ETIMEDOUT, "this takes too long", entry.name)
                found = True
                if entry.is_dir(follow_symlinks=False):
                    _empty_directory(top, here, entry.name, depth, until)
                _remove_entry(here, entry.name)


def _empty_directory(top: int, above: int, name: str, depth: int, until: float) -> None:
    try:
        here, _ = _open_directory(above, name, "is no directory any more")
    except (FileNotFoundError, BadPath):
        return
    try:
        with contextlib.suppress(PermissionError):  # another's: if there is nothing in it, it can be removed all the same
            os.fchmod(here, 0o700)
        if depth < MAX_CLEAR_DEPTH:
            _empty_recursively(top, here, depth + 1, until)
        else:
            os.rename(name, _temporary_name(), src_dir_fd=above, dst_dir_fd=top)
    finally:
        os.close(here)


def _remove_entry(above: int, name: str) -> None:
    """Remove what has this name, unless it is a directory with something in it. Not there is success."""
    try:
        _unlink(above, name)
    except IsADirectoryError:
        try:
            os.rmdir(name, dir_fd=above)
        except OSError as error:
            if error.errno not in (*_NOT_EMPTY_ERRNOS, errno.ENOENT, errno.ENOTDIR):
                raise


def _open(above: int | None, name: str, flags: int, not_that: str) -> tuple[int, int | None]:
    """A descriptor, and the mode it had if it had to be lent rights. BadPath if `name` is `not_that`."""
    with _translate_errors(name, not_that):
        try:
            return os.open(name, flags, dir_fd=above), None
        except PermissionError:
            there = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=above)  # which needs no rights over it
        try:
            mode = os.fstat(there).st_mode
            if stat.S_ISDIR(mode) or stat.S_ISREG(mode):
                os.chmod(f"/proc/self/fd/{there}", stat.S_IMODE(mode) | 0o700)
        finally:
            os.close(there)
        return os.open(name, flags, dir_fd=above), stat.S_IMODE(mode)


def _open_directory(above: int | None, name: str, not_that: str) -> tuple[int, int | None]:
    below, mode = _open(above, name, _DIRECTORY_FLAGS, not_that)
    if _follows_links() and not os.path.samestat(os.fstat(below), os.lstat(name, dir_fd=above)):
        os.close(below)
        raise BadPath(f"{name!r} {not_that}")
    return below, mode


@cache
def _follows_links() -> bool:
    """Does this kernel follow a link although it was told not to, when it is to open a directory? gVisor's once did."""
    try:
        os.close(os.open("/proc/self", _DIRECTORY_FLAGS))  # a link to a directory, on Linux
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _translate_errors(name: str, not_that: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _WRONG_TYPE_ERRNOS:
            raise BadPath(f"{name!r} {not_that}") from error
        raise


def _open_regular(above: int, name: str) -> BinaryIO:
    fd, mode = _open(above, name, _REGULAR_FILE_FLAGS, "is no regular file")
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise BadPath(f"{name!r} is no regular file")
    if mode is not None:
        os.fchmod(fd, mode)
    return os.fdopen(fd, "rb")


def _lstat_or_none(above: int, name: str) -> os.stat_result | None:
    try:
        return os.lstat(name, dir_fd=above)
    except FileNotFoundError:
        return None


def _read_link(above: int, name: str) -> str:
    try:
        return os.readlink(name, dir_fd=above)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise BadPath(f"{name!r} is no link") from error
        raise


def _create_file(above: int, name: str) -> BinaryIO:
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=above)
    return os.fdopen(fd, "wb")


def _unlink(above: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=above)


def _temporary_name() -> str:
    return f".{os.getpid()}-{os.urandom(8).hex()}.tmp"


def _split_path(path: str) -> tuple[str, ...]:
    return tuple(path.split("/")) if path else ()


def _is_too_long(path: str) -> bool:
    return len(path) > MAX_PATH_BYTES // 4 and len(os.fsencode(path)) > MAX_PATH_BYTES  # a character has four bytes at most


def _name_budget_bytes(most: int) -> int:
    """Bytes that the names of `most` entries may take together: 16 MB for 100,000."""
    return max(160 * most, 1 << 20)


def _mtime_seconds(found: os.stat_result) -> int:
    mtime = int(found[stat.ST_MTIME])  # which the attribute is not
    return mtime if 0 <= mtime <= MAX_MTIME_SECONDS else min(max(mtime, 0), MAX_MTIME_SECONDS)


class _ExactReader:
    """A reader that ends after exactly `size` bytes, because a tar has already promised that many."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.left = file, size

    def read(self, most: int = CHUNK_BYTES, /) -> bytes:
        want = min(most, self.left)
        got = self.file.read(want)
        self.left -= want
        return got.ljust(want, b"\0")


def main(argv: Sequence[str]) -> int:
    """Paths come on stdin, each with a NUL after it: there may be more than fit on a command line."""
    out, given = sys.stdout.buffer, sys.stdin.buffer
    try:
        match list(argv):
            case ["read", root, limit]:
                out.write(read(root, _decode_path(given.read()), int(limit)))
            case ["read_range", root, start, length]:
                content, whole = read_range(root, _decode_path(given.read()), int(start), int(length))
                out.write(b"%d\n" % whole + content)
            case ["write", root]:
                path, _, content = given.read().partition(b"\0")
                write(root, _decode_path(path), content)
            case ["remove", root]:
                remove(root, _decode_path(given.read()))
            case ["remove_files", root]:
                remove_files(root, _decode_paths(given.read()))
            case ["clear", root, *again]:
                clear(root, again)
            case ["size", root]:
                print(size(root))
            case ["look", root, depth, most]:
                [under] = _decode_paths(given.read())
                for path, fields in scan(root, under, deep=depth == "deep", most=int(most)):
                    out.write(encode_entry(path, *fields))
            case ["pack", root, which, excluded]:
                words, many = _decode_paths(given.read()), int(excluded)
                pack(root, out, only=words[many:] if which == "only" else None, exclude=words[:many])
            case ["unpack", root]:
                unpack(root, given)
            case ["seed", root, kind]:
                seed(SKILLS_DIRECTORY, kind, root, kind)
            case _:
                print("usage: files.py VERB ROOT ...", file=sys.stderr)
                return 2
        sys.stdout.flush()
    except FileNotFoundError as error:
        print(f"no such file: {error.filename}", file=sys.stderr)
        return NO_FILE
    except (BadPath, tarfile.TarError) as error:
        print(error, file=sys.stderr)
        return BAD_PATH
    except TooLarge as error:
        print(error, file=sys.stderr)
        return TOO_LARGE
    except OSError as error:  # a full disk, a directory that forbids it
        print(error, file=sys.stderr)
        return 1
    return 0


def encode_entry(path: str, kind: str, mode: int, size: int, mtime: int, stamp: str, target: str) -> bytes:
    """One entry as `look` says it: each field with a NUL after it."""
    return os.fsencode(f"{path}\0{kind}\0{mode:o}\0{size}\0{mtime}\0{stamp}\0{target}\0")


def _decode_paths(words: bytes) -> list[str]:
    return [os.fsdecode(word) for word in words.split(b"\0")[:-1]]


def _decode_path(path: bytes) -> tuple[str, ...]:
    return _split_path(os.fsdecode(path.rstrip(b"\0")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

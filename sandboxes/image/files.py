"""Files of a sandbox, read and written without following a symbolic link. Standard library only: this runs inside
sandboxes (`python3 files.py read /workspace LIMIT PART...`) and is imported where there is no inside.

Directories are opened one component at a time, each relative to the one above and with O_NOFOLLOW: what a program does
to the tree meanwhile can make a call fail, and cannot lead it elsewhere.
A directory or file whose owner took away its own rights is opened all the same: state is saved whatever its mode."""

import contextlib
import errno
import os
import stat
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, Self

NO_FILE, BAD_PATH, TOO_LARGE = 3, 4, 5  # exit codes
CHUNK = 1 << 18
KEPT_OPEN = 200  # directories
_NOT_THAT = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.ENAMETOOLONG)  # a link, no directory, a socket, no name
LONGEST = 4000  # bytes of a relative path; no system call takes more than 4096, so such files are made only on purpose


class BadPath(Exception):
    """The path leaves the root, goes through a symbolic link, or names no regular file."""


class TooLarge(Exception):
    """The file is larger than the limit."""


def read(root: str, parts: Sequence[str], limit: int) -> bytes:
    """The content of one regular file. FileNotFoundError, BadPath; TooLarge past `limit` bytes."""
    with _Tree(root) as tree, _regular(tree.open(parts[:-1]), parts[-1]) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise TooLarge(f"{'/'.join(parts)} is larger than {limit} bytes")
    return content


def write(root: str, parts: Sequence[str], content: bytes) -> None:
    """Replace or make one file, with the directories above it; whoever reads meanwhile sees the old one or the new."""
    with _Tree(root) as tree:
        above = tree.open(parts[:-1], make=True)
        found = _kind(above, parts[-1])
        if found is not None and not stat.S_ISREG(found.st_mode):
            raise BadPath(f"{'/'.join(parts)} is no regular file")
        new = f".{os.getpid()}-{os.urandom(8).hex()}.tmp"
        try:
            with _create(above, new) as file:
                file.write(content)
                os.fchmod(file.fileno(), stat.S_IMODE(found.st_mode) if found else 0o644)
            os.rename(new, parts[-1], src_dir_fd=above, dst_dir_fd=above)
        except BaseException:
            _unlink(above, new)
            raise


def remove(root: str, parts: Sequence[str]) -> None:
    """Remove one regular file. FileNotFoundError, BadPath."""
    with _Tree(root) as tree:
        above = tree.open(parts[:-1])
        if not stat.S_ISREG(os.lstat(parts[-1], dir_fd=above).st_mode):
            raise BadPath(f"{'/'.join(parts)} is no regular file")
        os.unlink(parts[-1], dir_fd=above)


def size(root: str) -> int:
    """Sum of the sizes of all regular files, in bytes; a file with two names counts twice."""
    return sum(found.st_size for _, _, found in _walk(root) if stat.S_ISREG(found.st_mode))


def pack(root: str, out: BinaryIO) -> None:
    """Write everything under `root` as a tar, sorted by name: directories, regular files and symbolic links (as links).
    Sockets, pipes and paths longer than LONGEST are left out. A file that changes size meanwhile is cut or filled up
    with zeros to the size it had."""
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, bufsize=CHUNK) as tar:
        for above, parts, found in _walk(root):
            member = tarfile.TarInfo("/".join(parts))
            member.mode, member.mtime = stat.S_IMODE(found.st_mode), int(found.st_mtime)
            try:
                if stat.S_ISREG(found.st_mode):
                    with _regular(above, parts[-1]) as file:
                        member.size = os.fstat(file.fileno()).st_size
                        tar.addfile(member, _Exactly(file, member.size))
                elif stat.S_ISDIR(found.st_mode):
                    member.type = tarfile.DIRTYPE
                    tar.addfile(member)
                elif stat.S_ISLNK(found.st_mode):
                    member.type, member.linkname = tarfile.SYMTYPE, os.readlink(parts[-1], dir_fd=above)
                    tar.addfile(member)
            except (FileNotFoundError, BadPath):
                pass  # it went away, or became something else, since it was listed
            tar.members = []  # type: ignore[attr-defined]  # else it remembers every member: a sandbox has little memory


def unpack(root: str, source: BinaryIO) -> None:
    """Put a tar's members over what is under `root`. BadPath for a member that names no place inside, would be written
    through a symbolic link, or is a device or pipe, and for a tar that ends too early. A symbolic link itself may point
    anywhere: a virtual environment is full of such, and nothing here follows them."""
    directories: list[tuple[tuple[str, ...], int, float]] = []
    with _Tree(root) as tree, tarfile.open(fileobj=source, mode="r|", bufsize=CHUNK, tarinfo=_Member) as tar:
        for member in tar:
            parts = _inside(member.name)
            if member.isdir():
                tree.open(parts, make=True)
                directories.append((parts, member.mode & 0o777, member.mtime))
            elif parts:
                _put(tree, parts, member, tar)
            tar.members = []  # type: ignore[attr-defined]  # as in pack
        if not getattr(tar, "ended", False):
            raise BadPath("the tar ends too early")
        for parts, mode, mtime in reversed(directories):  # last, as a directory may forbid writing; the deepest first
            if parts:
                above = tree.open(parts[:-1])
                os.utime(parts[-1], (mtime, mtime), dir_fd=above, follow_symlinks=False)
                os.chmod(parts[-1], mode, dir_fd=above)


def _put(tree: "_Tree", parts: tuple[str, ...], member: tarfile.TarInfo, tar: tarfile.TarFile) -> None:
    above, name = tree.open(parts[:-1], make=True), parts[-1]
    found = _kind(above, name)
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
        with _create(above, name) as file:
            while chunk := content.read(CHUNK):
                file.write(chunk)
            file.flush()
            os.utime(file.fileno(), (member.mtime, member.mtime))
            os.fchmod(file.fileno(), member.mode & 0o777)
    elif member.islnk():
        _link(tree, _inside(member.linkname), parts)
    else:
        raise BadPath(f"{member.name} is a device or a pipe")


def _link(tree: "_Tree", old: tuple[str, ...], new: tuple[str, ...]) -> None:
    there = os.dup(tree.open(old[:-1]))
    try:
        above = tree.open(new[:-1])
        found = _kind(there, old[-1]) if old else None
        if found is None or not stat.S_ISREG(found.st_mode):
            raise BadPath(f"{'/'.join(new)} is a second name for no regular file")
        if old != new:
            _unlink(above, new[-1])
            os.link(old[-1], new[-1], src_dir_fd=there, dst_dir_fd=above, follow_symlinks=False)
    finally:
        os.close(there)


class _Member(tarfile.TarInfo):
    """Notes on its tar that the end-of-archive block was seen: a stream cut off between two members looks complete."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            tar.ended = True  # type: ignore[attr-defined]
            raise


def _inside(name: str) -> tuple[str, ...]:
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise BadPath(f"{name!r} leaves the directory")
    return parts


def _walk(root: str) -> Iterator[tuple[int, tuple[str, ...], os.stat_result]]:
    """(open directory, path relative to root, lstat) of everything below."""
    with _Tree(root) as tree:
        waiting: list[tuple[str, ...]] = [()]
        while waiting:
            here = waiting.pop()
            try:
                above = tree.open(here)
                names = sorted(os.listdir(above))
            except (FileNotFoundError, BadPath):
                continue  # it went away since it was listed
            below = []
            for name in names:
                parts, found = (*here, name), _kind(above, name)
                if found is None or len(os.fsencode("/".join(parts))) > LONGEST:
                    continue
                if stat.S_ISDIR(found.st_mode):
                    below.append(parts)
                yield above, parts, found
            waiting.extend(reversed(below))


class _Tree:
    """The directories under a root. The way to the last one opened stays open, as the next is seldom far; but not all
    of a very long way, as descriptors are few."""

    def __init__(self, root: str) -> None:
        self._way: list[str] = []
        self._open = [os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)]
        self._far: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._back_to(-1)

    def open(self, parts: Sequence[str], make: bool = False) -> int:
        """A descriptor of one directory, good until the next call. FileNotFoundError, BadPath."""
        pairs = enumerate(zip(self._way, parts, strict=False))
        self._back_to(next((at for at, (old, new) in pairs if old != new), min(len(self._way), len(parts))))
        for part in parts[len(self._way) : KEPT_OPEN]:
            self._open.append(_enter(self._open[-1], part, make))
            self._way.append(part)
        for part in parts[KEPT_OPEN:]:
            below = _enter(self._open[-1] if self._far is None else self._far, part, make)
            if self._far is not None:
                os.close(self._far)
            self._far = below
        return self._open[-1] if self._far is None else self._far

    def _back_to(self, depth: int) -> None:
        if self._far is not None:
            os.close(self._far)
            self._far = None
        while len(self._open) > depth + 1:
            os.close(self._open.pop())
        del self._way[max(depth, 0) :]


def _enter(above: int, name: str, make: bool = False) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=above)
        below = _despite_mode(lambda: os.open(name, flags, dir_fd=above), above, name)
    except OSError as error:
        if error.errno in _NOT_THAT:
            raise BadPath(f"{name!r} on the way is a link or no directory") from error
        raise
    found = os.fstat(below)
    if make and found.st_mode & 0o700 != 0o700 and found.st_uid == os.geteuid():
        os.fchmod(below, stat.S_IMODE(found.st_mode) | 0o700)
    return below


def _regular(above: int, name: str) -> BinaryIO:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # NONBLOCK: opening a pipe must not wait for its writer
    try:
        fd = _despite_mode(lambda: os.open(name, flags, dir_fd=above), above, name)
    except OSError as error:
        if error.errno in _NOT_THAT:
            raise BadPath(f"{name!r} is no regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise BadPath(f"{name!r} is no regular file")
    return os.fdopen(fd, "rb")


def _despite_mode(act: Callable[[], int], above: int, name: str) -> int:
    try:
        return act()
    except PermissionError:
        found = os.lstat(name, dir_fd=above)
        if found.st_uid != os.geteuid() or stat.S_ISLNK(found.st_mode):
            raise
    mode = stat.S_IMODE(found.st_mode)
    os.chmod(name, mode | 0o700, dir_fd=above)
    try:
        return act()
    finally:
        if stat.S_ISREG(found.st_mode):  # a directory stays open to us: its rights count at each step into it
            os.chmod(name, mode, dir_fd=above)


def _kind(above: int, name: str) -> os.stat_result | None:
    try:
        return os.lstat(name, dir_fd=above)
    except FileNotFoundError:
        return None


def _create(above: int, name: str) -> BinaryIO:
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=above)
    return os.fdopen(fd, "wb")


def _unlink(above: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=above)


class _Exactly:
    """A reader that ends after exactly `size` bytes, because a tar has already promised that many."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.left = file, size

    def read(self, most: int = CHUNK, /) -> bytes:
        want = min(most, self.left)
        got = self.file.read(want)
        self.left -= want
        return got.ljust(want, b"\0")


def main(argv: Sequence[str]) -> int:
    try:
        match list(argv):
            case ["read", root, limit, *parts]:
                sys.stdout.buffer.write(read(root, parts, int(limit)))
            case ["write", root, *parts]:
                write(root, parts, sys.stdin.buffer.read())
            case ["remove", root, *parts]:
                remove(root, parts)
            case ["size", root]:
                print(size(root))
            case ["pack", root]:
                pack(root, sys.stdout.buffer)
            case ["unpack", root]:
                unpack(root, sys.stdin.buffer)
            case _:
                print("usage: files.py read|write|remove|size|pack|unpack ROOT ...", file=sys.stderr)
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

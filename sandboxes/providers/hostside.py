"""Files of a container on this machine, without an exec, which takes the engine a twentieth of a second or more.

Only for root in the machine's own process namespace; whoever asks has another way, and takes it at an OSError. What is
done here is done with the rights of the user that commands run as and no others: an agent that swaps a directory for a
link under our hands gains nothing, even if one were followed."""

import ctypes
import os
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

BLOCK = tarfile.BLOCKSIZE
LONGEST_NAMES = 1 << 16  # bytes of a pax header: a path of files.LONGEST and a link's target fit
_NAMES = re.compile(rb"(?:\d+ (?:path|linkpath)=[^\n]*\n)+")
_libc = ctypes.CDLL(None)


@contextmanager
def place(pid: int, container: str, root: str) -> Iterator[str]:
    """A path by which this process reaches a directory of the container with this process in it. OSError if it does not."""
    descriptor = os.open(f"/proc/{pid}/root{root}", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if container not in Path(f"/proc/{pid}/cgroup").read_text():  # asked after opening: by then it is no other's
            raise ProcessLookupError(f"process {pid} is not in {container}")
        yield f"/proc/self/fd/{descriptor}/."
    finally:
        os.close(descriptor)


@contextmanager
def acting_as(uid: int) -> Iterator[None]:
    """This thread reaches files as that user and group. PermissionError if it may not change that."""
    try:
        _libc.setfsgid(uid)
        _libc.setfsuid(uid)  # from root's, it also takes root's capabilities over files away
        if (_libc.setfsuid(-1), _libc.setfsgid(-1)) != (uid, uid):
            raise PermissionError(f"this process may not act as user {uid}")
        yield
    finally:
        _libc.setfsuid(os.geteuid())
        _libc.setfsgid(os.getegid())


def is_plain(tar: BinaryIO) -> bool:
    """Is it made only of what files.pack writes? Whatever else a sandbox may have put into a tar of its own, an unpacker
    out here could take far too much memory over. Leaves the tar where it was."""
    start = tar.tell()
    try:
        while any(head := tar.read(BLOCK)):
            kind, size = head[156:157], tarfile.nti(head[124:136]) if len(head) == BLOCK else -1  # type: ignore[attr-defined]
            if kind == tarfile.XHDTYPE and 0 < size <= LONGEST_NAMES:
                if not _NAMES.fullmatch(tar.read(-size % BLOCK + size)[:size]):
                    return False
            elif kind == tarfile.REGTYPE and size >= 0:
                tar.seek(-size % BLOCK + size, os.SEEK_CUR)
            elif kind not in (tarfile.DIRTYPE, tarfile.SYMTYPE) or size:
                return False
    except tarfile.TarError:
        return False
    finally:
        tar.seek(start)
    return True

"""Mount table, bind mounts, and the file locks that serialize changes to mounts."""

import ctypes
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

from sandboxes.storage.base import StoreError

LOCK_TIMEOUT_SECONDS = 30.0
POLL_SECONDS = 0.02
MS_BIND, _MS_PRIVATE, _MS_SHARED, _MNT_DETACH, _UMOUNT_NOFOLLOW = 1 << 12, 1 << 18, 1 << 20, 2, 8
_libc = ctypes.CDLL(None, use_errno=True)


def ensure_shared_mount(root: Path) -> None:
    """Ensure that the root is a shared mount of its own: mounts below it propagate to containers and to nothing else."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with acquire_lock(root, "all"):
        lines = read_mountinfo(root)
        if not lines:
            sys_mount(root, root, MS_BIND)
        if not any(word.startswith("shared:") for line in lines[-1:] for word in line[6 : line.index("-")]):
            sys_mount(None, root, _MS_PRIVATE)
            sys_mount(None, root, _MS_SHARED)


def read_mountinfo(point: Path) -> list[list[str]]:
    """Return the lines of /proc/self/mountinfo for one mount point, split into words. The latest mount is last."""
    name = re.sub(r"[\s\\]", lambda match: f"\\{ord(match[0]):03o}", str(point))
    with open("/proc/self/mountinfo", errors="surrogateescape") as file:
        return [line.split() for line in file if f" {name} " in line and line.split()[4] == name]


def list_devices(point: Path) -> list[int]:
    """Return the device numbers of all mounts on a directory, as stat reports them. The topmost is last."""
    numbers = (line[2].split(":") for line in read_mountinfo(point))
    return [os.makedev(int(major), int(minor)) for major, minor in numbers]


def sys_mount(source: Path | None, target: Path, flags: int) -> None:
    _raise_for_errno(_libc.mount(os.fsencode(source) if source else None, os.fsencode(target), None, flags, None), target)


def unmount_all(point: Path) -> None:
    while list_devices(point):
        _raise_for_errno(_libc.umount2(os.fsencode(point), _MNT_DETACH | _UMOUNT_NOFOLLOW), point)


def _raise_for_errno(result: int, path: Path) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))


@contextmanager
def acquire_lock(root: Path, name: str) -> Iterator[None]:
    """Hold an exclusive lock between processes and threads. Raise StoreError if it is not free within 30 seconds.

    Lock files are never removed. Callers use a bounded set of names."""
    with translate_os_errors("lock"):
        directory = root.parent / "mount-locks"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                raise mount_error("lock", f"another process has held the mount lock for {LOCK_TIMEOUT_SECONDS:.0f} s")
            time.sleep(POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        flock(descriptor, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def translate_os_errors(method: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise mount_error(method, f"{error.filename or ''} {error.strerror or error}".strip()) from error


def mount_error(method: str, reason: str) -> StoreError:
    return StoreError("mount", method, reason)

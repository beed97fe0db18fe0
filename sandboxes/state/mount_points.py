"""Mount points of this machine: the mount table, bind mounts and the locks that serialize changes to them."""

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


def ensure_shared_mount(home: Path) -> None:
    """Have a mount of our own there, which is shared: below it mounts spread to containers, and to nothing else."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with acquire_lock(home, "all"):
        lines = read_mountinfo(home)
        if not lines:
            bind_or_remount(home, home, MS_BIND)
        if not any(word.startswith("shared:") for line in lines[-1:] for word in line[6 : line.index("-")]):
            bind_or_remount(None, home, _MS_PRIVATE)
            bind_or_remount(None, home, _MS_SHARED)


def read_mountinfo(point: Path) -> list[list[str]]:
    """The lines of mountinfo about one mount point, in words; what was mounted last comes last."""
    name = re.sub(r"[\s\\]", lambda found: f"\\{ord(found[0]):03o}", str(point))
    with open("/proc/self/mountinfo", errors="surrogateescape") as file:
        return [line.split() for line in file if f" {name} " in line and line.split()[4] == name]


def list_devices(point: Path) -> list[int]:
    """Of everything that is mounted on a directory: the numbers that stat gives for their devices."""
    numbers = (line[2].split(":") for line in read_mountinfo(point))
    return [os.makedev(int(major), int(minor)) for major, minor in numbers]


def bind_or_remount(source: Path | None, target: Path, flags: int) -> None:
    _raise_for_errno(_libc.mount(os.fsencode(source) if source else None, os.fsencode(target), None, flags, None), target)


def unmount_all(point: Path) -> None:
    while list_devices(point):
        _raise_for_errno(_libc.umount2(os.fsencode(point), _MNT_DETACH | _UMOUNT_NOFOLLOW), point)


def _raise_for_errno(result: int, path: Path) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))


@contextmanager
def acquire_lock(home: Path, name: str) -> Iterator[None]:
    """One process, or thread, at a time. Locks have few names and are never removed."""
    with translate_os_errors("lock"):
        directory = home.parent / "mount-locks"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        until = time.monotonic() + LOCK_TIMEOUT_SECONDS
        while not _try_lock(descriptor):
            if time.monotonic() > until:
                raise mount_error("lock", f"somebody else has been mounting or unmounting for {LOCK_TIMEOUT_SECONDS:.0f} s")
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
    except OSError as failed:
        raise mount_error(method, f"{failed.filename or ''} {failed.strerror or failed}".strip()) from failed


def mount_error(method: str, why: str) -> StoreError:
    return StoreError("mount", method, why)

"""Access to a container's files from the host, without an exec, which costs the engine 50 ms or more.

Requires root in the host's pid namespace. On OSError the caller falls back to an exec. All access uses the permissions of the
agent's user: an agent that replaces a directory by a symbolic link during an operation gains nothing, even if the link
were followed."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_SETGROUPS_SYSCALL = {"x86_64": 116, "aarch64": 159}.get(os.uname().machine)  # libc's setgroups changes all threads
_libc = ctypes.CDLL(None)


@contextmanager
def open_container_directory(pid: int, container: str, root: str) -> Iterator[str]:
    """Yield a host path to the directory `root` of the container whose process 1 is `pid`. Raise OSError for any other process.

    `root` must be a single name below /, because only its last element is checked not to be a symbolic link."""
    process = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY)  # refers to this process even if its pid is reused
    try:
        names = [line.split()[-1] for line in _read_file(process, "status").splitlines() if line.startswith("NSpid:")]
        # A process that is still entering the container may have the host's root directory.
        if container not in _read_file(process, "cgroup") or names != ["1"]:
            raise ProcessLookupError(f"process {pid} is not process 1 of {container}")
        descriptor = os.open(f"root{root}", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=process)
    finally:
        os.close(process)
    try:
        yield f"/proc/self/fd/{descriptor}/."
    finally:
        os.close(descriptor)


@contextmanager
def impersonate_user(uid: int) -> Iterator[None]:
    """Access files as this user and group in the current thread. Raise PermissionError if that is not permitted."""
    groups = os.getgroups()
    _set_groups([])
    try:
        _libc.setfsgid(uid)
        _libc.setfsuid(uid)  # leaving uid 0 also drops root's file capabilities
        if (_libc.setfsuid(-1), _libc.setfsgid(-1)) != (uid, uid):
            raise PermissionError(f"cannot access files as user {uid}")
        yield
    finally:
        _libc.setfsuid(os.geteuid())
        _libc.setfsgid(os.getegid())
        _set_groups(groups)


def _set_groups(groups: list[int]) -> None:
    """Set the current thread's supplementary groups."""
    if _SETGROUPS_SYSCALL is None or _libc.syscall(_SETGROUPS_SYSCALL, len(groups), (ctypes.c_uint * len(groups))(*groups)):
        raise PermissionError("cannot change supplementary groups")


def _read_file(directory: int, name: str) -> str:
    with open(os.open(name, os.O_RDONLY, dir_fd=directory)) as file:
        return file.read()

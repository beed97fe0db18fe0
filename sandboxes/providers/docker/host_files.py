"""Files of a container on this machine, without an exec, which takes the engine a twentieth of a second or more.

Only for root in the machine's own process namespace; whoever asks has another way, and takes it at an OSError. What is
done here is done with the rights of the user that commands run as and no others: an agent that swaps a directory for a
link under our hands gains nothing, even if one were followed."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_SETGROUPS_SYSCALL = {"x86_64": 116, "aarch64": 159}.get(os.uname().machine)  # the system call: libc's changes all threads
_libc = ctypes.CDLL(None)


@contextmanager
def open_container_directory(pid: int, container: str, root: str) -> Iterator[str]:
    """A path by which this process reaches a directory of the container whose first process this is. OSError if it is
    not. `root` is one name below /: only that it is no link can be seen."""
    process = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY)  # it stays this process's, whoever gets its number
    try:
        names = [line.split()[-1] for line in _read_file(process, "status").splitlines() if line.startswith("NSpid:")]
        if container not in _read_file(process, "cgroup") or names != ["1"]:  # one on its way in still has our root
            raise ProcessLookupError(f"process {pid} is not the first one in {container}")
        descriptor = os.open(f"root{root}", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=process)
    finally:
        os.close(process)
    try:
        yield f"/proc/self/fd/{descriptor}/."
    finally:
        os.close(descriptor)


@contextmanager
def impersonate_user(uid: int) -> Iterator[None]:
    """This thread reaches files as that user and group. PermissionError if it may not change that."""
    groups = os.getgroups()
    _set_groups([])
    try:
        _libc.setfsgid(uid)
        _libc.setfsuid(uid)  # from root's, it also takes root's capabilities over files away
        if (_libc.setfsuid(-1), _libc.setfsgid(-1)) != (uid, uid):
            raise PermissionError(f"this process may not act as user {uid}")
        yield
    finally:
        _libc.setfsuid(os.geteuid())
        _libc.setfsgid(os.getegid())
        _set_groups(groups)


def _set_groups(groups: list[int]) -> None:
    """This thread's supplementary groups."""
    if _SETGROUPS_SYSCALL is None or _libc.syscall(_SETGROUPS_SYSCALL, len(groups), (ctypes.c_uint * len(groups))(*groups)):
        raise PermissionError("this process may not change its groups")


def _read_file(directory: int, name: str) -> str:
    with open(os.open(name, os.O_RDONLY, dir_fd=directory)) as file:
        return file.read()

"""Kill every process of one exec, also those that left its session or lost their parent, and no other. Standard library
only: this runs inside sandboxes (`python3 reap.py MARK [GID]`) and is imported where there is no inside.

A process belongs to the exec if it runs under the group id that only this exec was given, which nothing without
CAP_SETGID can leave; where there is no such id, if it carries the mark in its environment, which it can clear; and if
it descends from one that belongs. All are stopped before any is killed: what is stopped cannot fork, and its children
have not lost their parent yet."""

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

MARK_VARIABLE = "LEASEHOLD_RUN"  # as in providers/base.py, which is not there inside a sandbox
KILL_TIMEOUT_SECONDS = 10.0  # seconds until kill_tree gives up
EXEC_WAIT_SECONDS = 1.0  # seconds for which a process is waited for that is about to run another program
PROC_DIRECTORY = "/proc"


@dataclass(frozen=True)
class _Process:
    parent: int
    born: bytes  # start time in ticks: with the process id it names one process for ever
    belongs: bool
    gone: bool  # a zombie: nothing is left to kill


def list_pids() -> Iterable[int]:
    """The id of every process that /proc shows."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def kill_tree(mark: str, gid: int | None = None, pids: Callable[[], Iterable[int]] = list_pids) -> int:
    """Kill the processes of the exec that carries `mark`, and only them; answer how many. `gid`: the group id that was
    its own, if it had one; `pids`: where to look. TimeoutError if some still live after PATIENCE seconds. One that
    this user may not signal is passed over."""
    until = time.monotonic() + KILL_TIMEOUT_SECONDS
    killed: set[int] = set()
    while True:
        # Process id -> pidfd: a number may be given to a new process, a pidfd may not. -1: the kernel (gVisor's) has none
        stopped: dict[int, int] = {}
        try:
            while _stop_more(mark, gid, pids(), stopped):
                pass
            if not stopped:
                return len(killed)
            for pid, fd in stopped.items():
                _send_signal(pid, fd, signal.SIGKILL)
            killed.update(stopped)
        finally:
            for fd in stopped.values():
                _close(fd)
        if time.monotonic() > until:
            raise TimeoutError(f"{len(stopped)} processes are still there")
        time.sleep(0.005)  # a killed process takes a moment to go


def _stop_more(mark: str, gid: int | None, pids: Iterable[int], stopped: dict[int, int]) -> bool:
    """Stop those that belong and are not among the stopped yet, and add them; were there any?"""
    seen = {pid: process for pid in pids if (process := _inspect_process(pid, mark, gid)) is not None}
    ours = {pid for pid, process in seen.items() if process.belongs}
    while more := {pid for pid, process in seen.items() if process.parent in ours} - ours:
        ours |= more
    before = len(stopped)
    for pid in ours - stopped.keys() - {1, os.getpid()}:
        if seen[pid].gone:
            continue
        try:
            fd = _open_pidfd(pid)
        except ProcessLookupError:
            continue
        now = _inspect_process(pid, mark, gid)
        if now is not None and now.born == seen[pid].born and _send_signal(pid, fd, signal.SIGSTOP):
            stopped[pid] = fd
        else:
            _close(fd)
    return len(stopped) > before


def _inspect_process(pid: int, mark: str, gid: int | None) -> _Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, parent, *rest = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    belongs = _read_gid(pid) == gid if gid is not None else _read_mark(pid) == mark
    return _Process(int(parent), born=rest[17], belongs=belongs, gone=state in (b"Z", b"X"))


def _read_gid(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            return next((int(line.split()[1]) for line in file if line.startswith(b"Gid:")), None)
    except OSError:
        return None


def _read_mark(pid: int) -> str | None:
    prefix = f"{MARK_VARIABLE}=".encode()
    try:
        found = next((entry for entry in read_environment(pid).split(b"\0") if entry.startswith(prefix)), prefix)
    except OSError:  # another user's, or one that may not be looked into
        return None
    return found[len(prefix) :].decode(errors="replace")


def read_environment(pid: int) -> bytes:
    """What a process was started with, or OSError. While another program takes its place it has nothing to show, and would
    pass for somebody else's: then it is waited for."""
    until = time.monotonic() + EXEC_WAIT_SECONDS
    while True:
        before = _read_environment_end(pid)
        with open(f"{PROC_DIRECTORY}/{pid}/environ", "rb") as file:
            content = file.read()
        settled = before < 0 or (before > 0 and before == _read_environment_end(pid))
        if content or settled or time.monotonic() > until:
            return content
        time.sleep(0.001)


def _read_environment_end(pid: int) -> int:
    """Where its environment ends in its memory: elsewhere in each program that it runs, and 0 between two. -1 if it has no
    memory, being a zombie or the kernel's, or if that cannot be told."""
    try:
        with open(f"{PROC_DIRECTORY}/{pid}/stat", "rb") as file:
            rest = file.read().rpartition(b")")[2].split()
    except OSError:
        return -1
    return int(rest[48]) if len(rest) > 48 and rest[20] != b"0" else -1  # fields 51 and 23 of proc(5)


def _open_pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        return -1


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


def _send_signal(pid: int, fd: int, number: signal.Signals) -> bool:
    try:
        if fd >= 0:
            signal.pidfd_send_signal(fd, number)
        else:
            os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    print(kill_tree(sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else None))

"""Process reaper: kills every process of one exec, including those that left its session or lost their parent, and no other.

    reap.py MARK [GID]

A process belongs to the exec if it runs under the exec's own group id, which a process without CAP_SETGID cannot leave. If the
exec has no group id, a process belongs if its environment contains the mark, which a program can clear. Descendants of a
process that belongs also belong. All processes are stopped before any is killed: a stopped process cannot fork, and its
children still have their parent. Standard library only: this runs inside sandboxes, and is imported by providers on the
host."""

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

MARK_VARIABLE = "LEASEHOLD_RUN"  # as in providers/base.py, which cannot be imported inside a sandbox
KILL_TIMEOUT_SECONDS = 10.0  # of kill_tree
EXEC_WAIT_SECONDS = 1.0  # for a process in the middle of execve
PROC_DIRECTORY = "/proc"


@dataclass(frozen=True)
class _Process:
    parent: int
    start_time: bytes  # in ticks; unique together with the pid
    belongs: bool
    is_zombie: bool  # dead, but not yet reaped by its parent


def list_pids() -> Iterable[int]:
    """List all pids in /proc."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def kill_tree(mark: str, gid: int | None = None, pids: Callable[[], Iterable[int]] = list_pids) -> int:
    """Kill all processes of the exec with this mark, and wait until they are dead. Return the number killed.

    `gid` is the exec's own group id, if it has one. `pids` lists candidate processes. Processes that this user may not signal
    are skipped. Raise TimeoutError if processes are left after KILL_TIMEOUT_SECONDS."""
    deadline = time.monotonic() + KILL_TIMEOUT_SECONDS
    killed: dict[int, bytes] = {}  # pid -> start time
    while True:
        # pid -> pidfd, which unlike a pid is never reused; -1 if the kernel (gVisor) has no pidfds
        stopped: dict[int, int] = {}
        try:
            while started := _stop_more(mark, gid, pids(), stopped):
                killed.update(started)
            dying = [pid for pid, start_time in killed.items() if _is_alive(pid, start_time)]
            if not stopped and not dying:
                return len(killed)
            for pid, fd in stopped.items():
                _send_signal(pid, fd, signal.SIGKILL)
        finally:
            for fd in stopped.values():
                _close(fd)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(dying)} processes were not killed in time")
        time.sleep(0.005)  # a killed process takes a moment to disappear


def _stop_more(mark: str, gid: int | None, pids: Iterable[int], stopped: dict[int, int]) -> dict[int, bytes]:
    """Stop processes of the exec that are not in `stopped` yet, and add them. Return their start times."""
    processes = {pid: process for pid in pids if (process := _inspect_process(pid, mark, gid)) is not None}
    members = {pid for pid, process in processes.items() if process.belongs}
    while descendants := {pid for pid, process in processes.items() if process.parent in members} - members:
        members |= descendants
    added = {}
    for pid in members - stopped.keys() - {1, os.getpid()}:
        if processes[pid].is_zombie:
            continue
        try:
            fd = _open_pidfd(pid)
        except ProcessLookupError:
            continue
        current = _inspect_process(pid, mark, gid)
        if current is not None and current.start_time == processes[pid].start_time and _send_signal(pid, fd, signal.SIGSTOP):
            stopped[pid] = fd
            added[pid] = current.start_time
        else:
            _close(fd)
    return added


def _is_alive(pid: int, start_time: bytes) -> bool:
    """Return whether a process is not dead yet. A dying one first loses its memory, and with this the mark."""
    process = _inspect_process(pid, "", gid=0)
    return process is not None and process.start_time == start_time and not process.is_zombie


def _inspect_process(pid: int, mark: str, gid: int | None) -> _Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, parent, *rest = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    belongs = _read_gid(pid) == gid if gid is not None else read_mark(pid) == mark
    return _Process(int(parent), start_time=rest[17], belongs=belongs, is_zombie=state in (b"Z", b"X"))


def _read_gid(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            return next((int(line.split()[1]) for line in file if line.startswith(b"Gid:")), None)
    except OSError:
        return None


def read_mark(pid: int) -> str | None:
    prefix = f"{MARK_VARIABLE}=".encode()
    try:
        assignment = next((entry for entry in read_environment(pid).split(b"\0") if entry.startswith(prefix)), prefix)
    except OSError:  # the process has ended or belongs to another user
        return None
    return assignment[len(prefix) :].decode(errors="replace")


def read_environment(pid: int) -> bytes:
    """Read a process's initial environment. Raise OSError.

    During execve the environment is empty, and the process would not be recognized: wait until execve is done."""
    deadline = time.monotonic() + EXEC_WAIT_SECONDS
    while True:
        before = _read_environment_end(pid)
        with open(f"{PROC_DIRECTORY}/{pid}/environ", "rb") as file:
            content = file.read()
        is_settled = before < 0 or (before > 0 and before == _read_environment_end(pid))
        if content or is_settled or time.monotonic() > deadline:
            return content
        time.sleep(0.001)


def _read_environment_end(pid: int) -> int:
    """Return the end address of a process's environment. It differs for each program executed, and is 0 during execve.

    -1 for processes without memory (zombies, kernel threads) and if /proc/PID/stat cannot be read."""
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

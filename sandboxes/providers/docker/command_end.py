"""End of all commands of a container from outside: every process but process 1, without the help of any of them.

Where the container's cgroup is visible and writable, the kernel freezes the processes while they are listed and signalled, so
that none of them starts another one. Elsewhere the container is restarted if the engine lists commands.

Process 1 has a helper for file operations, which forks for each. Commands can stop these processes, so they are killed with the
commands, and process 1 starts another helper with the next operation. They are left alone if there are no commands."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from sandboxes.providers.docker.engine import Cgroup, Conflict
from sandboxes.providers.docker.restart import ContainerRestartProvider
from sandboxes.providers.errors import FailureCause, Missing, Unavailable

KILL_TIMEOUT_SECONDS = 10.0  # a process in an uninterruptible call ends later
ROUND_SECONDS = 0.5  # after which the processes that are left are frozen and signalled again
POLL_INTERVAL_SECONDS = 0.001
LOOKS, LOOK_INTERVAL_SECONDS = 4, 0.1  # before a restart, which takes longer
STOPPED_STATES, DEAD_STATES = ("T", "t"), ("Z", "X")  # of /proc/<pid>/stat
LIST_OPTIONS = quote("-eo pid,ppid,stat,args")  # of ps, which the engine executes


class Layout(NamedTuple):
    """Addresses in the memory of a process. Random, unless they are those of the process that it was forked from."""

    start_code: int
    start_stack: int


class ContainerCommandEndProvider(ContainerRestartProvider):
    """`kill_all` of DockerProvider."""

    def kill_all(self, ref: str) -> None:
        with suppress(Missing):  # without a container there are no processes
            self._kill_all(ref)

    def _kill_all(self, ref: str) -> None:
        cgroup = self._engine.cgroup(ref)
        try:
            if cgroup and kill_commands(cgroup):
                return
        except TimeoutError as error:
            raise Unavailable(f"{ref}: commands could not be killed: {error}", cause=FailureCause.TIMEOUT) from error
        except OSError:  # the container has stopped meanwhile
            if cgroup and not cgroup.has_processes():
                return
        if self._keeps_commands(ref):
            self.restart(ref)

    def _keeps_commands(self, ref: str) -> bool:
        """Return whether the engine lists a command at several looks. A fork of the helper ends shortly after its answer."""
        for _ in range(LOOKS):
            if not self._has_commands(ref):
                return False
            time.sleep(LOOK_INTERVAL_SECONDS)
        return True

    def _has_commands(self, ref: str) -> bool:
        """Return whether the engine lists a stopped process, or another one than process 1 and its helper. Raise Missing.

        False if the engine cannot list the processes, as under some runtimes. A command may imitate the helper here."""
        init = self._engine.call("GET", f"/containers/{ref}/json")["State"]["Pid"]
        try:
            listed = self._engine.call("GET", f"/containers/{ref}/top?ps_args={LIST_OPTIONS}")["Processes"] or []
        except Conflict:  # it does not run
            return False
        except Unavailable as failed:
            if failed.cause == FailureCause.ENGINE_ERROR:
                return False
            raise
        rows = {int(pid): (int(parent), state[:1] in STOPPED_STATES, args) for pid, parent, state, args in listed}
        helper = (init, False, rows[init][2]) if init in rows else None
        return any(pid != init and row != helper for pid, row in rows.items())


def kill_commands(cgroup: Cgroup) -> bool:
    """Kill all processes of a container but process 1, and return once they are gone. Return False if not permitted here.

    Raise TimeoutError if a process is left, OSError if the container stops."""
    if os.geteuid() != 0:
        return False
    deadline = time.monotonic() + KILL_TIMEOUT_SECONDS
    while (init := _find_init(pids := _list_pids(cgroup))) is not None:
        if not any(_is_command(pid, init) for pid in pids - {init}):
            return True
        if cgroup.freezer is None or not cgroup.freezer.is_writable():
            return False
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(pids) - 1} processes are left after {KILL_TIMEOUT_SECONDS:.0f} s")
        cgroup.freezer.freeze()
        try:
            _kill_frozen(cgroup, init)
        finally:
            cgroup.freezer.thaw()
        until = time.monotonic() + ROUND_SECONDS
        while time.monotonic() < until and _list_pids(cgroup) - {init}:
            time.sleep(POLL_INTERVAL_SECONDS)
    return False


def _kill_frozen(cgroup: Cgroup, init: int) -> None:
    """Kill all processes of a frozen container but process 1. They end once they are thawed.

    A pidfd of a process that the container has afterwards is of this process: none of a frozen container's is new."""
    opened: dict[int, int] = {}
    try:
        for pid in _list_pids(cgroup) - {init}:
            with suppress(OSError):  # it has ended
                opened[pid] = os.pidfd_open(pid)
        for pid in opened.keys() & _list_pids(cgroup):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(opened[pid], signal.SIGKILL)
    finally:
        for descriptor in opened.values():
            os.close(descriptor)


def _list_pids(cgroup: Cgroup) -> set[int]:
    return set(map(int, cgroup.processes.read_text().split()))


def _find_init(pids: set[int]) -> int | None:
    """Return process 1 of the container, as numbered here. None if it is not visible.

    Each process has a number in its own namespace of pids and in each outer one; those of a command are as many as those of
    process 1, or more in a namespace that the command has created."""
    numbers = {pid: names for pid in pids if (names := _read_namespace_pids(pid))}
    depth = min(map(len, numbers.values()), default=0)
    found = [pid for pid, names in numbers.items() if len(names) == depth and names[-1] == 1]
    return found[0] if depth > 1 and len(found) == 1 else None


def _is_command(pid: int, init: int) -> bool:
    """Return whether a process is stopped, or not a fork of process 1, whose layout no command can read."""
    state, layout = _read_stat(pid)
    return bool(state) and (state in STOPPED_STATES or layout is None or layout != _read_stat(init)[1])


def _read_stat(pid: int) -> tuple[str, Layout | None]:
    """Return the state of a process, empty if it has ended, and its layout, None if that is hidden from here."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", None
    layout = Layout(int(fields[23]), int(fields[25]))  # fields 26 and 28 of proc(5)
    return ("" if fields[0] in DEAD_STATES else fields[0]), layout if min(layout) > 1 else None


def _read_namespace_pids(pid: int) -> list[int]:
    with suppress(OSError):  # it has ended
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(([*map(int, line.split()[1:])] for line in lines if line.startswith("NSpid:")), [])
    return []

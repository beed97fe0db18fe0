"""Process supervisor of `manage.py up`: restarts child processes and leaves none behind. Linux only.

Each child leads its own session, so that Ctrl-C in a terminal reaches only `up`. `up` stops a child with SIGTERM to the leader
and, after a deadline, SIGKILL to the group. If `up` itself is killed, the kernel kills each child (`die_with_parent`) and the
child's processes (`tie_descendants`). The next `up` finds any survivor by LEASEHOLD_INSTANCE in its environment
(`kill_instance`)."""

import ctypes
import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from sandboxes.db.clock import compute_backoff

INSTANCE_VARIABLE = "LEASEHOLD_INSTANCE"
INSTANCE_PREFIX = "up-"  # `up` names instances up-<random>.<child>.<start number>
TICK_SECONDS = 0.2  # interval between checks of the children
STABLE_AFTER_SECONDS = 60.0  # a child that ran this long starts again with the shortest backoff
STOP_TIMEOUT_SECONDS = 8.0  # from SIGTERM to SIGKILL, for a child without a longer time of its own
KILL_TIMEOUT_SECONDS = 10.0
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)

PrintLine = Callable[[str], None]


# --- process lifetime ---------------------------------------------------------------------------------------------


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies. `parent` is the expected parent process id."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before prctl
        os.kill(os.getpid(), signal.SIGKILL)


def tie_descendants() -> None:
    """Have the kernel kill this process and every process it forks when their parent dies.

    Web workers and the queue's sentinel otherwise survive a killed parent unsupervised. Programs started with exec lose the
    setting, so commands executed for agents are not affected."""
    die_with_parent(os.getppid())
    os.register_at_fork(after_in_child=lambda: _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))


def kill_instance(instance: str) -> int:
    """Kill every process started for an instance. Return how many were killed. Raise TimeoutError if some do not end."""
    killed: set[int] = set()
    deadline = time.monotonic() + KILL_TIMEOUT_SECONDS
    while pids := [pid for name in os.listdir("/proc") if name.isdigit() and _belongs_to_instance(pid := int(name), instance)]:
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                fd = os.pidfd_open(pid)
                try:
                    if _belongs_to_instance(pid, instance):  # the pid may have been reused before pidfd_open
                        signal.pidfd_send_signal(fd, signal.SIGKILL)
                        killed.add(pid)
                finally:
                    os.close(fd)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {pids} do not end")
        time.sleep(0.02)
    return len(killed)


def _belongs_to_instance(pid: int, instance: str) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # the process ended, or belongs to another user
        return False
    expected = f"{INSTANCE_VARIABLE}={instance}".encode()
    return pid != os.getpid() and any(entry == expected or entry.startswith(expected + b".") for entry in environ)


# --- lock file ----------------------------------------------------------------------------------------------------


class AlreadyRunning(Exception):
    """Another process holds the lock file."""


@contextmanager
def hold_lock_file(path: Path) -> Iterator[tuple[dict[str, Any], Callable[[dict[str, Any]], None]]]:
    """Hold the lock of a file. Yield the note of its last holder ({} if none) and a function that writes a new note.

    Raise AlreadyRunning if another process holds the lock. The kernel releases the lock when the process ends. The note
    remains in the file: the next holder uses it to clean up."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note = _read_note(file)
            raise AlreadyRunning(f"pid {note.get('pid', 'unknown')}, since {note.get('started_at', 'just now')}") from None

        def write(note: dict[str, Any]) -> None:
            file.truncate(0)
            file.write(json.dumps(note) + "\n")
            file.flush()

        yield _read_note(file), write


def _read_note(file: IO[str]) -> dict[str, Any]:
    file.seek(0)
    try:
        note = json.loads(file.read())
    except ValueError:
        return {}
    return note if isinstance(note, dict) else {}


# --- children -----------------------------------------------------------------------------------------------------


@dataclass
class Child:
    """A supervised process group. It is restarted when it ends, or when `find_problem` returns a reason."""

    name: str
    argv: Sequence[str]
    cwd: Path
    env: Mapping[str, str] = field(default_factory=dict)
    find_problem: Callable[["Child"], str] = lambda child: ""
    drain_seconds: float = 0.0  # stopped before the others, which its requests need; 0: stopped with them
    starts: int = 0
    failures: int = 0
    started_at: float = 0.0  # monotonic clock, like next_start_at
    next_start_at: float = 0.0
    instance: str = ""
    process: subprocess.Popen[bytes] | None = None

    def start(self, run_instance: str) -> None:
        """Start the process in its own session and instance. Main thread only: the child dies with the calling thread."""
        self.starts += 1
        self.instance = f"{run_instance}.{self.name}.{self.starts}"
        self.started_at = time.monotonic()
        parent = os.getpid()
        self.process = subprocess.Popen(
            self.argv,
            cwd=self.cwd,
            env={**os.environ, **self.env, INSTANCE_VARIABLE: self.instance},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent),
        )

    @property
    def age(self) -> float:
        return time.monotonic() - self.started_at

    @property
    def has_ended(self) -> bool:
        """Return whether the leader has ended. It stays a zombie until it is reaped, which reserves its pid, the group id."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self.process is not None and os.waitid(os.P_PID, self.process.pid, flags) is not None

    def terminate(self) -> None:
        """Send SIGTERM to the leader only, which stops its group: the queue's sentinel would not survive SIGTERM."""
        if self.process:
            os.kill(self.process.pid, signal.SIGTERM)  # Popen.terminate may reap the leader, which frees the group id

    def kill_and_reap(self) -> int:
        """Kill all remaining processes, in and outside the group. Return the leader's exit code, negative after a signal."""
        assert self.process is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        with suppress(TimeoutError):  # a process in an uninterruptible wait ends as soon as the wait ends
            kill_instance(self.instance)
        self.process = None
        return code


class Supervisor:
    """Starts children, restarts those that end or hang, and stops all. Calls `release_instance` for each dead instance."""

    def __init__(
        self, run_instance: str, children: Sequence[Child], *, print_line: PrintLine, release_instance: Callable[[str], object]
    ) -> None:
        self.run_instance = run_instance
        self.children = children
        self.print_line = print_line
        self.release_instance = release_instance
        self.stopping = self.stop_at_once = False

    def install_signal_handlers(self) -> None:
        """Make SIGTERM, SIGINT and SIGHUP stop `run`. A second signal kills the children without waiting."""

        def request_stop(number: int, frame: object) -> None:
            self.stopping, self.stop_at_once = True, self.stopping

        signal.signal(signal.SIGTERM, request_stop)
        signal.signal(signal.SIGINT, request_stop)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # set by nohup
            signal.signal(signal.SIGHUP, request_stop)

    def run(self, each_tick: Callable[[], None] = lambda: None, *, drain: Callable[[], None] = lambda: None) -> None:
        """Supervise the children until a signal arrives, then call `drain` and stop them all, also after an exception."""
        try:
            while not self.stopping:
                for child in self.children:
                    self._restart_if_ended(child)
                each_tick()
                time.sleep(TICK_SECONDS)
            if not self.stop_at_once:
                drain()
        finally:
            self.stop()

    def _restart_if_ended(self, child: Child) -> None:
        if child.process is None:
            if time.monotonic() >= child.next_start_at:
                child.start(self.run_instance)
            return
        problem = child.find_problem(child)
        if not (problem or child.has_ended):
            return
        pid = child.process.pid
        code = child.kill_and_reap()
        problem = problem or (f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}")
        child.failures = 1 if child.age > STABLE_AFTER_SECONDS else child.failures + 1
        delay = compute_backoff(child.failures, initial=timedelta(seconds=1), maximum=timedelta(minutes=1)).total_seconds()
        child.next_start_at = time.monotonic() + delay
        self.print_line(f"{child.name} (pid {pid}): {problem}; restarting in {delay:g} s")
        self.release_instance(child.instance)

    def stop(self) -> None:
        """Stop every child: first those that drain, then the others. A child that does not end in time is killed."""
        running = [child for child in self.children if child.process]
        for child in running:
            if child.drain_seconds:
                self._stop([child], timeout=child.drain_seconds)
        self._stop([child for child in running if child.process], timeout=STOP_TIMEOUT_SECONDS)

    def _stop(self, running: list[Child], *, timeout: float) -> None:
        for child in running:
            child.terminate()
        deadline = time.monotonic() + timeout
        while running and time.monotonic() < deadline and not self.stop_at_once:
            for child in [child for child in running if child.has_ended]:
                child.kill_and_reap()
                running.remove(child)
            time.sleep(0.05)
        for child in running:
            self.print_line(f"{child.name} does not stop: killing it")
            child.kill_and_reap()

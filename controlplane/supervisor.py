"""Process supervisor of `manage.py up`: forks child processes, restarts them and leaves none behind. Linux only.

A child shares the memory of all that its parent has imported. Fork only while one thread runs, and with database connections
closed. Each child leads its own session, so that Ctrl-C in a terminal reaches only `up`. `up` stops a child with SIGTERM to the
leader and, after a deadline, SIGKILL to the group. If `up` itself is killed, the kernel kills each child (`die_with_parent`).
The next `up` finds any survivor by LEASEHOLD_INSTANCE in its environment (`kill_instance`)."""

import ctypes
import fcntl
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

INSTANCE_VARIABLE = "LEASEHOLD_INSTANCE"
RESERVED_VARIABLE = "_LEASEHOLD_RESERVED"  # its place in the environment is overwritten with the instance of a forked child
RESERVED_BYTES = 128
INSTANCE_PREFIX = "up-"  # `up` names instances up-<random>.<child>.<start number>
TICK_SECONDS = 0.2  # interval between checks of the children
STABLE_AFTER_SECONDS = 60.0  # a child that ran this long starts again with the shortest backoff
STOP_TIMEOUT_SECONDS = 8.0  # from SIGTERM to SIGKILL, for a child without a longer time of its own
KILL_TIMEOUT_SECONDS = 10.0
MAX_BACKOFF_SECONDS = 60.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
_libc = ctypes.CDLL(None)

PrintLine = Callable[[str], None]


# --- process lifetime ---------------------------------------------------------------------------------------------


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies. `parent` is the expected parent process id."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before prctl
        os.kill(os.getpid(), signal.SIGKILL)


def find_other_threads() -> list[str]:
    """Return the names of this process's threads, without the calling one."""
    return [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]


def require_single_thread(name: str) -> None:
    """Raise RuntimeError if this process has another thread, whose locks the forked process `name` would inherit for ever."""
    if others := find_other_threads():
        raise RuntimeError(f"cannot fork {name} while other threads run: {', '.join(others)}")


def reserve_instance_name() -> None:
    """Execute this program again with room for an instance's name in the environment, unless there is room already."""
    if RESERVED_VARIABLE not in os.environ:
        reserved = {RESERVED_VARIABLE: "x" * RESERVED_BYTES}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | reserved)  # noqa: S606


def set_identity(name: str, instance: str) -> None:
    """Give this forked process its name, and its instance in /proc/<pid>/environ and in os.environ.

    /proc shows the memory in which the kernel placed the environment when the program began, so that memory is overwritten."""
    os.environ.pop(RESERVED_VARIABLE, None)
    os.environ[INSTANCE_VARIABLE] = instance
    _libc.prctl(PR_SET_NAME, f"leasehold-{name}"[:15].encode())
    initial = Path("/proc/self/environ").read_bytes()
    entry = f"{RESERVED_VARIABLE}={'x' * RESERVED_BYTES}".encode()
    if (offset := initial.find(entry)) >= 0:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start = int(fields[47])  # env_start, field 50 of proc(5)
        ctypes.memmove(start + offset, f"{INSTANCE_VARIABLE}={instance}".encode().ljust(len(entry), b"\0"), len(entry))


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


def exit_after(work: Callable[[], object]) -> NoReturn:
    """End this forked process after `work`: with code 0, the code of SystemExit, or 1 after another exception."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def run_forked(name: str, work: Callable[[], object]) -> int:
    """Call `work` in a forked process. Return its exit code, negative after a signal."""
    require_single_thread(name)
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        die_with_parent(parent)
        exit_after(work)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# --- lock file ----------------------------------------------------------------------------------------------------


class AlreadyRunning(Exception):
    """Another process holds the lock file."""


class LockFile:
    """A file whose lock this process holds. `note` is that of the last holder, {} if there is none."""

    def __init__(self, file: IO[str]) -> None:
        self._file, self.note = file, _read_note(file)

    def write(self, note: dict[str, Any]) -> None:
        self._file.truncate(0)
        self._file.write(json.dumps(note) + "\n")
        self._file.flush()

    def make_inheritable(self) -> int:
        """Keep the lock when this process executes another program. Return the file descriptor."""
        os.set_inheritable(self._file.fileno(), True)
        return self._file.fileno()


@contextmanager
def hold_lock_file(path: Path) -> Iterator[LockFile]:
    """Hold the lock of a file.

    Raise AlreadyRunning if another process holds the lock. The kernel releases the lock when the process ends. The note
    remains in the file: the next holder uses it to clean up."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note = _read_note(file)
            raise AlreadyRunning(f"pid {note.get('pid', 'unknown')}, since {note.get('started_at', 'just now')}") from None
        os.register_at_fork(after_in_child=file.close)  # a child that outlives this process must not hold the lock
        yield LockFile(file)


def _read_note(file: IO[str]) -> dict[str, Any]:
    file.seek(0)
    try:
        note = json.loads(file.read())
    except ValueError:
        return {}
    return note if isinstance(note, dict) else {}


# --- children -----------------------------------------------------------------------------------------------------


def find_no_problem(child: "Child") -> str:
    return ""


@dataclass
class Child:
    """A supervised process group. It is restarted when it ends, or when `find_problem` returns a reason.

    `work` is called in the forked process, which ends with code 0, the code of SystemExit, or 1 after another exception."""

    name: str
    work: Callable[[], object]
    find_problem: Callable[["Child"], str] = find_no_problem
    drain_seconds: float = 0.0  # stopped before the others, which its requests need; 0: stopped with them
    starts: int = 0
    failures: int = 0
    started_at: float = 0.0  # monotonic clock, like next_start_at
    next_start_at: float = 0.0
    instance: str = ""
    pid: int = 0  # 0: not running

    def start(self, run_instance: str) -> None:
        """Fork the process into its own session and instance. Main thread only: the child dies with the calling thread.

        Raise RuntimeError if this process has another thread."""
        require_single_thread(self.name)
        self.starts += 1
        self.instance = f"{run_instance}.{self.name}.{self.starts}"
        self.started_at = time.monotonic()
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until the child has replaced the handlers of its parent
        self.pid = os.fork()
        if not self.pid:
            self._run_forked(parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _run_forked(self, parent: int) -> NoReturn:
        try:
            os.setsid()
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            die_with_parent(parent)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            set_identity(self.name, self.instance)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        exit_after(self.work)

    @property
    def age(self) -> float:
        return time.monotonic() - self.started_at

    @property
    def has_ended(self) -> bool:
        """Return whether the leader has ended. It stays a zombie until it is reaped, which reserves its pid, the group id."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return bool(self.pid) and os.waitid(os.P_PID, self.pid, flags) is not None

    def terminate(self) -> None:
        """Send SIGTERM to the leader only, which stops its group."""
        if self.pid:
            os.kill(self.pid, signal.SIGTERM)

    def kill_and_reap(self) -> int:
        """Kill all remaining processes, in and outside the group. Return the leader's exit code, negative after a signal."""
        assert self.pid
        for kill in (os.killpg, os.kill):  # a child that has just been forked leads no group yet
            with suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        with suppress(TimeoutError):  # a process in an uninterruptible wait ends as soon as the wait ends
            kill_instance(self.instance)
        self.pid = 0
        return code


class Supervisor:
    """Starts children, restarts those that end or hang, and stops all."""

    def __init__(self, run_instance: str, children: Sequence[Child], *, print_line: PrintLine) -> None:
        self.run_instance = run_instance
        self.children = children
        self.print_line = print_line
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
        if not child.pid:
            if time.monotonic() >= child.next_start_at:
                child.start(self.run_instance)
            return
        problem = child.find_problem(child)
        if not (problem or child.has_ended):
            return
        pid = child.pid
        code = child.kill_and_reap()
        problem = problem or (f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}")
        child.failures = 1 if child.age > STABLE_AFTER_SECONDS else child.failures + 1
        delay = min(2.0 ** min(child.failures - 1, 6), MAX_BACKOFF_SECONDS)
        child.next_start_at = time.monotonic() + delay
        self.print_line(f"{child.name} (pid {pid}): {problem}; restarting in {delay:g} s")

    def stop(self) -> None:
        """Stop every child: first those that drain, together, then the others. A child that does not end in time is killed."""
        running = [child for child in self.children if child.pid]
        if draining := [child for child in running if child.drain_seconds]:
            self._stop([*draining], timeout=max(child.drain_seconds for child in draining))
        self._stop([child for child in running if child.pid], timeout=STOP_TIMEOUT_SECONDS)

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

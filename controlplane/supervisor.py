"""A few child processes kept alive, and none left behind: what `manage.py up` is made of. Linux only.

Each child leads a session of its own, so that a terminal's Ctrl-C comes to `up` alone, which then ends its children in
order: SIGTERM to the leader, and after a deadline SIGKILL to whatever its group still has. If `up` itself is killed,
the kernel kills each child (`die_with`), and a child's processes with it (`tie_descendants`); should any be left all
the same, the next `up` finds it by LEASEHOLD_INSTANCE in its environment (`kill_instance`)."""

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
INSTANCE_PREFIX = "up-"  # of the instances that `up` makes, which are up-<random>.<child>.<start>
TICK_SECONDS = 0.2  # seconds between two looks at the children
STABLE_AFTER_SECONDS = 60.0  # seconds after which an end is not held against a child that started badly before
STOP_TIMEOUT_SECONDS = 8.0  # seconds until SIGKILL; `docker stop` gives all of us ten
KILL_TIMEOUT_SECONDS = 10.0
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)

PrintLine = Callable[[str], None]


# --- nobody outlives whoever started it ---------------------------------------------------------------------------


def die_with_parent(parent: int) -> None:
    """This process is killed when its parent, which had this id a moment ago, dies."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)


def tie_descendants() -> None:
    """This process, and each that it forks, dies with its parent. Commands that it executes for others do not.

    A web worker and the queue's sentinel live on when their parent is killed; nobody then looks after them."""
    die_with_parent(os.getppid())
    os.register_at_fork(after_in_child=lambda: _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))


def kill_instance(instance: str) -> int:
    """No process that was started for this instance is left; how many were killed. TimeoutError if some do not go."""
    killed: set[int] = set()
    until = time.monotonic() + KILL_TIMEOUT_SECONDS
    while pids := [pid for name in os.listdir("/proc") if name.isdigit() and _belongs_to_instance(pid := int(name), instance)]:
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                fd = os.pidfd_open(pid)
                try:
                    if _belongs_to_instance(pid, instance):  # the number may have gone to another process before we opened it
                        signal.pidfd_send_signal(fd, signal.SIGKILL)
                        killed.add(pid)
                finally:
                    os.close(fd)
        if time.monotonic() > until:
            raise TimeoutError(f"processes {pids} do not end")
        time.sleep(0.02)
    return len(killed)


def _belongs_to_instance(pid: int, instance: str) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it ended, or is another user's
        return False
    mark = f"{INSTANCE_VARIABLE}={instance}".encode()
    return pid != os.getpid() and any(entry == mark or entry.startswith(mark + b".") for entry in environ)


# --- one at a time ------------------------------------------------------------------------------------------------


class AlreadyRunning(Exception):
    """Somebody else sits here."""


@contextmanager
def hold_lock_file(path: Path) -> Iterator[tuple[dict[str, Any], Callable[[dict[str, Any]], None]]]:
    """Hold this file's lock. What its last holder wrote into it ({} if nothing), and how to write; Taken if it lives.

    The lock goes when the process does, however it ends. The note stays: by it the next holder cleans up."""
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
        found = json.loads(file.read())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


# --- children -----------------------------------------------------------------------------------------------------


@dataclass
class Child:
    """One process group to be kept alive. `argv` is run again whenever it ends, or `hung` says why it should."""

    name: str
    argv: Sequence[str]
    cwd: Path
    env: Mapping[str, str] = field(default_factory=dict)
    hung: Callable[["Child"], str] = lambda child: ""
    starts: int = 0
    failures: int = 0
    started: float = 0.0  # by the monotonic clock, as is due
    due: float = 0.0
    instance: str = ""
    process: subprocess.Popen[bytes] | None = None

    def start(self, family: str) -> None:
        """Run it, in a session and under an instance of its own. Main thread only: it dies with the calling thread."""
        self.starts += 1
        self.instance = f"{family}.{self.name}.{self.starts}"
        self.started = time.monotonic()
        me = os.getpid()
        self.process = subprocess.Popen(
            self.argv,
            cwd=self.cwd,
            env={**os.environ, **self.env, INSTANCE_VARIABLE: self.instance},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(me),
        )

    @property
    def age(self) -> float:
        return time.monotonic() - self.started

    @property
    def ended(self) -> bool:
        """Its leader has ended. It stays a zombie until `clean`, so nobody gets its number, which names the group."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self.process is not None and os.waitid(os.P_PID, self.process.pid, flags) is not None

    def terminate(self) -> None:
        """Ask the leader to end its group. The group itself is not asked: the queue's sentinel would die of SIGTERM."""
        if self.process:
            os.kill(self.process.pid, signal.SIGTERM)  # Popen.terminate may reap it, and with it lose the group's name

    def clean(self) -> int:
        """Kill what is left of it, also what has left the group. The leader's exit code, negative after a signal."""
        assert self.process is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        with suppress(TimeoutError):  # in an uninterruptible wait, say: it will go, and can do no more until then
            kill_instance(self.instance)
        self.process = None
        return code


class Supervisor:
    """Starts its children, starts again what dies or hangs, ends them all. `forget` is told of each dead instance."""

    def __init__(self, family: str, children: Sequence[Child], *, say: PrintLine, forget: Callable[[str], object]) -> None:
        self.family = family
        self.children = children
        self.say = say
        self.forget = forget
        self.stopping = self.impatient = False

    def install_signal_handlers(self) -> None:
        """From here on SIGTERM, SIGINT and SIGHUP end `run`; a second one ends its patience."""

        def obey(number: int, frame: object) -> None:
            self.stopping, self.impatient = True, self.stopping

        signal.signal(signal.SIGTERM, obey)
        signal.signal(signal.SIGINT, obey)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup wants it ignored
            signal.signal(signal.SIGHUP, obey)

    def run(self, each_tick: Callable[[], None] = lambda: None) -> None:
        """Keep the children alive until a signal comes, then end them all, whatever happens."""
        try:
            while not self.stopping:
                for child in self.children:
                    self._restart_if_ended(child)
                each_tick()
                time.sleep(TICK_SECONDS)
        finally:
            self.stop()

    def _restart_if_ended(self, child: Child) -> None:
        if child.process is None:
            if time.monotonic() >= child.due:
                child.start(self.family)
            return
        why = child.hung(child)
        if not (why or child.ended):
            return
        pid = child.process.pid
        code = child.clean()
        why = why or (f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with code {code}")
        child.failures = 1 if child.age > STABLE_AFTER_SECONDS else child.failures + 1
        wait = compute_backoff(child.failures, initial=timedelta(seconds=1), maximum=timedelta(minutes=1)).total_seconds()
        child.due = time.monotonic() + wait
        self.say(f"{child.name} (pid {pid}): {why}; starting it again in {wait:g} s")
        self.forget(child.instance)

    def stop(self) -> None:
        """No child is left: what does not end within STOP_PATIENCE is killed."""
        left = [child for child in self.children if child.process]
        for child in left:
            child.terminate()
        until = time.monotonic() + STOP_TIMEOUT_SECONDS
        while left and time.monotonic() < until and not self.impatient:
            for child in [child for child in left if child.ended]:
                child.clean()
                left.remove(child)
            time.sleep(0.05)
        for child in left:
            self.say(f"{child.name} does not end: killing it")
            child.clean()

"""Runner: threads that execute queued runs, and the main thread that claims runs for them.

The web process has one (LEASEHOLD_RUNNER_THREADS), and `manage.py runner` is one of its own. The main thread renews the claims
of the attempts that a thread of this runner executes. The claims of all other attempts expire, and a runner takes them over:
those of a dead process, and those whose thread has ended without recording the end."""

import threading
from collections.abc import Callable
from datetime import datetime

import structlog
from django.db import close_old_connections, connections

from leases.queue import attempts, queue
from leases.queue.models import QueuedRun
from leases.queue.queue import Attempt
from sandboxes import installation_marks, long_calls
from sandboxes.background import OnDemandThread
from sandboxes.db import database_time
from sandboxes.db.connection_errors import CONNECTION_ERRORS

log = structlog.get_logger(__name__)
# Between two looks at the queue. Runs that this process queues start at once.
POLL_SECONDS, IDLE_POLL_SECONDS = 2.0, 10.0
StartThread = Callable[[str, Callable[[], object]], object]


def start_thread(name: str, act: Callable[[], object]) -> None:
    """Execute `act` in a new thread, without the limit on long calls: the number of these threads is the limit."""

    def run() -> None:
        long_calls.exempt_thread()
        try:
            act()
        finally:
            connections.close_all()

    threading.Thread(target=run, name=name, daemon=True).start()


class Runner:
    """Runner of this process. `start`, `notify` and `stop` may be called by any thread."""

    def __init__(
        self, thread_count: int, *, now: Callable[[], datetime] = database_time.now, start_thread: StartThread = start_thread
    ) -> None:
        self.name = attempts.build_runner_name()
        self._count, self._now, self._start_thread = thread_count, now, start_thread
        self._wakeup, self._stopping, self._lock = threading.Event(), threading.Event(), threading.Lock()
        self._main = OnDemandThread("runner", self._run)
        self._refusal = ""  # that was logged
        self._executing = set[Attempt]()  # each by a thread, which removes the attempt at its end

    def start(self) -> None:
        """Start the main thread, unless it runs or the runner has no threads."""
        with self._lock:
            if self._count and not self._stopping.is_set():
                self._main.start()

    def notify(self) -> None:
        """Look at the queue now: a run was added, or one has ended."""
        self.start()
        self._wakeup.set()

    def stop(self) -> None:
        """Claim no further runs. Those in progress go on."""
        self._stopping.set()
        self._wakeup.set()

    def join(self) -> None:
        """Wait until all runs of this process have ended. Call `stop` before."""
        self._main.join()

    @property
    def is_idle(self) -> bool:
        """Return whether no thread executes an attempt."""
        return not self._executing

    def run_pending(self) -> int:
        """Recover, expire, and start as many runs as this runner has free threads. Return the number of started runs.

        While the installation is not recognised, only the claims of the attempts in progress are renewed."""
        now, executing = self._now(), self._list_executing()
        queue.renew(self.name, executing, now=now)
        if self._is_refused():
            return 0
        attempts.recover(runner=self.name, now=now)
        queue.expire(now=now)
        started = 0
        while len(self._executing) < self._count and not self._stopping.is_set():
            row = queue.claim(self.name, now=self._now())
            if row is None:
                break
            self._start(row)
            started += 1
        return started

    def _is_refused(self) -> bool:
        """Return whether no run may begin here: a restored or copied database has runs as queued that were executed since."""
        refusal = installation_marks.find_refusal()
        if refusal and refusal != self._refusal:
            log.warning("runner: no queued runs are executed", reason=refusal)
        self._refusal = refusal
        return bool(refusal)

    def _list_executing(self) -> list[Attempt]:
        with self._lock:
            return [*self._executing]

    def _start(self, row: QueuedRun) -> None:
        attempt = Attempt(row.pk, row.attempt)
        with self._lock:
            self._executing.add(attempt)
        try:
            self._start_thread(f"queued-run-{row.pk}", lambda: self._execute(row, attempt))
        except RuntimeError:  # no thread was started: the limit of the process or of the machine is reached
            self._end(attempt)
            raise

    def _end(self, attempt: Attempt) -> None:
        with self._lock:
            self._executing.discard(attempt)
        self._wakeup.set()

    def _run(self) -> None:
        pause = 0.0
        try:
            while not self.is_idle or not self._stopping.is_set():
                self._wakeup.wait(pause)
                self._wakeup.clear()
                try:
                    close_old_connections()
                    is_idle = not queue.has_open()
                    pause = IDLE_POLL_SECONDS if is_idle else POLL_SECONDS
                    if not is_idle:
                        self.run_pending()
                except CONNECTION_ERRORS as error:
                    log.warning("runner: the database does not respond", error=str(error))
                except Exception:  # the next look tries again
                    log.exception("runner failed")
        finally:
            connections.close_all()

    def _execute(self, row: QueuedRun, attempt: Attempt) -> None:
        try:
            attempts.execute(row, now=self._now())
        except Exception:  # the claim is not renewed any more, and `recover` takes the attempt over
            log.exception("queued run not recorded", queued_run=str(row.pk), attempt=row.attempt)
        finally:
            self._end(attempt)


_runner = Runner(0)


def configure(thread_count: int) -> None:
    """Give this process a runner, before it serves requests."""
    global _runner
    _runner = Runner(thread_count)


def get_runner() -> Runner:
    """Return the runner of this process, which has no threads in processes that serve no requests."""
    return _runner

"""Claim on an open Run, and storage of the output of its command while the command runs.

While the command runs, the heartbeat also looks for a request to stop the command, and kills it.

Before and after the command, progress extends the claim: /data may take long to pull and to store. While the command runs, the
deadline is fixed: its start, its timeout and KILL_GRACE."""

from datetime import timedelta

import structlog
from django.conf import settings
from django.db.models import QuerySet

from sandboxes.claims import KILL_GRACE, Claim, Progress
from sandboxes.db.clock import Clock
from sandboxes.errors import ClaimLost
from sandboxes.models import Run
from sandboxes.providers.base import Provider
from sandboxes.providers.command_results import OutputView
from sandboxes.runs.stops import KillThread

log = structlog.get_logger(__name__)
DEADLINE_TOLERANCE = timedelta(seconds=5)  # a smaller error of a deadline is not corrected: KILL_GRACE covers it


class RunClaim(Claim):
    """Claim of the process that waits for a Run's result."""

    def __init__(self, run: Run, clock: Clock, provider: Provider) -> None:
        super().__init__(Run.objects.none(), deadline=run.deadline_at, clock=clock)
        self._run_id, self._token = run.pk, run.claim
        self.output = OutputView()
        self._stored_bytes = 0
        self._ref, self._provider = run.sandbox.ref, provider
        self._executing = False
        self._kill: KillThread | None = None  # the last one

    def _get_rows(self) -> QuerySet[Run]:
        """Return the open Run. Built when needed: most commands end before their claim is extended."""
        return Run.objects.filter(pk=self._run_id, claim=self._token, ended_at__isnull=True)

    def begin_command(self, timeout: timedelta) -> None:
        """Set the deadline of a command that starts now, unless the present deadline is nearly the same. Raises ClaimLost."""
        with self.lock:
            deadline = self.clock() + timeout + KILL_GRACE
            self.forget_progress()
            is_exact = abs(deadline - self.deadline) <= DEADLINE_TOLERANCE
            if self.lost or not (is_exact or self._write(deadline)):
                raise ClaimLost()
            self._executing = True

    def end_command(self) -> None:
        """Count the end of the command as progress. A claim that was lost meanwhile is noticed when the Run is closed."""
        self._executing = False
        Progress.note_progress(self)

    def beat(self) -> None:
        self.store_output()
        super().beat()
        if self._executing:
            self._kill_stopped()

    def _kill_stopped(self) -> None:
        """Kill the command if its stop was requested, in a thread: an engine that does not respond delays no other claim.

        Repeated until the command has ended, because it may begin in the sandbox after a kill."""
        if (self._kill is None or self._kill.done) and self._get_rows().exclude(stop_reason="").exists():
            self._kill = KillThread(self._provider, self._ref, str(self._run_id))
            try:
                self._kill.start()
            except RuntimeError as error:  # the limit of threads is reached; tried again at the next beat
                self._kill = None
                log.warning("command not killed", run=str(self._run_id), error=str(error))

    def store_output(self) -> None:
        """Store the output so far in the open Run, if there is more output than at the last call."""
        stdout, stderr = self.output.read()
        if len(stdout) + len(stderr) == self._stored_bytes:
            return
        max_bytes = settings.RUN_OUTPUT_KEPT
        self._get_rows().update(
            stdout=stdout[:max_bytes], stderr=stderr[:max_bytes], stdout_bytes=len(stdout), stderr_bytes=len(stderr)
        )
        self._stored_bytes = len(stdout) + len(stderr)

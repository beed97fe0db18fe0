"""Attempts of queued runs: execute one, and adopt or repeat that of a runner that has died.

An attempt is fenced: its Run opens only while the row says that this attempt is started, under this runner and not interrupted.
A runner that lost its claim on the row therefore executes nothing."""

import base64
import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import structlog
from django.conf import settings
from django.db.models import QuerySet

from leases import api_keys, execution, leasing, one_shot, shells, turns
from leases.agent_runs import lifecycle
from leases.agent_runs.clis.base import AgentOptions
from leases.agent_runs.lifecycle import AgentRequest
from leases.agent_runs.policy import AgentPolicy
from leases.allow_lists import AllowLists
from leases.errors import LeaseEnded, NotAllowed, QueuedRunInterrupted
from leases.failed_by import classify_lease_end
from leases.grants import issuers
from leases.grants.issuers import Issuer, Right
from leases.models import AgentKey, Lease, LeaseStatus, Turn
from leases.one_shot import OneShotRequest
from leases.queue import queue, sealing
from leases.queue.models import QueuedRun, QueuedRunState
from sandboxes.db import encryption, tracing
from sandboxes.db.clock import Clock, clock_from, compute_backoff
from sandboxes.db.connection_errors import CONNECTION_ERRORS
from sandboxes.db.sql import Statement
from sandboxes.deferred_writes import end_if_unanswered
from sandboxes.errors import SandboxError
from sandboxes.failed_by import classify_run
from sandboxes.failures import find_cause, find_provider
from sandboxes.guard import Guard, WrappedGuard
from sandboxes.lifecycle import checkpoint
from sandboxes.models import Run, RunOutcome
from sandboxes.providers.errors import Rejected
from sandboxes.runs.operations import Command
from sandboxes.storage.base import StoreError

log = structlog.get_logger(__name__)
STATE = QueuedRunState
MAX_UNSTARTED_BACKOFF = timedelta(minutes=1)  # after an attempt whose command has not begun
LOST_RUNNER_NOTE = "The runner died during the run, and the exit code is unknown."


@dataclass(frozen=True)
class AttemptGuard(WrappedGuard):
    """Guard of a lease and of the attempt of a queued run together."""

    row: QueuedRun

    def build_condition(self) -> Statement:
        inner = super().build_condition()
        started = (
            "SELECT 1 FROM leases_queuedrun WHERE leases_queuedrun.id = %s AND state = %s AND attempt = %s AND runner = %s"
            " AND interrupted_at IS NULL"
        )
        values = (self.row.pk, STATE.STARTED.value, self.row.attempt, self.row.runner)
        return Statement(f"{inner.text} AND EXISTS ({started})", (*inner.values, *values))

    def note_run_opened(self, *, now: datetime) -> None:
        super().note_run_opened(now=now)
        # A request to interrupt the run either is found here, or waits for the lock and then finds the Run.
        if not find_attempt(self.row).select_for_update(no_key=True).filter(interrupted_at__isnull=True).exists():
            raise QueuedRunInterrupted()
        find_issuer(self.row, now=now)  # again: the attempt may have waited for its sandbox
        queue.announce_start(self.row, now=now)

    def check_active(self) -> None:
        super().check_active()
        if not find_attempt(self.row).filter(runner=self.row.runner, interrupted_at__isnull=True).exists():
            raise QueuedRunInterrupted()


def find_attempt(row: QueuedRun) -> QuerySet[QueuedRun]:
    return QueuedRun.objects.filter(pk=row.pk, attempt=row.attempt, state=STATE.STARTED)


def execute(row: QueuedRun, *, now: datetime) -> None:
    """Execute the attempt of a claimed run, and end the run or queue it again. Errors are recorded."""
    clock = clock_from(now)
    tracing.caller_trace.set(row.request.get("traceparent", ""))
    if row.started_at:
        tracing.record_child_span("queue", row.run_id, row.queued_at, row.started_at, {"leasehold.attempt": row.attempt})
    try:
        _execute(row, clock)
    except Exception as failed:
        _record_failure(row, failed, clock)
        return
    checkpoint("attempt executed", row)
    run = Run.objects.filter(pk=row.run_id).first()
    if row.turn_number is not None:
        _settle_turn(row, now=clock())
    elif run is None:  # a one-shot run whose sandbox did not start
        _retry_unstarted(row, "The sandbox of the run could not be started.", now=clock())
    else:
        settle(row, run, now=clock())


def _execute(row: QueuedRun, clock: Clock) -> None:
    key = find_issuer(row, now=clock())
    request, secrets, run_id = row.request, sealing.open_secrets(row), row.run_id
    timeout = timedelta(seconds=request["timeout_seconds"])
    stdin = base64.b64decode(secrets.get("stdin", ""))

    def wrap(guard: Guard) -> Guard:
        return AttemptGuard(guard, row)

    if row.lease_id is None:

        def admit() -> None:
            if key is not None:
                api_keys.consume_rate_limit_token(key, per_minute=settings.CREATES_PER_MINUTE, now=clock())

        one_shot.run_once(
            OneShotRequest(
                row.agent_did, request["argv"], timeout, stdin, secrets["env"], request["cwd"],
                memory_mib=request["memory_mib"], environment_type=request["environment_type"], pool=request["pool"],
                key_id=request["key_id"], allowed=AllowLists.of_key(key) if key else None, run_id=run_id, wrap_guard=wrap,
                attempt=row.run_attempt,
                llm_proxy=request.get("llm_proxy", True),
            ),
            now=clock(), actor=row.actor, admit=admit,
        )  # fmt: skip
        return
    if row.turn_number is not None:
        turns.take_turn(
            row.lease_id, row.turn_number, secrets["state"], now=clock(), actor=row.actor, run_id=run_id,
            attempt=row.run_attempt, wrap_guard=wrap,
        )  # fmt: skip
        return
    context = shells.build_context(row.lease_id, request["shell"], cwd=request["cwd"], env=secrets["env"])
    if request["kind"] == "agent_run":
        options = AgentOptions(
            secrets["prompt"],
            **request["options"],
            argv=tuple(request["argv"]),
            policy=AgentPolicy.from_document(request["policy"]),
        )
        agent_request = AgentRequest(request["cli"], options, context.env, context.cwd, timeout, row.run_attempt)
        agent_run = lifecycle.create(row.lease_id, agent_request, run_id=run_id, queued=True, now=clock(), actor=row.actor)
        lifecycle.execute(agent_run, agent_request, now=clock(), actor=row.actor, wrap_guard=wrap)
        return
    command = Command(request["argv"], timeout, context.env, context.cwd, stdin, run_id=run_id, attempt=row.run_attempt)
    execution.exec_command(row.lease_id, command, now=clock(), actor=row.actor, wrap_guard=wrap)


def find_issuer(row: QueuedRun, *, now: datetime) -> AgentKey | None:
    """Return the API key that queued a run, None if it was queued without one.

    Raise NotAllowed if the key was revoked, has expired, or may not work for the agent any more."""
    key_id = row.request.get("key_id")
    if not key_id:
        return None
    key = AgentKey.objects.filter(pk=key_id).first()
    right = Right(Issuer.of_key(int(key_id)), agent_did=row.agent_did)  # not of one secret: a rotated key keeps its queue
    if reason := issuers.explain_end(right, key, now=now):
        raise NotAllowed(f"The API key that queued the run {reason}.")
    return key


def settle(row: QueuedRun, run: Run, *, now: datetime) -> None:
    """End a run by the ended Run of its attempt; or queue it again, if the outcome is unknown and the run repeatable."""
    if row.turn_number is not None:
        _settle_turn(row, now=now)
    elif run.exit_code is not None:
        is_ok = run.outcome == RunOutcome.OK
        message = run.note or (f"Timed out after {row.request['timeout_seconds']} s." if run.timed_out else "")
        error = (
            None
            if is_ok
            else queue.build_error(
                "exec", message or f"Exit code {run.exit_code}.", retryable=False, code=run.outcome, origin=classify_run(run)
            )
        )
        queue.finish(row, STATE.COMPLETED if is_ok else STATE.FAILED, exit_code=run.exit_code, error=error, now=now)
    elif run.outcome == RunOutcome.FAILED:
        error = queue.build_error("start", run.note, retryable=True, code=run.error_code or "error", origin=classify_run(run))
        _retry_unstarted(row, run.note, now=now, error=error)
    else:
        _retry_or_fail(row, run, now=now)


def _settle_turn(row: QueuedRun, *, now: datetime) -> None:
    """End a queued turn by its stored answer, a skipped one too. Queue the run again while the turn has no answer.

    The turn of a runner that died in the middle is settled by a sweep or by the next attempt: from its Run, or as skipped. The
    command is not executed again in either case, and the pending timeout is over with the beginning of the turn."""
    turn = queue.find_turn(row)
    if turn is not None:
        exit_code = turn.run.exit_code if turn.run else None
        queue.finish(row, STATE.COMPLETED, exit_code=exit_code, now=now)
    elif row.turn_number is not None and Turn.objects.filter(lease=row.lease_id, number=row.turn_number).exists():
        delay = compute_backoff(row.attempt, maximum=timedelta(seconds=10))
        error = queue.build_error("exec", LOST_RUNNER_NOTE, retryable=True, code="outcome_unknown")
        if not queue.requeue(row, delay=delay, error=error, now=now):
            queue.finish(row, STATE.FAILED, error=error, now=now)
    else:
        _retry_unstarted(row, "The runner died before the command began.", now=now)


def _record_failure(row: QueuedRun, failed: Exception, clock: Clock) -> None:
    """Queue a run again after a temporary error before its command began, and end it otherwise."""
    run = Run.objects.filter(pk=row.run_id).first()
    if run is not None and run.ended_at is None:  # a sweep closes the Run, and `recover` settles this row then
        log.warning("run of a queued run is still open", queued_run=str(row.pk), attempt=row.attempt, error=str(failed))
        return
    if run is not None and run.outcome != RunOutcome.FAILED:
        settle(row, run, now=clock())
    elif _is_temporary(failed):
        _retry_unstarted(row, str(failed), now=clock(), error=_describe(failed, retryable=True))
    elif not isinstance(failed, QueuedRunInterrupted) or find_attempt(row).filter(interrupted_at__isnull=False).exists():
        if not isinstance(failed, (SandboxError, Rejected)):
            log.exception("queued run failed", queued_run=str(row.pk), attempt=row.attempt)
        queue.finish(row, STATE.FAILED, error=_describe(failed, retryable=False), now=clock())


def _is_temporary(failed: Exception) -> bool:
    if isinstance(failed, (LeaseEnded, QueuedRunInterrupted, encryption.DecryptionFailed, Rejected)):
        return False
    return isinstance(failed, (StoreError, *CONNECTION_ERRORS)) or getattr(failed, "retry_after", None) is not None


def _describe(failed: Exception, *, retryable: bool) -> dict[str, Any]:
    is_expected = isinstance(failed, (SandboxError, Rejected, StoreError))
    message = str(failed) if is_expected else "Internal error."
    if isinstance(failed, encryption.DecryptionFailed):
        message = "No configured key decrypts the variables and stdin of the run."
    code = getattr(failed, "code", "internal")
    if isinstance(failed, CONNECTION_ERRORS):
        code, message = "database_unavailable", "The connection to the database was lost."
    return queue.build_error(
        "start",
        message,
        retryable=retryable,
        code=code,
        provider=find_provider(failed),
        cause=find_cause(failed),
        origin=classify_lease_end(failed.extra["end_reason"]) if isinstance(failed, LeaseEnded) else None,
    )


def _retry_unstarted(row: QueuedRun, message: str, *, now: datetime, error: dict[str, Any] | None = None) -> None:
    """Queue a run whose command has not begun again, with a backoff, until its pending timeout is over."""
    error = error or queue.build_error("start", message, retryable=True)
    if not queue.requeue(row, delay=compute_backoff(row.attempt, maximum=MAX_UNSTARTED_BACKOFF), error=error, now=now):
        queue.finish(row, STATE.FAILED, error=error, now=now)


def _retry_or_fail(row: QueuedRun, run: Run, *, now: datetime) -> None:
    """Repeat a command that may have been executed only if the client has declared that it may be repeated."""
    is_repeated = row.repeatable and queue.count_executions(row) < row.max_attempts
    message, origin = run.note or LOST_RUNNER_NOTE, classify_run(run)
    error = queue.build_error("exec", message, retryable=is_repeated, code="outcome_unknown", origin=origin)
    delay = compute_backoff(row.attempt)
    # The pending timeout does not run during an attempt and the backoff after it.
    expires_at = row.expires_at + delay + (now - (row.started_at or now))
    if not (is_repeated and queue.requeue(row, delay=delay, error=error, now=now, expires_at=expires_at)):
        queue.finish(row, STATE.FAILED, error=error, now=now)


def recover(*, runner: str, now: datetime, limit: int = 100) -> int:
    """Take over the attempts that no runner has renewed. Return how many runs were ended or queued again.

    Either the process of the attempt is dead, or its thread has ended without recording the end. A run whose command still runs
    is left to its Run: a sweep closes that with the retained result, or kills the command."""
    dead = QueuedRun.objects.filter(state=STATE.STARTED, runner_deadline__lt=now).order_by("runner_deadline")
    count = 0
    for row in dead[:limit]:
        try:
            count += _take_over(row, runner, now=now)
        except CONNECTION_ERRORS:
            raise
        except Exception:  # tried again once the claim of this runner has expired; one run must not delay the others
            log.exception("queued run not taken over", queued_run=str(row.pk), attempt=row.attempt)
    return count


def _take_over(row: QueuedRun, runner: str, *, now: datetime) -> bool:
    """Claim the attempt of a dead runner, and end the run or queue it again. Return False if that is left to others."""
    own = find_attempt(row).filter(runner=row.runner, runner_deadline=row.runner_deadline)
    row.runner, row.runner_deadline = runner, now + queue.RUNNER_TTL
    taken = find_attempt(row).filter(runner=runner, runner_deadline=row.runner_deadline)
    with end_if_unanswered(partial(taken.update, runner_deadline=now), row):
        if not own.update(runner=row.runner, runner_deadline=row.runner_deadline):
            return False
    checkpoint("queued run taken over", row)
    run = Run.objects.filter(pk=row.run_id).first()
    if run is not None and run.ended_at is None:
        find_attempt(row).update(runner="", runner_deadline=now + queue.RUNNER_TTL)
        return False
    if row.turn_number is not None:
        _settle_turn(row, now=now)
    elif run is None:
        _end_one_shot_lease(row, now=now)
        _retry_unstarted(row, "The runner died before the command began.", now=now)
    else:
        settle(row, run, now=now)
    return True


def _end_one_shot_lease(row: QueuedRun, *, now: datetime) -> None:
    """End the lease that the dead runner acquired for its attempt, if any."""
    if row.lease_id is None and Lease.objects.filter(pk=row.run_id, status=LeaseStatus.ACTIVE).exists():
        leasing.end(row.run_id, reason="failed", now=now, actor="runner", detail="The runner died.")


def build_runner_name() -> str:
    """Return a name for the runner of this process. It begins with the instance, which a restart releases."""
    return f"{settings.INSTANCE}:{uuid.uuid4().hex[:8]}"

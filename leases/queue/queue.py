"""Queue of runs: enqueue, claim, interrupt, expire, totals.

Claims are serialized by a lock. The next run is one of the agent that has the fewest runs in progress, and among those of the
agent that was served longest ago: an agent with thousands of queued runs delays the others by one run. The turns of an agent in
an environment start one after another, in the order of their numbers."""

import base64
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial, reduce
from operator import or_
from typing import Any, NamedTuple

import structlog
from django.conf import settings
from django.db import DataError, IntegrityError, transaction
from django.db.models import Exists, Min, OuterRef, Q, QuerySet

from leases import failed_by
from leases.agent_runs import interruption
from leases.errors import QueuedRunNotFound, TooManyQueuedRuns
from leases.models import Lease, Turn
from leases.queue import running, sealing
from leases.queue.models import QueueAgent, QueuedRun, QueuedRunState, derive_run_id
from sandboxes.db import sql, tracing
from sandboxes.db.connection_errors import CONNECTION_ERRORS
from sandboxes.deferred_writes import end_if_unanswered
from sandboxes.failed_by import FailedBy
from sandboxes.hosts import registry
from sandboxes.lifecycle import checkpoint
from sandboxes.models import GONE_STATES, NEVER_STARTED, Pool, Run, Sandbox, SandboxState
from sandboxes.models.webhooks import EventType
from sandboxes.redaction.texts import omit_answers
from sandboxes.webhooks import outbox

log = structlog.get_logger(__name__)
RUNNER_TTL = timedelta(seconds=30)  # claim of a runner on an attempt, renewed by its main thread while a thread executes it
UNCLAIMABLE_DELAY = timedelta(minutes=10)  # of a run whose row the database does not let a runner claim
OTHER_HOST_DELAY = timedelta(seconds=30)  # time in which a runner of the sandbox's host claims a run first
STATE = QueuedRunState


class Attempt(NamedTuple):
    """Identity of one attempt of a queued run."""

    pk: uuid.UUID  # of the queued run
    number: int


@dataclass(frozen=True)
class QueueOptions:
    """Options of a queued run, besides its command."""

    priority: int = 0
    repeatable: bool = False
    max_attempts: int = 1
    pending_timeout: timedelta = timedelta(hours=1)


def enqueue(
    pk: uuid.UUID,
    *,
    agent_did: str,
    lease: Lease | None,
    pool: Pool,
    request: Mapping[str, Any],
    secrets: Mapping[str, Any],
    options: QueueOptions,
    now: datetime,
    actor: str = "",
) -> QueuedRun:
    """Add a run to the queue. Idempotent by `pk`. Raise TooManyQueuedRuns.

    `secrets` are encrypted: JSON values that must not be stored in clear text."""
    sealed = sealing.seal(pk, secrets)
    request = dict(request) | ({"traceparent": trace} if (trace := tracing.caller_trace.get()) else {})
    with transaction.atomic():
        sql.lock_key("queued runs")  # serializes the counts
        if existing := QueuedRun.objects.filter(pk=pk).first():
            return existing
        pending = QueuedRun.objects.filter(state=STATE.QUEUED)
        _require_below(pending.filter(agent_did=agent_did), settings.QUEUE_MAX_PENDING_PER_AGENT, "The agent")
        _require_below(pending, settings.QUEUE_MAX_PENDING, "The queue")
        row = QueuedRun.objects.create(
            id=pk, agent_did=agent_did, lease=lease, pool=pool, request=request, sealed=sealed, actor=actor,
            turn_number=request.get("turn_number"), priority=options.priority, repeatable=options.repeatable,
            max_attempts=options.max_attempts, queued_at=now,
            available_at=now, expires_at=now + options.pending_timeout,
        )  # fmt: skip
        _publish(EventType.QUEUED_RUN_QUEUED, row, now=now)
        return row


def _require_below(pending: QuerySet[QueuedRun], limit: int, owner: str) -> None:
    if pending[:limit].count() >= limit:
        raise TooManyQueuedRuns(f"{owner} has {limit} pending runs, which is the limit. Try again later.", limit=limit)


def encode_bytes(content: bytes) -> str:
    return base64.b64encode(content).decode()


def claim(runner: str, *, now: datetime) -> QueuedRun | None:
    """Take the next run for a runner, which executes an attempt. None if no run may start now.

    A run whose sandbox is on a host of other runners is left to them for OTHER_HOST_DELAY. After that this runner claims the
    run, too: its attempt fails, and the run then states the reason for which it waits."""
    attempts = list[Attempt]()
    end = partial(_end_claims, runner, attempts, now=now)
    with end_if_unanswered(end, f"queued run of {runner}"), transaction.atomic(durable=True):
        row = _claim_next(runner, attempts, now=now)
    if row is not None:
        checkpoint("queued run claimed", row)
    return row


def _claim_next(runner: str, attempts: list[Attempt], *, now: datetime) -> QueuedRun | None:
    """Choose and claim the next run, in the transaction of the caller. Its attempt is appended to `attempts` before."""
    local_hosts = registry.find_local_host_ids()
    sql.lock_key(running.LOCK)
    if running.count_all() >= settings.QUEUE_MAX_RUNNING:
        return None
    pools = running.count_by_pool()
    full_pools = [pool for pool, count in pools.items() if count >= settings.QUEUE_MAX_RUNNING_PER_POOL]
    ready = QueuedRun.objects.filter(state=STATE.QUEUED, available_at__lte=now)
    ready = ready.filter(Q(expires_at__gt=now) | _is_begun_turn())
    ready = ready.exclude(pool__in=full_pools)
    ready = ready.filter(Q(turn_number__isnull=True) | ~Exists(_find_preceding_turns()))
    ready = ready.filter(Q(available_at__lte=now - OTHER_HOST_DELAY) | ~Exists(_find_sandboxes_elsewhere(local_hosts)))
    agent = _find_next_agent(ready)
    if agent is None:
        return None
    row = ready.filter(agent_did=agent).order_by("-priority", "queued_at", "pk").first()
    assert row is not None  # in the same transaction
    QueueAgent.objects.update_or_create(agent_did=agent, defaults={"served_at": now})
    try:
        claimed = _claim_row(row, runner, attempts, now=now)
    except (DataError, IntegrityError):  # else it would be chosen again by each look, and no other run would start
        log.exception("queued run cannot be claimed", queued_run=str(row.pk), attempt=row.attempt)
        QueuedRun.objects.filter(pk=row.pk).update(available_at=now + UNCLAIMABLE_DELAY)
        return None
    return row if claimed else None  # interrupted or expired since it was read


def _claim_row(row: QueuedRun, runner: str, attempts: list[Attempt], *, now: datetime) -> bool:
    """Start an attempt of a queued run for a runner. Return False if the run is not queued any more."""
    row.state, row.attempt, row.started_at = STATE.STARTED, row.attempt + 1, now
    row.runner, row.runner_deadline = runner, now + RUNNER_TTL
    attempts.append(Attempt(row.pk, row.attempt))
    with transaction.atomic():
        claimed = QueuedRun.objects.filter(pk=row.pk, state=STATE.QUEUED).update(
            state=row.state, attempt=row.attempt, started_at=now, runner=runner, runner_deadline=row.runner_deadline
        )
    return bool(claimed)


def announce_start(row: QueuedRun, *, now: datetime) -> None:
    """Enqueue the event of an attempt whose command begins, in the transaction that opens its Run."""
    _publish(EventType.QUEUED_RUN_STARTED, row, now=now)


def _find_sandboxes_elsewhere(local_hosts: Collection[uuid.UUID]) -> QuerySet[Sandbox]:
    """Return the sandboxes that hold the leases of queued runs and are on other hosts than these."""
    held = Sandbox.objects.filter(holder=OuterRef("lease_id"), host__isnull=False)
    return held.exclude(state__in=(SandboxState.COLD, *GONE_STATES)).exclude(host__in=local_hosts)


def _is_begun_turn() -> Exists:
    """Return the condition that the turn of a run has begun: its next attempt executes nothing, and ends it."""
    return Exists(Turn.objects.filter(lease=OuterRef("lease_id"), number=OuterRef("turn_number")))


def _find_preceding_turns() -> QuerySet[QueuedRun]:
    """Return the open turns that a queued turn of the same agent and environment waits for.

    A started turn counts even if its number is higher: the turn of a late event does not overlap with a later one."""
    earlier = Q(turn_number__lt=OuterRef("turn_number")) | Q(
        Q(queued_at__lt=OuterRef("queued_at")) | Q(queued_at=OuterRef("queued_at"), pk__lt=OuterRef("pk")),
        turn_number=OuterRef("turn_number"),
    )
    return QueuedRun.objects.filter(
        Q(state=STATE.STARTED) | earlier,
        agent_did=OuterRef("agent_did"),
        lease__environment_id=OuterRef("lease__environment_id"),
        turn_number__isnull=False,
        ended_at__isnull=True,
    ).exclude(pk=OuterRef("pk"))


def find_turn(row: QueuedRun) -> Turn | None:
    """Return the turn that a queued turn has played, if its answer is stored."""
    if row.turn_number is None:
        return None
    return Turn.objects.filter(lease=row.lease_id, number=row.turn_number, ended_at__isnull=False).first()


def build_turn_result(row: QueuedRun) -> dict[str, Any]:
    """Return the fields of a turn in the document and the events of a queued run."""
    turn = find_turn(row) if row.ended_at else None
    return {
        "turn_number": row.turn_number,
        "action": turn.action if turn else None,
        "skipped": turn.skipped if turn else None,
        "reason": turn.action.get("reason") if turn and turn.skipped else None,
    }


def classify(rows: Sequence[QueuedRun]) -> dict[uuid.UUID, FailedBy | None]:
    """Return the origins of the failures of queued runs, those of skipped turns included, by at most one query."""
    played = [row for row in rows if row.turn_number is not None and row.state == STATE.COMPLETED]
    found = Turn.objects.none()
    if played:
        found = Turn.objects.filter(lease__in={row.lease_id for row in played}, number__in={row.turn_number for row in played})
    found = found.select_related("run").defer("state", "answer", "run__stdout", "run__stderr")
    turns: dict[tuple[uuid.UUID | None, int | None], Turn] = {(turn.lease_id, turn.number): turn for turn in found}
    played_turns = {row.pk: turns.get((row.lease_id, row.turn_number)) for row in played}
    return {row.pk: failed_by.classify_queued_run(row, played_turns.get(row.pk)) for row in rows}


def _find_next_agent(ready: QuerySet[QueuedRun]) -> str | None:
    """Return the agent with the fewest runs in progress, and of several the one that was served longest ago.

    Three queries instead of one with subqueries, which would be evaluated for every pending run."""
    oldest: dict[str, Any] = dict(ready.order_by().values_list("agent_did").annotate(oldest=Min("queued_at")))
    if not oldest:
        return None
    counts = running.count_by_agent()
    served = dict(QueueAgent.objects.values_list("agent_did", "served_at"))

    def rank(agent: str) -> tuple[int, bool, datetime, str]:
        return counts.get(agent, 0), agent in served, served.get(agent, oldest[agent]), agent

    allowed = [agent for agent in oldest if counts.get(agent, 0) < settings.QUEUE_MAX_RUNNING_PER_AGENT]
    return min(allowed, key=rank, default=None)


def renew(runner: str, attempts: Collection[Attempt], *, now: datetime) -> int:
    """Extend the claims of the attempts that threads of a runner execute now. Return the number of claims.

    An attempt that is not named keeps its deadline: its thread has ended, and the end is not recorded."""
    if not attempts:
        return 0
    return _find_executing(runner, attempts).update(runner_deadline=now + RUNNER_TTL)


def _end_claims(runner: str, attempts: Collection[Attempt], *, now: datetime) -> None:
    """End claims that the runner does not know to hold: the next look of any runner takes the attempts over."""
    if attempts:
        _find_executing(runner, attempts).update(runner_deadline=now)


def _find_executing(runner: str, attempts: Collection[Attempt]) -> QuerySet[QueuedRun]:
    executing = reduce(or_, (Q(pk=each.pk, attempt=each.number) for each in attempts))
    return QueuedRun.objects.filter(executing, runner=runner, state=STATE.STARTED)


def finish(
    row: QueuedRun,
    state: QueuedRunState,
    *,
    exit_code: int | None = None,
    error: Mapping[str, Any] | None = None,
    now: datetime,
) -> bool:
    """End a started run. An interrupted one ends as interrupted. Return False if the attempt is not this runner's any more."""
    attempt = QueuedRun.objects.filter(pk=row.pk, attempt=row.attempt, state=STATE.STARTED)
    values = {"exit_code": exit_code, "error": error, "runner_deadline": None}
    if _end(attempt.filter(interrupted_at__isnull=False), row.pk, STATE.INTERRUPTED, now=now, **values):
        return True
    return _end(attempt, row.pk, state, now=now, **values)


def _end(rows: QuerySet[QueuedRun], pk: uuid.UUID, state: QueuedRunState, *, now: datetime, **values: Any) -> bool:
    """End the run that `rows` selects, and announce its end. Return False if no row is selected."""
    with transaction.atomic():
        if not rows.update(state=state, ended_at=now, sealed=b"", **values):
            return False
        _publish(EventType.QUEUED_RUN_ENDED, QueuedRun.objects.get(pk=pk), now=now)
    return True


def _publish(kind: EventType, row: QueuedRun, *, now: datetime) -> None:
    """Enqueue an event of a run in the transaction of its change.

    A run may be started, and queued again after that, repeatedly, and ends once."""
    payload = {
        "queued_run_id": str(row.pk),
        "agent_did": row.agent_did,
        "lease_id": str(row.lease_id) if row.lease_id else None,
        "state": row.state,
        "attempt": row.attempt,
        "run_id": str(row.run_id) if row.attempt else None,
        "exit_code": row.exit_code,
        "error": omit_error_answers(row.error),
        "failed_by": classify([row])[row.pk],
    } | (build_turn_result(row) if row.turn_number is not None else {})
    key = str(row.pk) if kind == EventType.QUEUED_RUN_ENDED else f"{row.pk} {row.attempt}"
    outbox.enqueue_event(kind, key=key, payload=payload, now=now)


def requeue(
    row: QueuedRun, *, delay: timedelta, error: Mapping[str, Any], now: datetime, expires_at: datetime | None = None
) -> bool:
    """Put a started run back in the queue. Return False if it was interrupted or is not this runner's any more.

    An attempt without a Run has no event: its command has not begun, and receivers know the run as queued."""
    attempt = QueuedRun.objects.filter(pk=row.pk, attempt=row.attempt, state=STATE.STARTED, interrupted_at__isnull=True)
    with transaction.atomic():
        if not attempt.update(
            state=STATE.QUEUED, available_at=now + delay, runner_deadline=None, error=error,
            expires_at=expires_at or row.expires_at,
        ):  # fmt: skip
            return False
        if Run.objects.filter(pk=row.run_id).exists():
            _publish(EventType.QUEUED_RUN_QUEUED, QueuedRun.objects.get(pk=row.pk), now=now)
    return True


def interrupt(rows: QuerySet[QueuedRun], *, now: datetime) -> int:
    """Interrupt runs: queued ones end at once, and the commands of started ones are killed. Return their number."""
    count = 0
    for row in rows.filter(ended_at__isnull=True):
        count += request_interruption(row, now=now)
        kill(QueuedRun.objects.filter(pk=row.pk, state=STATE.STARTED).first())
    return count


def request_interruption(row: QueuedRun, *, now: datetime) -> bool:
    """End a pending run, or record the request to interrupt a started one. Return whether this call did.

    The command of a started run goes on. One that has not begun is refused by the fence of its attempt."""
    waiting = QueuedRun.objects.filter(pk=row.pk, state=STATE.QUEUED)
    if _end(waiting, row.pk, STATE.INTERRUPTED, now=now, interrupted_at=now):
        return True
    started = QueuedRun.objects.filter(pk=row.pk, state=STATE.STARTED, interrupted_at__isnull=True)
    if not started.update(interrupted_at=now):
        return False
    if row.request["kind"] == "agent_run":
        interruption.request_interruption(QueuedRun.objects.get(pk=row.pk).run_id, now=now)
    return True


def kill(row: QueuedRun | None) -> None:
    """Kill the command of a started run. One without a Run is refused by the fence of its attempt."""
    if row is None:
        return
    if row.request["kind"] == "agent_run":
        interruption.interrupt_by_id(row.run_id, now=row.interrupted_at or row.queued_at)
    else:
        interruption.kill_command(row.run_id)


def has_open() -> bool:
    """Return whether a run is queued or started."""
    return QueuedRun.objects.filter(ended_at__isnull=True).exists()


def expire(*, now: datetime) -> int:
    """End the runs whose pending timeout is over. Return their number.

    A repeatable run with an attempt whose outcome is unknown was not repeated in time: it fails. A turn that has begun is left
    to its next attempt."""
    overdue = QueuedRun.objects.filter(~_is_begun_turn(), state=STATE.QUEUED, expires_at__lte=now)
    count = 0
    for row in overdue:
        state, error = STATE.EXPIRED, build_error("queue", "The run did not start within its pending timeout.", retryable=True)
        try:
            if count_executions(row):
                message = "The outcome of an attempt is unknown, and it was not repeated within the pending timeout."
                state, error = STATE.FAILED, build_error("exec", message, retryable=False, code="outcome_unknown")
            count += _end(overdue.filter(pk=row.pk, attempt=row.attempt), row.pk, state, now=now, error=error)
        except CONNECTION_ERRORS:
            raise
        except Exception:  # one run must neither keep the others nor the claims that follow
            log.exception("queued run not expired", queued_run=str(row.pk))
    return count


def count_executions(row: QueuedRun) -> int:
    """Return the number of attempts whose command may have been executed. An attempt that found no place is none."""
    run_ids = [derive_run_id(row.pk, attempt) for attempt in range(1, row.attempt + 1)]
    return Run.objects.filter(pk__in=run_ids).exclude(NEVER_STARTED).count()


def find(pk: uuid.UUID) -> QueuedRun:
    row = QueuedRun.objects.filter(pk=pk).first()
    if row is None:
        raise QueuedRunNotFound()
    return row


def find_old_runs(*, now: datetime) -> QuerySet[QueuedRun]:
    """Return the runs that ended at least LEASEHOLD_KEEP_STATE ago, oldest first."""
    return QueuedRun.objects.filter(ended_at__lte=now - settings.KEEP_STATE).order_by("ended_at")


def find_old_agents(*, now: datetime) -> QuerySet[QueueAgent]:
    """Return the agents whose last run was claimed at least LEASEHOLD_KEEP_STATE ago."""
    return QueueAgent.objects.filter(served_at__lte=now - settings.KEEP_STATE).order_by("served_at")


def build_error(
    operation: str,
    message: str,
    *,
    retryable: bool,
    provider: str = "",
    code: str = "error",
    cause: str = "",
    origin: FailedBy | None = None,
) -> dict[str, Any]:
    """Return the error of an attempt. `provider` and `cause` are those of a problem document.

    `origin` is the origin of the failure; None: that of the code."""
    return {
        "code": code,
        "operation": operation,
        "provider": provider,
        "cause": cause,
        "message": message[:500],
        "retryable": retryable,
        "failed_by": origin or failed_by.classify_code(code),
    }


def omit_error_answers(error: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the error of an attempt as agents get it, without text of services outside.

    The origin of the failure is a field of the run, not of its error."""
    shown = {name: value for name, value in (error or {}).items() if name != "failed_by"}
    return (shown and {**shown, "message": omit_answers(shown["message"])}) or None


def filter_agents(rows: QuerySet[QueuedRun], agents: list[str] | None) -> QuerySet[QueuedRun]:
    """Restrict rows to those of some agents. None: all agents."""
    return rows if agents is None else rows.filter(Q(agent_did__in=agents))

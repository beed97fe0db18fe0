"""Agent runs of a lease: start, execute, recover.

The CLI is the command of a Run: metering, timeouts, sleep and recovery are those of every exec."""

import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import structlog
from django.conf import settings
from django.db import connections
from django.db.models import Exists, F, OuterRef, QuerySet

from leases import execution, leasing
from leases.agent_runs.clis.base import AgentOptions
from leases.agent_runs.clis.registry import CLIS
from leases.agent_runs.models import AgentRun, AgentRunState
from leases.agent_runs.policy import AgentPolicy
from leases.agent_runs.recorder import RECORDER_TTL, Recorder, RecorderClaim, RecorderReplaced, store_message
from leases.errors import AgentRunClosed, AgentRunNotFound
from leases.models import Lease
from leases.patterns import require_fits
from leases.queue import running
from sandboxes.db.clock import Clock, clock_from
from sandboxes.db.connection_errors import CONNECTION_ERRORS
from sandboxes.deferred_writes import end_if_unanswered, record_or_defer
from sandboxes.egress import gateway_tokens
from sandboxes.errors import ResultPending
from sandboxes.guard import Guard, WrappedGuard
from sandboxes.hosts import registry
from sandboxes.lifecycle import checkpoint
from sandboxes.models import GONE_STATES, NEVER_STARTED, Policy, Run, StopReason
from sandboxes.runs import retention, stops
from sandboxes.runs.operations import Command
from sandboxes.stores import lease_stores
from sandboxes.sweep_log import PASS_TIME_LIMIT, SweepResult

log = structlog.get_logger(__name__)
MAX_OUTPUT_BYTES = 16 << 20  # of each stream; the agent in the sandbox retains 32 MiB. Later messages are lost


@dataclass(frozen=True)
class AgentRequest:
    """An agent CLI, its options, and the context of its command."""

    cli: str
    options: AgentOptions
    env: Mapping[str, str]
    cwd: str
    timeout: timedelta
    attempt: int = 1  # of a queued run


@dataclass(frozen=True)
class AgentRunGuard(WrappedGuard):
    """Guard of a lease and of the row of an agent run: the command begins only while the row is open.

    A start that takes longer than the recorder's deadline lets a sweep close the row, and nothing would record the command."""

    row: AgentRun

    def note_run_opened(self, *, now: datetime) -> None:
        super().note_run_opened(now=now)
        self.row.recorder_deadline = now + RECORDER_TTL
        own = AgentRun.objects.filter(pk=self.row.pk, ended_at__isnull=True)
        if not own.update(recorder_deadline=self.row.recorder_deadline):
            raise AgentRunClosed()
        # The UPDATE has locked the row: a later request to interrupt the run finds the Run.
        if own.filter(interrupted_at__isnull=False).exists():
            stops.request_stop(self.row.pk, StopReason.INTERRUPTED)


def create(
    pk: uuid.UUID, request: AgentRequest, *, run_id: uuid.UUID, queued: bool = False, now: datetime, actor: str = ""
) -> AgentRun:
    """Create the row of an agent run, and store its prompt. Nothing is executed. `queued`: for a started queued run.

    Raise LeaseEnded, InvalidRequest for an option that the CLI does not have, NoGateway, StoreError. Without `queued` also
    TooManyRuns. An error leaves no row; a sweep closes that of a process that died here."""
    lease = leasing.require_active(pk, now=now)
    gateway_tokens.require_models(lease.pool)
    cli = CLIS[request.cli]
    cli.check(request.options)
    require_fits(AgentRun, model=request.options.model)
    row = AgentRun(
        id=run_id,
        lease=lease,
        cli=cli.name,
        model=request.options.model or cli.default_model,
        requested_session=request.options.session_id,
        policy=request.options.policy.to_document(),
        queued=queued,
        started_at=now,
        recorder_deadline=now + settings.SANDBOX_START_TIMEOUT + RECORDER_TTL,
    )
    try:
        if queued:
            row.save(force_insert=True)
        else:
            running.insert_direct(row)  # first: the history has no prompt of a run that was refused
    except CONNECTION_ERRORS:  # the transaction may have been committed
        _delete_unstarted(row, clock_from(now))
        raise
    try:
        _store_request(row, request.options.prompt, now=now, actor=actor)
    except Exception:
        _delete_unstarted(row, clock_from(now))
        raise
    checkpoint("agent run created", row)
    return row


def _store_request(row: AgentRun, prompt: str, *, now: datetime, actor: str) -> None:
    stores = lease_stores.open_stores(row.lease.agent_did, row.lease_id)
    store_message(stores, row, "user", prompt, 0, now=now)
    audit = {
        "action": "agent_run.requested",
        "agent_run": str(row.pk),
        "cli": row.cli,
        "model": row.model,
        "policy": row.policy,
    }
    stores.audit.append(audit, now=now, actor=actor)


def execute(
    row: AgentRun,
    request: AgentRequest,
    *,
    on_start: Callable[[], object] = bool,
    on_message: Callable[[dict[str, Any]], object] = bool,
    now: datetime,
    actor: str = "",
    wrap_guard: execution.WrapGuard | None = None,
) -> None:
    """Execute the CLI and record its messages. Blocks until the row is closed. `on_start` is called when the command begins,
    and `on_message` with each message, in another thread.

    A CLI that fails is a result. An error before the command begins is raised, and deletes the row. Raise AgentRunClosed if a
    sweep has closed the row before; it stays."""
    clock = clock_from(now)
    cli, recording = CLIS[request.cli], RecordingThread(row, clock, on_message)

    def wrap(guard: Guard) -> Guard:
        return AgentRunGuard(wrap_guard(guard) if wrap_guard else guard, row)

    def start() -> None:
        recording.start()
        on_start()

    command = Command(
        cli.build_command(request.options),
        request.timeout,
        {**cli.build_env(), **request.env},
        request.cwd,
        request.options.prompt.encode(),
        run_id=row.pk,
        has_recorder=True,
        max_output_bytes=MAX_OUTPUT_BYTES,
        on_start=start,
        attempt=request.attempt,
    )
    try:
        execution.exec_command(row.lease_id, command, now=clock(), actor=actor, wrap_guard=wrap)
    except ResultPending:  # the command has ended
        raise
    except Exception:
        _delete_unstarted(row, clock)
        raise
    finally:
        recording.command_has_ended.set()
        if recording.ident is not None:
            recording.join()


def _delete_unstarted(row: AgentRun, clock: Clock) -> None:
    """Delete the row of an agent run whose command never began, once the database responds.

    Another run may have the same id if this row was not inserted."""
    began = Run.objects.filter(pk=OuterRef("pk"), holder=row.lease_id).exclude(NEVER_STARTED)
    own = AgentRun.objects.filter(pk=row.pk, lease=row.lease_id, started_at=row.started_at, ended_at__isnull=True)
    record_or_defer(own.filter(~Exists(began)).delete, "agent run not deleted", clock=clock, agent_run=str(row.pk))


class RecordingThread(threading.Thread):
    """Thread that records an agent run while its command runs."""

    def __init__(self, row: AgentRun, clock: Clock, on_message: Callable[[dict[str, Any]], object]) -> None:
        super().__init__(name="agent-run-recorder", daemon=True)
        self._row, self._clock, self._on_message = row, clock, on_message
        self.command_has_ended = threading.Event()

    def run(self) -> None:
        def is_running() -> bool:
            return not self.command_has_ended.is_set()

        try:
            Recorder(self._row, clock=self._clock, on_message=self._on_message, is_command_running=is_running).record()
        except RecorderReplaced:
            log.warning("agent run is recorded by another process", agent_run=str(self._row.pk))
        except Exception:
            log.exception("agent run not recorded; a sweep continues", agent_run=str(self._row.pk))
        finally:
            connections.close_all()


def find(lease: uuid.UUID, pk: uuid.UUID) -> AgentRun:
    """Return an agent run of a lease. Raise AgentRunNotFound."""
    row = AgentRun.objects.filter(pk=pk, lease=lease).first()
    if row is None:
        raise AgentRunNotFound()
    return row


def find_last_session(lease: uuid.UUID, cli: str) -> str:
    """Return the session of the lease's last run of a CLI, or ""."""
    rows = AgentRun.objects.filter(lease=lease, cli=cli).exclude(session_id="")
    return rows.values_list("session_id", flat=True).first() or ""


def get_policy(lease: Lease) -> AgentPolicy:
    """Return the limits that operators set for the agents of an environment type."""
    policy: Policy | None = lease.environment_type.policy
    return AgentPolicy() if policy is None else AgentPolicy(
        tuple(policy.agent_tools), tuple(policy.agent_denied_commands), policy.agent_max_turns, policy.agent_max_cost,
        tuple(policy.mcp_tools),
    )  # fmt: skip


def record_abandoned(*, now: datetime, limit: int = 200) -> SweepResult:
    """Record and close agent runs whose recorder is dead. A run that fails is tried again by a later sweep, after the others.

    A run whose command still runs is left alone until its Run is closed."""
    result, clock = SweepResult(), clock_from(now)
    for row in find_abandoned(now=now)[:limit]:
        if clock() > now + PASS_TIME_LIMIT:
            break
        try:
            result.note("agent runs recorded", _record_abandoned_run(row, clock))
        except RecorderReplaced:
            result.note("lost race")
        except Exception as failed:  # one run must not delay the others
            log.exception("abandoned agent run not recorded", agent_run=str(row.pk))
            result.failures.append(f"agent run {row.pk}: {failed}")
    return result


def find_abandoned(*, now: datetime) -> QuerySet[AgentRun]:
    """Select the agent runs whose recorder is dead and whose output this process reaches, the longest overdue first.

    Those whose command still runs, or whose sandbox is on another host, would be at the head of the order in each pass."""
    runs = Run.objects.filter(pk=OuterRef("pk"))
    in_sandbox = runs.filter(incarnation=F("sandbox__incarnation")).exclude(sandbox__state__in=GONE_STATES)
    elsewhere = in_sandbox.exclude(registry.filter_local("sandbox__"))
    abandoned = AgentRun.objects.select_related("lease").filter(ended_at__isnull=True, recorder_deadline__lt=now)
    return abandoned.filter(~Exists(runs.filter(ended_at__isnull=True)), ~Exists(elsewhere)).order_by("recorder_deadline")


def _record_abandoned_run(row: AgentRun, clock: Clock) -> int:
    """Return the number of closed rows: 0 while the command runs, if its output is on another host, or if another process was
    first."""
    run = Run.objects.select_related("sandbox__host").filter(pk=row.pk).defer("stdout", "stderr").first()
    if run is not None and (run.ended_at is None or (retention.has_sandbox(run) and not registry.is_local(run.sandbox))):
        return 0
    claim = RecorderClaim(row, clock)
    previous = claim.advance()
    own = AgentRun.objects.filter(pk=row.pk, recorder_deadline=previous, ended_at__isnull=True)
    if run is None:
        note = "The control plane was interrupted before the command began."
        return own.update(state=AgentRunState.FAILED, ended_at=clock(), note=note)
    with end_if_unanswered(claim.end, claim):
        if not own.update(recorder_deadline=row.recorder_deadline):
            return 0
    Recorder(row, clock=clock).record()
    return 1

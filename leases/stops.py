"""Stop of all work of an agent, of an environment or of the installation.

A stop is a moment, not a state: work that begins afterwards is not affected. A command that waits for its sandbox at that
moment begins, unless it is that of a queued run or of an agent run, or its lease ends with the stop. A command whose Run is
open is killed, also if it begins in its sandbox after the stop."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

import structlog
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.db.models import Model, Q, QuerySet

from leases import leasing
from leases.agent_runs import interruption
from leases.agent_runs.models import AgentRun
from leases.environments import lifecycle
from leases.errors import InvalidRequest, StopIncomplete
from leases.models import Agent, Lease, LeaseStatus
from leases.queue import queue, running
from leases.queue.models import QueuedRun
from sandboxes import audit, processes
from sandboxes.db.clock import clock_from
from sandboxes.db.connection_errors import CONNECTION_ERRORS
from sandboxes.errors import SandboxError
from sandboxes.formatting import pluralize
from sandboxes.lifecycle import checkpoint
from sandboxes.models import Process, Run, StopReason
from sandboxes.providers.errors import ProviderError
from sandboxes.redaction.texts import omit_answers
from sandboxes.runs import stops as run_stops

log = structlog.get_logger(__name__)
STOPPED_RUN_KINDS = ("exec", "turn")  # transfers of files end by themselves, and processes have rows of their own
FAILURE_KINDS = ("lease", "queued_run", "agent_run", "command", "process")
MAX_NAMED_FAILURES = 5  # in a message
RowT = TypeVar("RowT", bound=Model)


@dataclass(frozen=True)
class Scope:
    """Work to stop: of one agent, of one environment, or of the installation if neither is named."""

    agent_did: str = ""
    environment_id: str = ""

    def __str__(self) -> str:
        return self.agent_did or self.environment_id or "installation"

    def get_row(self) -> Model:
        """Return the row that the audit names. Raise Agent.DoesNotExist or EnvironmentNotFound."""
        if self.agent_did:
            return Agent.objects.get(did=self.agent_did)
        return lifecycle.find(self.environment_id) if self.environment_id else audit.get_installation_row()

    def find_leases(self) -> QuerySet[Lease]:
        """Select the leases of the scope, ended ones included."""
        return Lease.objects.filter(self._build_condition()).order_by("pk")

    def find_queued_runs(self) -> QuerySet[QueuedRun]:
        """Select the open queued runs. One without a lease belongs to its agent, and to no environment."""
        own = Q(agent_did=self.agent_did) if self.agent_did else self._build_condition("lease__")
        return QueuedRun.objects.filter(own, ended_at__isnull=True)

    def find_agent_runs(self) -> QuerySet[AgentRun]:
        return AgentRun.objects.filter(self._build_condition("lease__"), running.DIRECT).order_by("pk")

    def find_commands(self) -> QuerySet[Run]:
        """Select the open commands and turns, those of queued runs and agent runs included."""
        rows = Run.objects.filter(ended_at__isnull=True, holder__isnull=False, kind__in=STOPPED_RUN_KINDS)
        return self._restrict(rows).order_by("pk")

    def find_processes(self) -> QuerySet[Process]:
        """Select the background processes of active leases that run, or that would be started again."""
        open_ = Q(ended_at__isnull=True) | Q(restart_at__isnull=False) | Q(wake_pending=True)
        active = self.find_leases().filter(status=LeaseStatus.ACTIVE).order_by()
        rows = Process.objects.filter(open_, holder__in=active.values("pk"))
        return rows.select_related("sandbox__host").order_by("pk")

    def _restrict(self, rows: QuerySet[Run]) -> QuerySet[Run]:
        condition = self._build_condition()
        return rows.filter(holder__in=Lease.objects.filter(condition).values("pk")) if condition else rows

    def _build_condition(self, prefix: str = "") -> Q:
        if self.agent_did:
            return Q(**{f"{prefix}agent_did": self.agent_did})
        return Q(**{f"{prefix}environment_id": self.environment_id}) if self.environment_id else Q()


@dataclass(frozen=True)
class StopFailure:
    """Row that could not be stopped, and the reason."""

    kind: str  # of FAILURE_KINDS
    id: str
    detail: str


@dataclass
class StopResult:
    """Rows that one call has stopped, and those that it could not stop."""

    queued_runs: int = 0
    agent_runs: int = 0  # direct ones
    commands: int = 0  # killed, those of these runs included
    processes: int = 0
    leases: list[Lease] = field(default_factory=list)  # ended
    failures: list[StopFailure] = field(default_factory=list)

    @property
    def has_stopped(self) -> bool:
        return bool(self.queued_runs or self.agent_runs or self.commands or self.processes or self.leases)

    def describe(self) -> str:
        counts = [
            pluralize(len(self.leases), "lease ended", "leases ended"),
            pluralize(self.queued_runs, "queued run interrupted", "queued runs interrupted"),
            pluralize(self.agent_runs, "direct agent run interrupted", "direct agent runs interrupted"),
            pluralize(self.commands, "command killed", "commands killed"),
            pluralize(self.processes, "background process killed", "background processes killed"),
        ]
        return ", ".join(counts)

    def require_complete(self) -> None:
        """Raise StopIncomplete, which names what could not be stopped."""
        if not self.failures:
            return
        named = [f"{each.kind.replace('_', ' ')} {each.id}: {each.detail}" for each in self.failures[:MAX_NAMED_FAILURES]]
        rest = len(self.failures) - len(named)
        raise StopIncomplete(
            f"{self.describe()}. Not stopped: {'; '.join(named)}{f' and {rest} more' if rest else ''}. "
            "Stop again to try the rest."
        )


def require_scope(scope: Scope) -> None:
    """Raise InvalidRequest for an unknown agent and EnvironmentNotFound."""
    if scope.agent_did and not Agent.objects.filter(did=scope.agent_did).exists():
        raise InvalidRequest("agent", "There is no such agent.")
    if scope.environment_id:
        lifecycle.find(scope.environment_id)


def stop(
    scope: Scope, *, end_leases: bool = False, now: datetime, actor: audit.Actor = audit.CONTROL_PLANE, detail: str = ""
) -> StopResult:
    """Stop the work of a scope. Idempotent: a repetition continues where a call died, and tries failures again.

    1. With `end_leases`, end the active leases: nothing can begin in them. Their last states are stored by `reclaim`.
    2. Interrupt queued runs. A pending one ends, and the attempt of a started one begins no command any more.
    3. Interrupt direct agent runs.
    4. Kill the open commands and turns, those of these runs included. The waiting callers get their results.
    5. Kill the background processes of the leases that are active, and forbid their restarts.

    The audit has the stop as an order, with the numbers of its result."""
    ordered = "ends leases" if end_leases else "keeps leases"
    with audit.record_order(scope.get_row(), "Stop all work", ordered, actor=actor, now=now) as order:
        result = _stop(scope, end_leases=end_leases, now=now, actor=actor, detail=detail)
        order.result = f"{result.describe()}{f', {len(result.failures)} not stopped' if result.failures else ''}"
    return result


def _stop(scope: Scope, *, end_leases: bool, now: datetime, actor: str, detail: str) -> StopResult:
    result, clock = StopResult(), clock_from(now)

    def end_lease(lease: Lease) -> None:
        with transaction.atomic():
            elapsed = leasing.find_elapsed_clock(lease, now)
            if leasing.end(lease.pk, reason=elapsed or "operator", now=now, actor=actor, detail="" if elapsed else detail):
                result.leases.append(lease)

    def interrupt_queued_run(row: QueuedRun) -> None:
        result.queued_runs += queue.request_interruption(row, now=now)

    def interrupt_agent_run(row: AgentRun) -> None:
        result.agent_runs += interruption.request_interruption(row.pk, now=now)

    def kill_command(run: Run) -> None:
        result.commands += run_stops.stop_command(run.pk, StopReason.OPERATOR)

    def kill_process(process: Process) -> None:
        processes.kill_process(process, now=clock())
        result.processes += 1

    if end_leases:
        _act_on_each("lease", scope.find_leases().filter(status=LeaseStatus.ACTIVE), end_lease, result)
        checkpoint("stop: leases ended", scope)
    _act_on_each("queued_run", scope.find_queued_runs(), interrupt_queued_run, result)
    checkpoint("stop: queued runs interrupted", scope)
    _act_on_each("agent_run", scope.find_agent_runs(), interrupt_agent_run, result)
    checkpoint("stop: agent runs interrupted", scope)
    _act_on_each("command", scope.find_commands().defer("stdout", "stderr"), kill_command, result)
    checkpoint("stop: commands killed", scope)
    _act_on_each("process", scope.find_processes(), kill_process, result)
    log.info("work stopped", scope=str(scope), actor=actor, result=result.describe(), failures=len(result.failures))
    return result


def _act_on_each(kind: str, rows: Iterable[RowT], act: Callable[[RowT], Any], result: StopResult) -> None:
    """Call `act` for each row. A failure is recorded, and the next row is tried."""
    for row in rows:
        try:
            act(row)
        except CONNECTION_ERRORS:
            raise
        except (ProviderError, SandboxError, ImproperlyConfigured) as error:
            result.failures.append(StopFailure(kind, str(row.pk), omit_answers(str(error))))
        except Exception:  # the caller must learn of the other rows
            log.exception("not stopped", kind=kind, row=str(row.pk))
            result.failures.append(StopFailure(kind, str(row.pk), "Internal error. It was logged."))

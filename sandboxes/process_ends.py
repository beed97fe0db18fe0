"""Detection of background processes that have ended, by a listing of their sandbox."""

import uuid
from collections.abc import Iterable, Sequence
from datetime import datetime

import structlog
from django.db.models import F, QuerySet

from sandboxes import suspension
from sandboxes.db.clock import clock_from
from sandboxes.engine_turns import Engine, EngineTurns, list_by_engine
from sandboxes.hosts import registry
from sandboxes.models import ALIVE_STATES, AWAKE_STATES, Run, RunOutcome, Sandbox, SandboxState
from sandboxes.models.processes import Process, ProcessStatus
from sandboxes.process_restarts import close_process
from sandboxes.providers.base import Provider
from sandboxes.providers.command_results import ProcessState
from sandboxes.providers.errors import Missing, ProviderError
from sandboxes.sweep_log import PASS_TIME_LIMIT, SweepResult

log = structlog.get_logger(__name__)


def close_ended(*, now: datetime, limit: int = 500) -> SweepResult:
    """Close the rows of processes that have ended, with one provider call per sandbox.

    Engines take turns. Of one engine up to `limit` processes are listed, those first whose last listing was the longest ago."""
    result, clock = SweepResult(), clock_from(now)
    groups: dict[tuple[Engine, uuid.UUID], list[Process]] = {}
    for engine, process in list_by_engine(find_running(), limit=limit, prefix="sandbox__"):
        groups.setdefault((engine, process.sandbox_id), []).append(process)
    rows = [(engine, group) for (engine, _), group in groups.items()]
    for group in (turns := EngineTurns(rows, clock=clock, until=now + PASS_TIME_LIMIT)):
        # Before the listing: a sandbox that does not answer is behind the others in the next pass.
        Process.objects.filter(pk__in=[process.pk for process in group]).update(checked_at=clock())
        try:
            result.note("processes ended", close_ended_in_sandbox(group, now=clock()))
        except ProviderError as failed:
            turns.note_failure()
            result.failures.append(f"processes in {group[0].sandbox_id}: {failed}")
        except Exception as failed:  # one sandbox must not delay the others
            log.exception("processes not listed", sandbox=str(group[0].sandbox_id))
            result.failures.append(f"processes in {group[0].sandbox_id}: {failed}")
    return result


def find_running() -> QuerySet[Process]:
    """Select the open processes on the hosts that this process reaches, those first that were not listed for the longest."""
    running = Process.objects.filter(registry.filter_local("sandbox__"), ended_at__isnull=True).select_related("sandbox")
    return running.order_by(F("checked_at").asc(nulls_first=True), "sandbox", "started_at")


def close_ended_in_sandbox(open_processes: Iterable[Process], *, now: datetime) -> int:
    """Close the rows of ended processes among the open ones of one awake sandbox. Returns their number. Raises ProviderError.

    A sandbox that the provider does not have closes all of them; `reconcile` records the missing sandbox."""
    running = [process for process in open_processes if is_sandbox_alive(process, AWAKE_STATES)]
    if not running:
        return 0
    sandbox = running[0].sandbox
    registry.require_local(sandbox)
    provider = registry.get_sandbox_provider(sandbox)
    confirmed = _find_confirmed(running)
    try:
        suspension.thaw(sandbox, provider)
        states = provider.processes(sandbox.ref, [process.current_mark for process in running])
    except Missing as missing:
        note = f"The provider has no such sandbox: {missing}"
        return sum(close_process(process, ProcessStatus.GONE, now=now, note=note, may_wake=True) for process in running)
    return sum(
        _close_if_ended(process, states.get(process.current_mark), provider, is_confirmed=process.pk in confirmed, now=now)
        for process in running
    )


def _close_if_ended(
    process: Process, state: ProcessState | None, provider: Provider, *, is_confirmed: bool, now: datetime
) -> bool:
    if state and not state.running:
        return close_process(process, ProcessStatus.EXITED, now=now, exit_code=state.exit_code)
    if state is None and process.mark and not process.start_confirmed:
        return _close_lost_restart(process, provider, now=now)
    if state is None and (is_confirmed or not may_still_start(process, now=now)):
        provider.kill(process.sandbox.ref, process.current_mark)
        if Run.objects.filter(pk=process.pk, outcome=RunOutcome.OK).exists():
            return close_process(process, ProcessStatus.GONE, now=now, note="The sandbox was restarted.", has_vanished=True)
        return close_process(
            process,
            ProcessStatus.FAILED,
            now=now,
            note="The control-plane process that started this process died, or the provider did not respond.",
        )
    return False


def _close_lost_restart(process: Process, provider: Provider, *, now: datetime) -> bool:
    """Close a row whose restart was claimed and is not confirmed, once its start cannot take effect any more."""
    if may_still_start(process, now=now):
        return False
    provider.kill(process.sandbox.ref, process.current_mark)
    note = "The restart was interrupted, or the provider did not respond."
    return close_process(process, ProcessStatus.FAILED, now=now, note=note)


def may_still_start(process: Process, *, now: datetime) -> bool:
    """Return whether a process that the provider does not list may still begin. A call that timed out may still take effect."""
    if process.mark:
        return not process.start_confirmed and now <= process.starts_by
    return now <= process.starts_by or Run.objects.filter(pk=process.pk, ended_at__isnull=True).exists()


def _find_confirmed(open_processes: Sequence[Process]) -> set[uuid.UUID]:
    """Return the ids of processes whose start is confirmed. A confirmed process that the provider does not list is gone.

    Call this function before the provider lists processes: a start may be confirmed during the listing."""
    restarted = {process.pk for process in open_processes if process.mark and process.start_confirmed}
    confirmed = Run.objects.filter(pk__in=[process.pk for process in open_processes if not process.mark], outcome=RunOutcome.OK)
    return restarted | set(confirmed.values_list("pk", flat=True))


def is_sandbox_alive(process: Process, states: Sequence[SandboxState] = ALIVE_STATES) -> bool:
    """Return whether the sandbox is in one of these states in the incarnation in which the process was started."""
    same_incarnation = Sandbox.objects.filter(pk=process.sandbox_id, incarnation=process.incarnation, state__in=states)
    return same_incarnation.filter(lost_at__isnull=True).exists()

"""Open Runs closed by another process than the one that waits for their command: abandoned by that process, or interrupted."""

import uuid
from contextlib import suppress
from datetime import datetime, timedelta

import structlog
from django.db.models import F, Q, QuerySet

from sandboxes import suspension
from sandboxes.hosts import registry
from sandboxes.models import GONE_STATES, Run, RunOutcome, StopReason
from sandboxes.providers.command_results import ExecState
from sandboxes.providers.errors import Missing, ProviderError
from sandboxes.runs import stops
from sandboxes.runs.ends import classify_outcome, close_run

log = structlog.get_logger(__name__)
MIN_BACKOFF, MAX_BACKOFF = timedelta(seconds=30), timedelta(hours=1)  # between two tries to close a Run past its deadline


def close_abandoned_run(run: Run, *, now: datetime) -> str:
    """Close a Run whose waiting process is dead, or has missed the deadline. Return the outcome for the sweep's counts.

    - "runs closed": with the result that the sandbox has retained, and the time of its end; or else as lost, with the exit code
      unknown.
    - "runs continued": the command still runs, and has time until the Run's deadline.
    - "lost race": the Run was closed before, or its deadline was extended.

    The Run is claimed first, so that a process that still waits finds its claim lost. A command without a result is killed
    next, because it would otherwise continue in a sandbox whose state is `waiting`. Raises ProviderError if the kill failed or
    the provider does not respond; the Run then stays open for the next try."""
    state = _find_command(run)
    if state and state.running and now < run.deadline_at:
        return "runs continued"
    if not _claim(run):
        return "lost race"
    if state and state.result:
        return "runs closed" if _close_with_result(run, state, now=now, actor="sweep") else "lost race"
    note = "Past its deadline: the process that waited for it is gone, so its exit code is unknown."
    if run.note:
        note = f"The provider stopped responding, and the exit code is unknown. {run.note}"
    elif run.released:
        note = f"{_describe_dead_process(run)} The command was killed, and its exit code is unknown."
        note += " The output is that of the time until then."
    return "runs closed" if interrupt_run(run, note=note, now=now, actor="sweep") else "lost race"


def adopt_result(run: Run, *, now: datetime, actor: str = "") -> bool:
    """Close an overdue Run with the result that its sandbox retained. Return False if this process does not obtain the result.

    A command without a result is left to the sweep."""
    if not registry.is_local(run.sandbox) or not find_overdue(now=now).filter(pk=run.pk).exists():
        return False
    try:
        state = _find_command(run)
        return bool(state and state.result and _claim(run) and _close_with_result(run, state, now=now, actor=actor))
    except ProviderError as failed:
        log.warning("result of an abandoned run not obtained", run=str(run.pk), error=str(failed))
        return False


def _claim(run: Run) -> bool:
    """Replace the claim of a Run, so that a process that still waits finds it lost. Return False if the Run has changed."""
    unchanged = Run.objects.filter(pk=run.pk, claim=run.claim, deadline_at=run.deadline_at, ended_at__isnull=True)
    return bool(unchanged.update(claim=uuid.uuid4()))


def _close_with_result(run: Run, state: ExecState, *, now: datetime, actor: str) -> bool:
    """Close a Run with the result in `state`, and have the sandbox drop it. Return False if the Run was closed before."""
    assert state.result is not None
    note = ""
    if run.released:
        note = f"The sandbox has kept the result. {run.note}".strip() if run.note else _describe_dead_process(run)
    closed = close_run(
        run, now=now, outcome=classify_outcome(state.result), result=state.result, note=note, actor=actor,
        ended_at=None if state.age is None else now - state.age,
    )  # fmt: skip
    if not run.has_recorder:  # a recorder may still read the output
        registry.get_sandbox_provider(run.sandbox).acknowledge_exec(run.sandbox.ref, str(run.pk))
    return closed


def _describe_dead_process(run: Run) -> str:
    return f"The control plane's process that waited for the command ({run.claimed_by}) was restarted or killed."


def _find_command(run: Run) -> ExecState | None:
    """Return the state of an open Run's command in its sandbox, or None if the command is unknown. Raises ProviderError."""
    sandbox = run.sandbox
    if run.kind not in ("exec", "turn") or sandbox.state in GONE_STATES or sandbox.incarnation != run.incarnation:
        return None
    provider = registry.get_sandbox_provider(sandbox)
    try:
        suspension.thaw(sandbox, provider)  # the process may have died before it resumed the sandbox
        return provider.find_exec(sandbox.ref, str(run.pk))
    except Missing:
        return None


def interrupt_run(run: Run, *, note: str, now: datetime, stop_reason: StopReason | None = None, actor: str = "") -> bool:
    """Kill the command of an open Run, and close the Run as lost with `note`.

    Returns False if the Run was closed before. Raises ProviderError if the kill failed; the Run then stays open."""
    if stop_reason:
        stops.request_stop(run.pk, stop_reason)
    sandbox = run.sandbox
    if sandbox.state not in GONE_STATES and sandbox.incarnation == run.incarnation:
        provider = registry.get_sandbox_provider(sandbox)
        with suppress(Missing):  # the command is gone with its sandbox, which reconcile marks as lost
            suspension.thaw(sandbox, provider)
            provider.kill(sandbox.ref, str(run.pk))
    return close_run(run, now=now, outcome=RunOutcome.LOST, note=note, actor=actor)


def find_overdue(*, now: datetime) -> QuerySet[Run]:
    """Select open Runs past their deadline, or whose waiting process is known to be dead."""
    overdue = Run.objects.filter(Q(deadline_at__lt=now) | Q(released=True), ended_at__isnull=True)
    return overdue.select_related("sandbox").order_by("deadline_at")


def find_abandoned(*, now: datetime) -> QuerySet[Run]:
    """Select the overdue Runs whose commands this process can kill: those on hosts that the process reaches.

    Runs that no sweep has tried to close come first, then the one whose last try was the longest ago."""
    due = Q(retry_at__isnull=True) | Q(retry_at__lte=now)
    rows = find_overdue(now=now).filter(due, registry.filter_local("sandbox__"))
    return rows.order_by(F("retry_at").asc(nulls_first=True), "deadline_at")


def postpone(run: Run, *, now: datetime) -> None:
    """Postpone the next try to close an open Run: by a quarter of the time since its deadline, from MIN_BACKOFF to MAX_BACKOFF.

    Called before a try, which may end with the process. A Run before its deadline, whose command may go on, is looked at by the
    next pass, after the others."""
    backoff = min(max((now - run.deadline_at) / 4, MIN_BACKOFF), MAX_BACKOFF) if now >= run.deadline_at else timedelta(0)
    Run.objects.filter(pk=run.pk, ended_at__isnull=True).update(retry_at=now + backoff)

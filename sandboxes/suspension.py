"""Suspension of waiting sandboxes: their processes are frozen, use no CPU time, and keep their memory.

A provider without `suspend_keeps_processes` stops the sandbox instead, which the vendor bills less: processes end, files stay.
The state of such a sandbox is stored before, because from then on it depends on the vendor alone, and the rows of its processes
are closed. Those with a restart policy or `restart_after_wake` are started again once the sandbox runs, by the sweep `stalled`.

A row is `suspended` before the provider freezes its processes, and its column `frozen` is set until the provider has
confirmed that they run again. The caller that moves a row out of `suspended` calls `thaw` or `thaw_for_run` before its next
call of the provider. A crash at any step therefore leaves a claim past its deadline, which a sweep continues, or a row that the
next use resumes."""

import time
import uuid
from datetime import datetime, timedelta

import structlog
from django.conf import settings
from django.db import transaction
from django.db.models import DateTimeField, DurationField, Exists, ExpressionWrapper, F, OuterRef, Q, QuerySet, Value
from django.db.models.functions import Greatest

from sandboxes.claims import CLAIM_TTL, Claim, hold
from sandboxes.db.clock import Clock, clock_from
from sandboxes.deferred_writes import end_if_unanswered, end_on_connection_error
from sandboxes.errors import ClaimLost, SandboxBusy, WorkspaceFull
from sandboxes.hosts import registry
from sandboxes.lifecycle import COLD, DESTROYED, RUNNING, SUSPENDED, WAITING, advance, checkpoint
from sandboxes.models import Attachment, Sandbox, TransitionReason, processes
from sandboxes.models.processes import Process
from sandboxes.providers.base import MAX_SUSPEND_TIME, Provider
from sandboxes.providers.errors import ProviderError
from sandboxes.state import data_sync, workspace
from sandboxes.storage.base import StoreError
from sandboxes.usage import readings

log = structlog.get_logger(__name__)
SUSPENSION_TTL = timedelta(seconds=10)  # of the claim of a worker that suspends a sandbox; runs wait for the claim to end
# Of the same claim at a provider that stops sandboxes: longer than `suspend` takes, so that no sandbox is stopped after a run
# has taken over.
STOP_TTL = max(CLAIM_TTL, 2 * MAX_SUSPEND_TIME)
POLL_INTERVAL_SECONDS = 0.02  # between two reads of a row that another process is suspending


def filter_unclaimed(now: datetime) -> Q:
    """Build the condition that no worker is suspending the sandbox. The deadline of a worker that died has passed."""
    return ~Q(state=SUSPENDED) | Q(deadline_at__isnull=True) | Q(deadline_at__lt=now)


def is_in_transition(sandbox: Sandbox, *, now: datetime) -> bool:
    """Return whether a worker is suspending the sandbox."""
    return sandbox.state == SUSPENDED and sandbox.deadline_at is not None and sandbox.deadline_at >= now


def find_due(*, now: datetime) -> QuerySet[Sandbox]:
    """Select the waiting sandboxes that are to be suspended now."""
    # Tier 2 is `waiting` and `suspended`. The index sandbox_eviction_order has the rows with a tier.
    waiting = Sandbox.objects.filter(_build_suspendable_filter(now), registry.filter_local(), tier=2, state=WAITING)
    used_at = Greatest("state_since", "last_used_at", output_field=DateTimeField())  # input to a terminal is no run
    waited = ExpressionWrapper(Value(now) - used_at, DurationField())
    return waiting.alias(waited=waited).filter(waited__gte=F("suspend_after")).order_by("state_since")


def find_keeping_awake(*, now: datetime) -> QuerySet[Process]:
    """Select the running processes that prevent the suspension of their sandboxes, for at most LEASEHOLD_KEEP_AWAKE_LIMIT."""
    return Process.objects.filter(keep_awake=True, ended_at__isnull=True, started_at__gt=now - settings.KEEP_AWAKE_LIMIT)


def _build_suspendable_filter(now: datetime) -> Q:
    """Build the condition that a waiting sandbox may be suspended: nothing in it has to go on or is still to be stored."""
    keeping_awake = find_keeping_awake(now=now).filter(sandbox=OuterRef("pk"))
    unsaved = Attachment.objects.filter(
        pk=OuterRef("pk"), incarnation=OuterRef("incarnation"), unsaved_since__isnull=False, full=False
    )
    held = Q(suspend_after__isnull=False, holder__isnull=False, lost_at__isnull=True)
    return held & ~Exists(keeping_awake) & ~Exists(unsaved)


def suspend(sandbox: Sandbox, *, now: datetime, actor: str = "") -> bool:
    """Suspend one waiting sandbox. Returns whether it is suspended now; False also for a provider that cannot suspend.

    `sandbox` is the row as it was read: a sandbox that was used since is not suspended. Raises ProviderError, and StoreError or
    WorkspaceFull if its state is to be stored before; the sandbox then waits again."""
    clock, provider = clock_from(now), registry.get_sandbox_provider(sandbox)
    if not provider.can_suspend or settings.OBSERVE:
        return False
    # The measured use ends before the suspended time begins, which has a price of its own.
    readings.record_reading(sandbox, provider, now=now, min_cpu_micros=0)
    token, unchanged = uuid.uuid4(), Q(incarnation=sandbox.incarnation, state_since=sandbox.state_since)
    claim = _build_claim(sandbox, token, clock)
    with end_if_unanswered(claim.end, claim):
        claimed = advance(
            sandbox.pk, WAITING, SUSPENDED, now=clock(), code=TransitionReason.IDLE, actor=actor,
            guard=unchanged & _build_suspendable_filter(now), frozen=True, claim=token, claimed_by=settings.INSTANCE,
            deadline_at=clock() + _get_ttl(provider),
        )  # fmt: skip
    if not claimed:
        return False
    checkpoint("suspension claimed", sandbox)
    return _finish(sandbox, provider, token, now=clock(), actor=actor)


def continue_suspension(sandbox: Sandbox, *, now: datetime, actor: str = "") -> bool:
    """Freeze or stop a suspended sandbox again: after the death of its worker, or if its processes turn out to run.

    `sandbox` is the row as it was read. Returns whether it is suspended now. Raises ProviderError as `suspend` does."""
    clock, token = clock_from(now), uuid.uuid4()
    unchanged = Q(state_since=sandbox.state_since, claim=sandbox.claim, deadline_at=sandbox.deadline_at)
    provider = registry.get_sandbox_provider(sandbox)
    claim = _build_claim(sandbox, token, clock)
    with end_if_unanswered(claim.end, claim):
        claimed = Sandbox.objects.filter(unchanged, filter_unclaimed(now), pk=sandbox.pk, state=SUSPENDED).update(
            claim=token, claimed_by=settings.INSTANCE, deadline_at=now + _get_ttl(provider)
        )
    return bool(claimed) and _finish(sandbox, provider, token, now=clock(), actor=actor)


def _build_claim(sandbox: Sandbox, token: uuid.UUID, clock: Clock) -> Claim:
    return Claim(Sandbox.objects.filter(pk=sandbox.pk, claim=token, state=SUSPENDED), deadline=clock(), clock=clock)


def _get_ttl(provider: Provider) -> timedelta:
    return SUSPENSION_TTL if provider.suspend_keeps_processes else STOP_TTL


def _finish(sandbox: Sandbox, provider: Provider, token: uuid.UUID, *, now: datetime, actor: str) -> bool:
    """Freeze the processes or stop the sandbox, and end the claim. Returns whether the sandbox is suspended."""
    clock = clock_from(now)
    rows = Sandbox.objects.filter(pk=sandbox.pk, claim=token, state=SUSPENDED)
    with end_on_connection_error(_build_claim(sandbox, token, clock)):
        return _finish_claimed(sandbox, provider, token, rows, clock, actor=actor)


def _finish_claimed(
    sandbox: Sandbox, provider: Provider, token: uuid.UUID, rows: QuerySet[Sandbox], clock: Clock, *, actor: str
) -> bool:
    own_claim = Q(claim=token)
    try:
        if provider.suspend_keeps_processes:
            provider.suspend(sandbox.ref)
        elif not _store_and_stop(rows, provider, clock):
            return False
    except ClaimLost:
        return False
    except (ProviderError, StoreError, WorkspaceFull) as failed:
        advance(
            sandbox.pk, SUSPENDED, WAITING, now=clock(), code=TransitionReason.SUSPEND_FAILED, actor=actor, guard=own_claim,
            reason=f"could not be suspended: {failed}", claim=None, claimed_by="", deadline_at=None,
            **_build_resumed_columns(provider),
        )  # fmt: skip
        raise
    checkpoint("frozen", sandbox)
    with transaction.atomic():
        confirmed = Sandbox.objects.filter(own_claim, pk=sandbox.pk, state=SUSPENDED).update(
            claim=None, claimed_by="", deadline_at=None
        )
        if confirmed and not provider.suspend_keeps_processes:
            note = "Ended by the suspension: the vendor has stopped the sandbox"
            processes.close_all_processes(sandbox.pk, now=clock(), note=note, may_wake=False, resumes=True)
    if confirmed:
        log.info("suspended", sandbox=str(sandbox.pk), agent=sandbox.agent_did)
        return True
    recover_frozen(sandbox, provider)  # this worker was slow: the sandbox has been used since
    return False


def _store_and_stop(rows: QuerySet[Sandbox], provider: Provider, clock: Clock) -> bool:
    """Store the state of a claimed sandbox, and stop it. Returns False if the claim was lost. Raises ClaimLost, too.

    1. Store /data and the workspace, unless they are stored since the last run.
    2. Stop the sandbox at the vendor, with the claim extended before."""
    claimed = rows.select_related("pool").first()
    if claimed is None:
        return False
    assert claimed.deadline_at is not None
    with hold(Claim(rows, deadline=claimed.deadline_at, clock=clock, ttl=STOP_TTL)) as claim:
        if workspace.has_unsaved_state(claimed):
            data_sync.persist_waiting(claimed, provider, now=clock())
            if not workspace.persist_claimed(claimed, provider, claim, clock=clock):
                return False
        checkpoint("suspension stored", claimed)
        claim.keep()
        provider.suspend(claimed.ref)
    return True


def recover_frozen(sandbox: Sandbox, provider: Provider) -> bool:
    """Resume a sandbox that was found frozen, unless it is suspended or gone. Returns whether it was resumed."""
    same_incarnation = Sandbox.objects.filter(pk=sandbox.pk, incarnation=sandbox.incarnation)
    rows = same_incarnation.exclude(state__in=(SUSPENDED, COLD, DESTROYED))
    # The end of a run may clear `frozen` in between, but the run may have ended before the processes were frozen.
    if not rows.update(frozen=True) or not _resume_unless_suspended(sandbox, provider, rows):
        return False
    log.warning("frozen sandbox resumed", sandbox=str(sandbox.pk))
    return True


def thaw(sandbox: Sandbox, provider: Provider) -> None:
    """Resume the processes of a sandbox that has left the state `suspended`. Does nothing if they are known to run.

    Idempotent, and safe to call concurrently. Raises ProviderError."""
    if sandbox.frozen:
        rows = Sandbox.objects.filter(pk=sandbox.pk, incarnation=sandbox.incarnation, frozen=True)
        _resume_unless_suspended(sandbox, provider, rows.exclude(state=SUSPENDED))


def thaw_for_run(sandbox: Sandbox, provider: Provider) -> None:
    """Resume the processes for an open Run, which keeps the sandbox from being suspended. Raises ProviderError.

    The row stays `frozen` until the end of the Run clears it, in the statement that closes the Run. Runs that begin meanwhile
    resume the processes again, without effect. Where the suspension has ended the processes, the row is cleared now: their
    restart waits for that, and an open Run may last for hours."""
    provider.resume(sandbox.ref)
    checkpoint("thawed", sandbox)
    if not provider.suspend_keeps_processes:
        Sandbox.objects.filter(pk=sandbox.pk, incarnation=sandbox.incarnation, state=RUNNING).update(frozen=False)


def _resume_unless_suspended(sandbox: Sandbox, provider: Provider, rows: QuerySet[Sandbox]) -> bool:
    """Resume the processes and record it, unless there is no such row: resumed by another process, or suspended again."""
    since = rows.values_list("state_since", flat=True).first()
    if since is None:
        return False
    provider.resume(sandbox.ref)
    checkpoint("thawed", sandbox)
    rows.filter(state_since=since).update(
        frozen=False, **_build_resumed_columns(provider)
    )  # each suspension changes state_since
    sandbox.frozen = False
    return True


def _build_resumed_columns(provider: Provider) -> dict[str, bool]:
    """Return the columns of a sandbox that goes on without a run: what its processes change is not in the stored state."""
    return {} if provider.suspend_keeps_processes else {"persisted": False}


def ensure_awake(sandbox: Sandbox, provider: Provider, *, now: datetime, actor: str = "") -> None:
    """Resume a suspended sandbox for a call of the provider that is no run. Its time until the next suspension begins again.

    Raises ProviderError, and SandboxBusy if another process has not finished its suspension in time."""
    clock = clock_from(now)
    while (current := Sandbox.objects.get(pk=sandbox.pk)).state == SUSPENDED:
        if advance(
            sandbox.pk, SUSPENDED, WAITING, now=clock(), code=TransitionReason.RESUMED, actor=actor,
            guard=filter_unclaimed(clock()), claim=None, claimed_by="", deadline_at=None,
        ):  # fmt: skip
            continue
        if clock() > now + 2 * SUSPENSION_TTL:
            raise SandboxBusy("The sandbox is still being suspended by another process. Try again in a moment.")
        time.sleep(POLL_INTERVAL_SECONDS)
    thaw(current, provider)

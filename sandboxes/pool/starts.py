"""Starts of sandboxes: a reserved row becomes warm, and a cold sandbox wakes with its stored state.

Each function claims with a guarded UPDATE, calls the provider outside any transaction, and records the outcome. An interrupted
start leaves a row in `warming` with a deadline, after which sandboxes.sweeps.passes takes the next step."""

import uuid
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import F, Q

from sandboxes import destruction, eviction, installation_marks, process_restarts, providers
from sandboxes.claims import CLAIM_TTL, RENEWAL_INTERVAL, Claim
from sandboxes.db import dialect
from sandboxes.db.clock import Clock, clock_from
from sandboxes.deferred_writes import end_if_unanswered, hold_in_flight
from sandboxes.egress import gateway_tokens, slots
from sandboxes.errors import (
    CapacityExhausted,
    CapacityPending,
    ClaimLost,
    EngineDiskFull,
    ImageMissing,
    SandboxError,
    SandboxLost,
    SandboxNotHeld,
    SandboxNotReady,
    TooManyStarts,
    WorkspaceFull,
)
from sandboxes.hosts import registry
from sandboxes.lifecycle import COLD, DESTROYING, WARM, WARMING, advance, checkpoint
from sandboxes.models import Host, Pool, Sandbox, Transition, TransitionReason
from sandboxes.models.names import build_name
from sandboxes.pool import images, intervals, runtimes, start_breaker, start_failures
from sandboxes.providers.base import GatewayAccess, Provider, SandboxSpec, VendorIntervals
from sandboxes.providers.errors import CapacityPending as Pending
from sandboxes.providers.errors import FailureCause, NoCapacity, OutOfSpace, ProviderError, Rejected, Unavailable
from sandboxes.state import disk_space, mounts, unrecorded, vendor_snapshots, workspace
from sandboxes.state.workspace import StateLost
from sandboxes.storage.base import StoreError

log = structlog.get_logger(__name__)
MAX_EVICTION_ATTEMPTS = 8  # per request, before CapacityExhausted


def start_reserved(
    sandbox: Sandbox, *, now: datetime, actor: str = "", files: Mapping[str, bytes], is_new_holder: bool = False
) -> Sandbox:
    """Start the sandbox of a row in `warming`. Returns the row in `warm`. A new holder has no stored state.

    1. Create the sandbox, unless it was created before and is pending, and wait until it runs commands.
    2. Unpack the holder's newest snapshot, or write `files` if there is none.
    3. Move the row to `warm`.

    SANDBOX_START_TIMEOUT limits step 1. The claim is kept in step 2 while the snapshot is transferred, however long that takes.

    Raises SandboxNotReady if a step failed or made no progress, and SandboxLost if the stored state counts as lost; in both
    cases the sandbox is scheduled for destruction and its snapshots are kept. Raises SandboxNotHeld if the lease ended
    meanwhile.

    Raises CapacityPending if the engine has no room yet: the row stays in `warming` with its place, and `continue_pending`
    continues. Raises CapacityExhausted if the engine does not get any room."""
    clock = clock_from(now)
    provider = registry.get_sandbox_provider(sandbox)
    assert sandbox.host is not None
    host = sandbox.host
    own = Q(claim=sandbox.claim)

    def give_up(failed: Exception, code: TransitionReason, reason: str) -> None:
        """Schedule the destruction of the sandbox, unless another process has the row: then no state of it is lost."""
        if not destruction.schedule_destroy(sandbox.pk, now=clock(), code=code, reason=reason, actor=actor, guard=own):
            _discard(provider, sandbox)
            raise _build_overtaken_error(sandbox) from failed

    try:
        with hold_in_flight(build_claim(sandbox, clock)) as claim:
            installation_marks.note_change(sandbox, WARMING)
            limits = _compute_limits(sandbox, provider, now=clock())  # from before the call: a lifetime never ends too late
            if sandbox.pending_since is None:
                provider.create(replace(_build_complete_spec(sandbox, provider, now=clock()), intervals=limits.intervals))
                checkpoint("created", sandbox)
                claim.note_progress()
                if provider.agents_join:
                    claim.keep()  # a row that was destroyed before the create has no valid token: its agent would never join
            provider.wait_ready(sandbox.ref, timeout=settings.SANDBOX_START_TIMEOUT)
            start_breaker.note_success(host)
            if provider.needs_gateway and settings.GATEWAY_URL:
                provider.connect_gateway(sandbox.ref, settings.GATEWAY_URL, gateway_tokens.issue(sandbox, now=clock()))
            claim.note_progress()
            holder = None if is_new_holder else sandbox.holder
            source, prepared = _restore_state(sandbox, holder, provider, files, now=clock())
            checkpoint("prepared", sandbox)
            is_ready = _mark_ready(
                sandbox, source, prepared=prepared, may_have_processes=holder is not None, now=clock(), actor=actor,
                **limits.to_columns(),
            )  # fmt: skip
    except StateLost as lost:
        give_up(lost, TransitionReason.STATE_LOST, f"stored state is lost: {lost}")
        raise SandboxLost(f"The stored state of this sandbox is gone: {lost}") from lost
    except Pending as pending:
        start_breaker.note_success(host)
        if _keep_pending(sandbox, provider, pending, now=clock()):
            raise _build_pending_error(sandbox, pending) from pending
        raise _build_overtaken_error(sandbox) from pending
    except (ProviderError, StoreError, ClaimLost) as failed:
        _note_failed_start(host, failed, now=clock())
        give_up(failed, TransitionReason.START_FAILED, f"start failed: {failed}")
        start_failures.note_failure(sandbox.pool, failed, now=clock())
        log.warning("sandbox start failed", sandbox=str(sandbox.pk), error=str(failed))
        error = _choose_start_error(failed)(f"The sandbox could not be started: {failed}")
        error.provider = sandbox.provider
        raise error from failed
    if not is_ready:
        # The row left `warming` meanwhile. A destroy may have been confirmed before the provider had created anything.
        _discard(provider, sandbox)
        raise _build_overtaken_error(sandbox)
    start_failures.note_success(sandbox.pool)
    installation_marks.note_change(sandbox, WARM)
    is_woken, seconds = has_stored_state(sandbox, source), round((clock() - now).total_seconds(), 3)
    log.info(
        "wake" if is_woken else "sandbox created",
        sandbox=str(sandbox.pk), source=source, agent=sandbox.agent_did, provider=sandbox.provider, seconds=seconds,
    )  # fmt: skip
    if not is_woken:
        return sandbox  # with the values that were just written
    return Sandbox.objects.select_related("pool").get(pk=sandbox.pk)


class StartClaim(Claim):
    """Claim on the start of a sandbox. Its end ends the probe of the host's circuit breaker, if the start is the probe."""

    def __init__(self, sandbox: Sandbox, *, deadline: datetime, clock: Clock, ttl: timedelta) -> None:
        rows = Sandbox.objects.filter(claim=sandbox.claim, pk=sandbox.pk, state=WARMING)
        super().__init__(rows, deadline=deadline, clock=clock, ttl=ttl)
        self._host_id, self._probe_until = sandbox.host_id, deadline  # the claim and the probe begin with the same duration

    def end(self) -> None:
        super().end()
        if self._host_id is not None:
            start_breaker.end_probe(self._host_id, until=self._probe_until, now=self.clock())


def build_claim(sandbox: Sandbox, clock: Clock) -> StartClaim:
    """Build the claim on the start of a sandbox, by the token and the deadline in the object of its row."""
    assert sandbox.deadline_at is not None
    ttl = max(CLAIM_TTL, settings.SANDBOX_START_TIMEOUT + RENEWAL_INTERVAL)
    return StartClaim(sandbox, deadline=sandbox.deadline_at, clock=clock, ttl=ttl)


def _build_complete_spec(sandbox: Sandbox, provider: Provider, *, now: datetime) -> SandboxSpec:
    """Build the spec, with a new token for the gateway if the agent of the sandbox joins it."""
    spec = build_spec(sandbox)
    if not provider.agents_join:
        return spec
    authority = Path(settings.GATEWAY_AUTHORITY).read_text() if settings.GATEWAY_AUTHORITY else ""
    access = GatewayAccess(settings.GATEWAY_URL, gateway_tokens.issue_for_join(sandbox, now=now), authority)
    return replace(spec, gateway=access)


def _keep_pending(sandbox: Sandbox, provider: Provider, pending: Pending, *, now: datetime) -> bool:
    """Give up the claim of a start for which the engine has no room yet. Returns False if another process moved the row.

    The row keeps its place until the provider's `pending_timeout` has passed; the sweep `stalled` destroys it then."""
    since = sandbox.pending_since or now
    own = Sandbox.objects.filter(pk=sandbox.pk, state=WARMING, claim=sandbox.claim, incarnation=sandbox.incarnation)
    kept = own.update(
        claim=None,
        claimed_by="",
        pending_since=since,
        deadline_at=since + provider.pending_timeout,
        last_error=str(pending),
    )
    if kept:
        log.info("sandbox pending", sandbox=str(sandbox.pk), since=since.isoformat(), reason=str(pending))
    return bool(kept)


def _build_pending_error(sandbox: Sandbox, pending: Pending) -> CapacityPending:
    error = CapacityPending(f"{(CapacityPending.__doc__ or '').strip()} {pending}")
    error.retry_after, error.provider = pending.retry_after or CapacityPending.retry_after, sandbox.provider
    return error


def is_pending(sandbox: Sandbox) -> bool:
    """Return whether the start of a sandbox is pending, and no process waits for it now."""
    return sandbox.state == WARMING and sandbox.pending_since is not None and sandbox.claim is None


def continue_pending(
    sandbox: Sandbox, *, now: datetime, actor: str = "", files: Mapping[str, bytes] | None = None
) -> Sandbox | None:
    """Wait again for a sandbox whose start is pending. Returns None if another process has claimed or moved the row.

    Raises the errors of start_reserved, and CapacityExhausted if it has waited for as long as it may."""
    if sandbox.deadline_at and sandbox.deadline_at <= now:
        reason = f"no room for it: {sandbox.last_error}"
        destruction.schedule_destroy(sandbox.pk, now=now, code=TransitionReason.START_STALLED, reason=reason, actor=actor)
        raise CapacityExhausted(f"The sandbox has waited for room in vain, and was given up. {sandbox.last_error}")
    token, deadline = uuid.uuid4(), now + settings.SANDBOX_START_TIMEOUT
    pending = Sandbox.objects.filter(
        pk=sandbox.pk, state=WARMING, claim__isnull=True, pending_since__isnull=False, incarnation=sandbox.incarnation,
        deadline_at__gt=now,
    )  # fmt: skip
    own = Sandbox.objects.filter(pk=sandbox.pk, state=WARMING, claim=token)
    with end_if_unanswered(partial(own.update, claim=None, claimed_by="", deadline_at=sandbox.deadline_at), sandbox):
        if not pending.update(claim=token, claimed_by=settings.INSTANCE, deadline_at=deadline):
            return None
    claimed = Sandbox.objects.select_related("pool", "policy", "host").get(pk=sandbox.pk)
    return start_reserved(claimed, now=now, actor=actor, files=files or {})


def _note_failed_start(host: Host, failed: Exception, *, now: datetime) -> None:
    """Count the failure in the circuit breaker of the host. A provider that rejects a request is available."""
    if isinstance(failed, Unavailable):
        start_breaker.note_failure(host, failed, now=now)
    elif isinstance(failed, Rejected):
        start_breaker.note_success(host)


def _choose_start_error(failed: Exception) -> type[SandboxError]:
    """Return the class of the error that the caller of a failed start gets."""
    if isinstance(failed, NoCapacity):
        return CapacityExhausted
    if isinstance(failed, OutOfSpace):
        return EngineDiskFull
    if isinstance(failed, ProviderError) and failed.cause == FailureCause.IMAGE_UNUSABLE:
        return ImageMissing
    return SandboxNotReady


def require_start_allowed(sandbox: Sandbox, *, now: datetime) -> None:
    """Raise TooManyStarts if its pool starts as many sandboxes as it may, and StartsPaused if its host may start none.

    Call this function after the row is in `warming`, in the same transaction. With a limit the row of the pool is locked, so
    that concurrent starts count each other."""
    assert sandbox.host
    start_breaker.admit(sandbox.host, now=now)
    limit = sandbox.pool.max_starting
    if limit is None:
        return
    Pool.objects.select_for_update(no_key=True).get(pk=sandbox.pool_id)
    if Sandbox.objects.filter(pool=sandbox.pool_id, state=WARMING).count() > limit:
        raise TooManyStarts(f'The pool "{sandbox.pool}" starts at most {limit} sandboxes at the same time. Try again soon.')


@dataclass(frozen=True)
class _VendorLimits:
    """Times after which the vendor acts on a new sandbox by itself."""

    intervals: VendorIntervals | None
    lifetime_ends_at: datetime | None

    def to_columns(self) -> dict[str, object]:
        columns = intervals.to_columns(self.intervals) if self.intervals else {}
        return {"lifetime_ends_at": self.lifetime_ends_at, "intervals_claimed_until": None, **columns}


def _compute_limits(sandbox: Sandbox, provider: Provider, *, now: datetime) -> _VendorLimits:
    has_intervals = provider.has_auto_stop or provider.has_auto_delete
    return _VendorLimits(
        intervals.compute_intervals(sandbox, provider) if has_intervals else None,
        now + provider.max_lifetime if provider.max_lifetime else None,
    )


def _mark_ready(
    sandbox: Sandbox, source: str, *, prepared: bool, may_have_processes: bool, now: datetime, actor: str, **columns: object
) -> bool:
    """Move the row to `warm`, and set its values in memory. Returns False if another process moved the row first.

    `columns` are further values of the row."""
    is_wake = has_stored_state(sandbox, source)
    counters = {f"woken_{source}": F(f"woken_{source}") + 1} if is_wake else {}
    changes: dict[str, Any] = {
        "claim": None, "deadline_at": None, "tries": 0, "last_error": "", "source": source, "prepared": prepared,
        "idle_at": now + sandbox.idle_after if sandbox.holder else None, "pending_since": None, **columns,
    }  # fmt: skip
    with transaction.atomic() if may_have_processes else nullcontext():
        moved = advance(
            sandbox.pk, WARMING, WARM, now=now, actor=actor, guard=Q(claim=sandbox.claim, incarnation=sandbox.incarnation),
            code=TransitionReason.READY, reason=f"ready, state: {source}" if is_wake else "", **changes, **counters,
        )  # fmt: skip
        if moved and may_have_processes:
            process_restarts.schedule_after_wake(sandbox, now=now)
    for name, value in {**changes, "state": WARM, "state_since": now}.items() if moved else ():
        setattr(sandbox, name, value)
    return moved


def has_stored_state(sandbox: Sandbox, source: str | None = None) -> bool:
    """Return whether a sandbox began with stored state. `source` of its state: by default that of the row."""
    return sandbox.incarnation > 1 or (source or sandbox.source) not in ("", "fresh")


def _build_overtaken_error(sandbox: Sandbox) -> SandboxError:
    """Build the error of a start whose row another process has moved to `destroying`."""
    moved = Transition.objects.filter(sandbox=sandbox, to=DESTROYING).order_by("pk").last()
    if moved and moved.code == TransitionReason.START_STALLED:
        return SandboxNotReady("The start of the sandbox made no progress and was given up. Its stored state is kept.")
    return SandboxNotHeld("The lease ended while its sandbox was being started.")


def _restore_state(
    sandbox: Sandbox, holder: uuid.UUID | None, provider: Provider, files: Mapping[str, bytes], *, now: datetime
) -> tuple[str, bool]:
    """Restore the newest snapshot of `holder`, or write `files` if there is none. A vendor's snapshot of that state goes first.

    Returns the source of the state ("local", "cloud", "vendor" or "fresh"), and whether the holder's first files are there."""
    snapshot = workspace.find_latest(holder) if holder else None
    if snapshot:
        if vendor_snapshots.restore(snapshot, sandbox, provider, now=now):
            return vendor_snapshots.SOURCE, workspace.is_own(snapshot)
        source, hydrated = workspace.hydrate(snapshot, sandbox.ref, provider, now=now)
        return source, workspace.is_own(hydrated)
    put_files(sandbox, provider, files)
    return "fresh", bool(files)


def put_files(sandbox: Sandbox, provider: Provider, files: Mapping[str, bytes]) -> None:
    """Write a holder's first files into its sandbox. Idempotent."""
    for path, content in files.items():
        provider.write_file(sandbox.ref, path, content)


def _discard(provider: Provider, sandbox: Sandbox) -> None:
    try:
        provider.destroy(sandbox.ref)
    except ProviderError as failed:  # no row names the sandbox, so reconcile destroys it as an orphan
        log.warning("late sandbox left to reconcile", sandbox=str(sandbox.pk), error=str(failed))


def build_spec(sandbox: Sandbox) -> SandboxSpec:
    """Build the provider's spec of a sandbox. Creates the socket and /data directories that the spec mounts."""
    return SandboxSpec(
        name=sandbox.name,
        owner=str(sandbox.pool.owner),
        image=sandbox.image,
        image_id=images.find_image_id(sandbox),
        pool=sandbox.pool.name,
        labels={"agent": sandbox.agent_did, "environment": sandbox.environment_id, "sandbox": str(sandbox.pk)},
        memory_mib=sandbox.memory_mib,
        millicpus=sandbox.millicpus,
        disk_mib=sandbox.disk_mib,
        gpus=sandbox.gpus,
        gpu_type=sandbox.gpu_type,
        sized=sandbox.sized,
        pids=sandbox.pids,
        runtime=runtimes.require_runtime(sandbox),
        sockets=slots.ensure_slot_directory(sandbox.slot) if sandbox.slot is not None else None,
        agent=slots.ensure_agent_directory(sandbox.slot) if sandbox.slot is not None else None,
        data=mounts.prepare_mount_directory(sandbox),
        writable_root=sandbox.rules.writable_root,
    )


def wake(sandbox: Sandbox, *, now: datetime, actor: str = "") -> Sandbox | None:
    """Start the next incarnation of a cold sandbox with its stored state, after evicting another one if no egress slot is free.

    In a database that has lost changes, the files of later incarnations and snapshots are kept first.

    Returns None if another process moved the row first. Raises CapacityExhausted if no slot can be freed, EngineDiskFull if
    the engine's disk is full, SandboxNotReady if files that the database does not record could not be kept, and what
    start_reserved raises."""
    disk_space.require_engine_reserve(sandbox.provider, "wake a sandbox")
    clock = clock_from(now)
    if installation_marks.has_lost_changes():
        _keep_unrecorded(sandbox, now=clock())
    for _ in range(MAX_EVICTION_ATTEMPTS):
        slot = slots.choose_free_slot()
        if slot is None:
            if not eviction.free_slot(agent_did=sandbox.agent_did, now=clock(), actor=actor):
                break
            continue
        try:
            claimed = _claim_wake(sandbox.pk, slot, now=clock(), actor=actor)
        except IntegrityError as error:
            dialect.raise_unless_unique(error)
            continue  # sandbox_one_live_per_slot: another sandbox took the slot
        if claimed is None:
            return None
        checkpoint("wake claimed", claimed)
        return start_reserved(claimed, now=clock(), actor=actor, files={})
    raise slots.build_exhausted_error()


def _keep_unrecorded(sandbox: Sandbox, *, now: datetime) -> None:
    sandbox = Sandbox.objects.select_related("pool", "host").get(pk=sandbox.pk)
    try:
        unrecorded.recover(sandbox, providers.get_provider(sandbox.provider), now=now)
    except (ProviderError, StoreError, WorkspaceFull) as failed:
        raise SandboxNotReady(
            f"The database has lost changes, and files that it does not record could not be kept. Nothing was started: {failed}"
        ) from failed


def _claim_wake(pk: uuid.UUID, slot: int, *, now: datetime, actor: str) -> Sandbox | None:
    """Move a cold sandbox to `warming` with this slot. Returns its row, or None if another process moved the row first."""
    sandbox = Sandbox.objects.select_related("pool", "policy").get(pk=pk)
    unchanged = Q(incarnation=sandbox.incarnation, holder=sandbox.holder)
    sandbox.incarnation += 1
    sandbox.ref, sandbox.claim, sandbox.slot = build_name(sandbox.pk, sandbox.incarnation), uuid.uuid4(), slot
    sandbox.host = registry.get_placement_host(sandbox.provider, now=now)
    sandbox.deadline_at, sandbox.last_used_at = now + settings.SANDBOX_START_TIMEOUT, now
    sandbox.runtime = runtimes.get_runtime(sandbox.pool, sandbox.provider)
    claim = build_claim(sandbox, clock_from(now))
    with end_if_unanswered(claim.end, claim), transaction.atomic():  # the caller handles an IntegrityError
        claimed = advance(
            sandbox.pk, COLD, WARMING, now=now, code=TransitionReason.WOKEN, actor=actor, guard=unchanged,
            incarnation=sandbox.incarnation, ref=sandbox.ref, claim=sandbox.claim, claimed_by=settings.INSTANCE,
            deadline_at=sandbox.deadline_at, last_used_at=now, persisted=False, slot=slot, slot_since=now,
            host=sandbox.host, pod_uid="", network=providers.get_provider(sandbox.provider).network, runtime=sandbox.runtime,
        )  # fmt: skip
        if claimed:
            require_start_allowed(sandbox, now=now)
    return sandbox if claimed else None

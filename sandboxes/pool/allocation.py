"""Allocation of sandboxes from pools: claims of pre-warmed sandboxes, places, quotas. Starts are in sandboxes.pool.starts.

Callers pass a holder (the key of a lease) and never call a provider directly. Each function claims with a guarded UPDATE, calls
the provider outside any transaction, and records the outcome. An interrupted step leaves a row with a deadline, after
which a sweep in sandboxes.sweeps.passes takes the next step."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

import structlog
from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import Q

from sandboxes import eviction, providers, suspension
from sandboxes.call_limits import CallLimits
from sandboxes.db import dialect, sql
from sandboxes.db.clock import clock_from
from sandboxes.deferred_writes import end_if_unanswered
from sandboxes.egress import slots
from sandboxes.errors import (
    CapacityExhausted,
    PoolDraining,
    QuotaExceeded,
    SandboxBusy,
    SandboxLost,
    SandboxNotReady,
    StartsPaused,
    TooManyStarts,
)
from sandboxes.guard import OPEN_GUARD, Guard, HolderRenewal, HolderTerms
from sandboxes.hosts import registry
from sandboxes.lifecycle import COLD, WARM, WARMING, advance, checkpoint, insert_warming
from sandboxes.models import ALIVE_STATES, GONE_STATES, FinalPersist, Policy, Pool, Quota, Sandbox, TransitionReason
from sandboxes.models.names import build_name
from sandboxes.pool import admission_queue, intervals, lifetimes, prewarmed, runtimes, start_breaker, starts
from sandboxes.pool.admission_queue import Position
from sandboxes.pool.placement import MOVE_REASONS, START_ERRORS, Placement, PoolSearch, Skip, find_skip_reason
from sandboxes.pool.starts import (
    MAX_EVICTION_ATTEMPTS,
    continue_pending,
    is_pending,
    require_start_allowed,
    start_reserved,
    wake,
)
from sandboxes.state import disk_space, mounts, workspace

log = structlog.get_logger(__name__)
POLL_INTERVAL_SECONDS = 0.05  # between two reads of a row whose state another process is changing


@dataclass(frozen=True)
class SandboxRequest:
    """Requirements of one holder for its sandbox."""

    holder: uuid.UUID
    agent_did: str
    environment_id: str
    pool: Pool
    idle_after: timedelta
    files: Mapping[str, bytes] = field(default_factory=dict)  # absolute path -> content, written before the first run
    skill: str = ""  # environment type whose skill /data/skills must contain, if a pack is assigned to it
    memory_mib: int | None = None  # None: the pool's default
    millicpus: int | None = None  # None: the pool's default
    disk_mib: int | None = None  # None: the vendor's default
    gpus: int = 0
    gpu_type: str = ""  # empty: any
    image: str = ""  # empty: the pool's default
    final_persist: FinalPersist = FinalPersist.ALL  # stored before the sandbox is destroyed
    guard: Guard = OPEN_GUARD
    renewal: HolderRenewal | None = None  # executed with the end of each run
    is_new_holder: bool = False  # the holder has neither a sandbox nor stored state, and its guard checks the budgets
    known: Sandbox | None = None  # the holder's sandbox, as the caller has just read it
    placement: Placement | None = None  # further pools; None: only `pool`
    skips: Sequence[Skip] = ()  # pools that were passed over before `pool`


class _PoolFull(Exception):
    """No place is free in the pool, apart from those for waiting requests. Rolls the reservation back."""

    def __init__(self, position: Position) -> None:
        self.position = position


class _NoFreeSlot(Exception):
    """No egress slot is free. Rolls the reservation back."""


TAKE_QUOTA_SQL = (
    "UPDATE sandboxes_quota SET used = used + 1 WHERE pool_id = %s AND agent_did = %s AND (most IS NULL OR used < most)"
)
TAKE_PLACE_SQL = "UPDATE sandboxes_pool SET used = used + 1 WHERE id = %s AND NOT draining AND used < capacity - %s"
HELD_SQL = "sandboxes_sandbox.state NOT IN ('destroying', 'destroyed')"


def find_by_holder(holder: uuid.UUID) -> Sandbox | None:
    """Return the holder's sandbox, or None. Ignores sandboxes in `destroying` and `destroyed`."""
    return sql.find_first(Sandbox, f"holder = %s AND {HELD_SQL}", holder)


def ensure_running(request: SandboxRequest, *, known: Sandbox | None = None, now: datetime, actor: str = "") -> Sandbox:
    """Return the holder's sandbox in an alive state. Idempotent, and safe to call from many processes at once.

    1. If the holder has an alive sandbox, return that one. The next run resumes a suspended one. One without an open run whose
       lifetime at its vendor ends soon is put to sleep before.
    2. If the holder's sandbox is cold, wake it in its pool. If its provider is unavailable, release its place, and continue
       with step 3 in the other pools: the new sandbox starts with the stored state.
    3. Otherwise try the pools of `request.placement` in order, or only `request.pool`: claim a pre-warmed sandbox, or start a
       new one. A sandbox whose start failed is destroyed, and keeps its place until that is confirmed.

    `known` is the holder's sandbox as it was just read, which saves reading it again.

    Raises CapacityPending while the engine has no room for the sandbox, which keeps its place: call this function again.

    Blocks while this or another process starts, suspends or evicts the sandbox. Raises CapacityExhausted,
    QuotaExceeded or PoolDraining if no place is available, StartsPaused or TooManyStarts if no sandbox may be started now,
    DiskFull if a new sandbox is needed and a disk of the control plane is low, SandboxNotReady if the start failed,
    NoPoolAvailable with the reasons if several pools were tried, SandboxLost if the stored state is gone, WrongHost if the
    sandbox or its stored state is on a host that this process does not reach, and SandboxBusy if another process has not
    finished after SANDBOX_START_TIMEOUT."""
    clock = clock_from(now)
    deadline = now + settings.SANDBOX_START_TIMEOUT
    sandbox = known or (None if request.is_new_holder else find_by_holder(request.holder))
    is_ready = sandbox and sandbox.state in ALIVE_STATES and not suspension.is_in_transition(sandbox, now=clock())
    is_usable = is_ready and sandbox and not sandbox.lost_at and not lifetimes.is_ending(sandbox, now=clock())
    if sandbox and is_usable and registry.is_local(sandbox):
        return _attach_pool(sandbox, request.pool)
    search = PoolSearch(request.pool, now, request.placement)
    while (ready := _start_or_wake(request, sandbox, search, now=clock(), actor=actor)) is None:
        if clock() > deadline:
            raise SandboxBusy("The sandbox is still being started or evicted by another process. Try again in a moment.")
        time.sleep(POLL_INTERVAL_SECONDS)
        sandbox, request = find_by_holder(request.holder), replace(request, is_new_holder=False)
    return ready


def _attach_pool(sandbox: Sandbox, pool: Pool) -> Sandbox:
    """Set the pool in memory, unless the sandbox was placed in another one meanwhile."""
    if sandbox.pool_id == pool.pk:
        sandbox.pool = pool
    return sandbox


def _start_or_wake(
    request: SandboxRequest, sandbox: Sandbox | None, search: PoolSearch, *, now: datetime, actor: str
) -> Sandbox | None:
    """Take the next step to an alive sandbox from the holder's present one. Returns None while another process changes it."""
    clock = clock_from(now)
    if sandbox and sandbox.lost_at:
        raise SandboxLost()
    if sandbox:
        _attach_pool(sandbox, request.pool)
    if sandbox and sandbox.state != COLD:
        registry.require_local(sandbox)
        if is_pending(sandbox):
            return continue_pending(sandbox, now=clock(), actor=actor, files=request.files)
        if sandbox.state not in ALIVE_STATES or suspension.is_in_transition(sandbox, now=clock()):
            return None
        if lifetimes.is_ending(sandbox, now=clock()) and lifetimes.put_to_sleep(sandbox, now=clock(), actor=actor):
            return None  # the next step wakes it in a new sandbox
        request.guard.check_affordable(sandbox.pool)  # the wait for another process may have taken minutes
        return sandbox
    if sandbox:
        workspace.require_within_reach(request.holder)
        request.guard.check_affordable(sandbox.pool)
        if woken := _wake_or_release(sandbox, search, now=clock(), actor=actor):
            request.guard.check_affordable(woken.pool)  # again: a wake may take minutes
        return woken
    return _start_in_next_pool(request, search, now=clock(), actor=actor)


def _wake_or_release(sandbox: Sandbox, search: PoolSearch, *, now: datetime, actor: str) -> Sandbox | None:
    """Wake a cold sandbox in its pool. If its provider is unavailable and another pool may start one, give up its place.

    Returns None if the place was released, or if another process moved the row first. The state of a cold sandbox is stored,
    and its snapshots stay, so that the holder's next sandbox begins with that state."""
    clock = clock_from(now)
    try:
        return wake(sandbox, now=clock(), actor=actor)
    except START_ERRORS as error:
        reason = find_skip_reason(error)
        if reason not in MOVE_REASONS or not search.find_promising(sandbox.pool, now=clock()):
            raise
        search.skip(sandbox.pool, error)
        unchanged = Q(incarnation=sandbox.incarnation)  # not if the wake has begun: its row is being destroyed
        detail = f"provider of the pool {sandbox.pool}: {reason.label}"
        if eviction.release_cold(
            sandbox.pk, now=clock(), code=TransitionReason.MOVED, reason=detail, actor=actor, guard=unchanged
        ):
            checkpoint("moved", sandbox)
    return None


def _start_in_next_pool(request: SandboxRequest, search: PoolSearch, *, now: datetime, actor: str) -> Sandbox | None:
    """Start a sandbox in the first pool that can. Returns None if another process was first, or if the first start failed.

    The caller reads the holder's sandbox again before the next pool is tried."""
    clock = clock_from(now)
    if search.has_alternatives(now=now):
        search.note_failed_starts(request.holder)
    while pool := search.find_next(now=clock()):
        attempt = replace(request, pool=pool, skips=tuple(search.skips))
        try:
            return _start_in_pool(attempt, search, now=clock(), actor=actor)
        except START_ERRORS as error:
            search.skip(pool, error)
            if isinstance(error, SandboxNotReady) and search.find_next(now=clock()):
                checkpoint("start given up", request.holder)
                return None
    if request.placement and search.has_alternatives(now=clock()):
        request.placement.note_skips(search.skips, now=clock())
    failure, last = search.build_error(), search.errors[-1] if search.errors else None
    raise failure from (failure.__cause__ if failure is last else last)


def _start_in_pool(request: SandboxRequest, search: PoolSearch, *, now: datetime, actor: str) -> Sandbox | None:
    clock = clock_from(now)
    if search.has_alternatives(now=now):  # a pre-warmed sandbox of a provider that seems to be unavailable is not used
        start_breaker.require_closed(registry.get_placement_host(_get_provider_name(request.pool), now=now), now=now)
    if not request.is_new_holder:
        workspace.require_within_reach(request.holder)
        request.guard.check_affordable(request.pool)
    if claimed := claim_warm(request, now=clock(), actor=actor):
        intervals.raise_after_claim(claimed, now=clock())
        return claimed
    reserved = reserve_place(request, now=clock(), actor=actor)
    if reserved is None:
        return None
    started = start_reserved(reserved, now=clock(), actor=actor, files=request.files, is_new_holder=request.is_new_holder)
    request.guard.check_affordable(request.pool)  # again: a start may take minutes
    return started


def _get_provider_name(pool: Pool) -> str:
    return pool.provider or providers.get_default_provider_name()


def claim_warm(request: SandboxRequest, *, now: datetime, actor: str = "") -> Sandbox | None:
    """Give the holder a pre-warmed sandbox of its pool.

    Returns None if no sandbox is ready, the holder has a sandbox already, the agent's quota is reached, or the holder needs
    stored state, a writable root or other resources."""
    if request.memory_mib not in (None, request.pool.memory_mib) or request.millicpus not in (None, request.pool.millicpus):
        return None  # pre-warmed sandboxes have the pool's resources
    if request.disk_mib or request.gpus:
        return None
    if request.image not in ("", request.pool.image):
        return None
    if not request.pool.warm_target or (not request.is_new_holder and workspace.find_latest(request.holder)):
        return None  # stored state is unpacked while a sandbox starts
    try:
        with transaction.atomic(durable=True):
            terms = request.guard.fence()
            _record_placement(request, now=now)
            policy = _resolve_policy(terms)
            if policy and policy.writable_root:
                transaction.set_rollback(True)
                return None  # pre-warmed sandboxes are started with the sealed policy
            sandbox, requests_wait = prewarmed.lock_ready(request.pool, now=now)
            if sandbox is None or (mounts.is_mount_required(request.agent_did) and not mounts.has_mount_directory(sandbox.pk)):
                transaction.set_rollback(True)  # undoes a lease that the guard has granted for this place
                return None
            position = _find_position(request, now=now) if requests_wait else Position(ahead=0, length=0)
            if position.ahead:
                transaction.set_rollback(True)
                return None
            _take_quota(request)
            changes: dict[str, Any] = {
                "holder": request.holder, "agent_did": request.agent_did, "environment_id": request.environment_id,
                "idle_after": request.idle_after, "last_used_at": now, "idle_at": now + request.idle_after, "prepared": False,
                "excludes": [*terms.excludes], "llm_enabled": terms.llm_enabled, "policy": policy,
                "final_persist": request.final_persist, "suspend_after": _resolve_suspend_after(terms, request.pool),
                "held_until": terms.held_until, "auto_stop": terms.auto_stop, "auto_delete": terms.auto_delete,
                **terms.call_limits.columns,
            }  # fmt: skip
            claimed = advance(
                sandbox.pk,
                WARM,
                WARM,
                now=now,
                code=TransitionReason.CLAIMED,
                actor=actor,
                guard=Q(holder__isnull=True),
                **changes,
            )
            if not claimed:
                transaction.set_rollback(True)  # undoes _take_quota
                return None
            _leave_queue(request, position, now=now)
            prewarmed.count_claim(request.pool)
    except IntegrityError as error:
        dialect.raise_unless_unique(error)
        return None  # sandbox_one_live_per_holder: another request was first
    except QuotaExceeded:
        return None  # reserve_place may release one of the agent's sandboxes
    log.info("wake", sandbox=str(sandbox.pk), source="prewarmed", agent=request.agent_did)
    for name, value in {**changes, "state_since": now, "pool": request.pool}.items():  # the row as it was just written
        setattr(sandbox, name, value)
    return sandbox


def reserve_place(request: SandboxRequest, *, now: datetime, actor: str = "") -> Sandbox | None:
    """Take a place in the pool: insert a row in `warming`. If no place or egress slot is free, evict another sandbox first.

    If the agent's quota is reached, the place of one of its own cold sandboxes is released. A place that waiting requests are
    entitled to (sandboxes.pool.admission_queue) is not taken, and none is evicted for it.
    Returns None if the holder has a sandbox already. Raises CapacityExhausted, QuotaExceeded, PoolDraining, DiskFull or
    EngineDiskFull."""
    disk_space.require_free_space("start a sandbox")
    disk_space.require_engine_space(_get_provider_name(request.pool), "start a sandbox")
    clock = clock_from(now)
    exhausted: CapacityExhausted | QuotaExceeded = _build_pool_full_error(request.pool)
    for _ in range(MAX_EVICTION_ATTEMPTS):
        try:
            return _insert_reservation(request, now=clock(), actor=actor)
        except IntegrityError as error:
            dialect.raise_unless_unique(error)
            return None  # sandbox_one_live_per_holder or sandbox_one_live_per_slot: another request was first
        except _PoolFull as full:
            if full.position.ahead:
                raise admission_queue.build_waiting_error(request.pool, full.position) from None
            exhausted = _build_pool_full_error(request.pool)
            freed = eviction.free_place(
                request.pool, agent_did=request.agent_did, now=clock(), actor=actor, spare_unused=full.position.is_queued
            )
        except _NoFreeSlot:
            exhausted = slots.build_exhausted_error()
            freed = eviction.free_slot(agent_did=request.agent_did, now=clock(), actor=actor)
        except QuotaExceeded as reached:
            exhausted = reached
            freed = eviction.free_quota(request.pool, agent_did=request.agent_did, now=clock(), actor=actor)
        if not freed:
            break
    raise exhausted


def _record_placement(request: SandboxRequest, *, now: datetime) -> None:
    if request.placement:
        request.placement.place(request.pool, request.skips, now=now)


def _build_pool_full_error(pool: Pool) -> CapacityExhausted:
    return CapacityExhausted(
        f'All {pool.capacity} places of the pool "{pool}" are taken and none can be freed now: '
        "each sandbox is running or protected by a guarantee. A lease that ends frees a place."
    )


def _insert_reservation(request: SandboxRequest, *, now: datetime, actor: str) -> Sandbox:
    sandbox = _build_sandbox(request.pool, now=now)
    sandbox.holder, sandbox.agent_did, sandbox.environment_id = request.holder, request.agent_did, request.environment_id
    sandbox.idle_after = request.idle_after
    sandbox.memory_mib = request.memory_mib or request.pool.memory_mib
    sandbox.millicpus = request.millicpus or request.pool.millicpus
    sandbox.disk_mib, sandbox.gpus, sandbox.gpu_type = request.disk_mib, request.gpus, request.gpu_type
    sandbox.sized = any((request.memory_mib, request.millicpus, request.disk_mib))
    sandbox.image = request.image or sandbox.image
    sandbox.final_persist = request.final_persist
    assert sandbox.host
    start_breaker.require_closed(sandbox.host, now=now)  # before a sandbox is evicted for the place
    claim = starts.build_claim(sandbox, clock_from(now))
    with end_if_unanswered(claim.end, claim), transaction.atomic(durable=True):
        terms = request.guard.fence()
        _record_placement(request, now=now)
        sandbox.excludes, sandbox.policy = [*terms.excludes], _resolve_policy(terms)
        sandbox.llm_limit, sandbox.llm_token_limit = terms.call_limits.usd, terms.call_limits.tokens
        sandbox.llm_enabled, sandbox.suspend_after = terms.llm_enabled, _resolve_suspend_after(terms, request.pool)
        sandbox.held_until, sandbox.auto_stop, sandbox.auto_delete = terms.held_until, terms.auto_stop, terms.auto_delete
        position = _find_position(request, now=now)  # before _take_quota, which changes the order
        insert_warming(sandbox, now=now, code=TransitionReason.REQUESTED, actor=actor)
        if not _take_quota_and_place(request, position, now=now):
            _refuse_if_draining(request.pool)
            raise _PoolFull(position)
        require_start_allowed(sandbox, now=now)
        if sandbox.slot is None:  # checked last: a request that is refused for another reason evicts no sandbox
            raise _NoFreeSlot
    checkpoint("reserved", sandbox)
    return sandbox


def _take_quota_and_place(request: SandboxRequest, position: Position, *, now: datetime) -> bool:
    """Count the sandbox for its agent and in its pool, and remove the request from the queue. Return whether a place was free.

    One statement on PostgreSQL if the agent's row exists and the request has not waited. The place is the last row to be
    locked: its condition on `counted` does not refer to the row, and is therefore evaluated first. Raise QuotaExceeded."""
    if dialect.can_chain() and not position.is_queued and not request.placement:
        place = f"{TAKE_PLACE_SQL} AND EXISTS (SELECT 1 FROM counted) RETURNING 1"  # noqa: S608 - no user input
        counted, placed = sql.execute_chain(
            [
                ("counted", sql.Statement(f"{TAKE_QUOTA_SQL} RETURNING 1", (request.pool.pk, request.agent_did))),
                ("placed", sql.Statement(place, (request.pool.pk, position.ahead))),
            ],
            ["counted", "placed"],
        )
        if counted:
            return bool(placed)
    _take_quota(request)
    _leave_queue(request, position, now=now)
    return take_place(request.pool, ahead=position.ahead)


def _find_position(request: SandboxRequest, *, now: datetime) -> Position:
    return admission_queue.find_position(request.pool, request.agent_did, request.environment_id, now=now)


def _leave_queue(request: SandboxRequest, position: Position, *, now: datetime) -> None:
    """Remove the request from the queue, in the transaction that takes its place. It may wait in the queue of another pool."""
    if position.is_queued or request.placement:
        admission_queue.admit(request.pool, request.agent_did, request.environment_id, now=now)


def _resolve_policy(terms: HolderTerms) -> Policy | None:
    """Return the policy to store. The built-in policy is stored as None, so that "sealed" has one representation."""
    return None if terms.policy is None or terms.policy.built_in else terms.policy


def _resolve_suspend_after(terms: HolderTerms, pool: Pool) -> timedelta | None:
    """Return the time to store: None where the provider cannot suspend sandboxes."""
    if terms.suspend_after is None:
        return None
    provider = providers.get_provider(_get_provider_name(pool))
    return terms.suspend_after if provider.can_suspend else None


def start_warm(pool: Pool, *, now: datetime) -> Sandbox | None:
    """Start one sandbox without a holder. Returns None if the pool has reached its warm target, has no place that no request
    waits for, no egress slot is free, its host may start none now, or a disk is low.

    The pool's row is locked while the warm and warming sandboxes are counted. Concurrent sweeps therefore do not exceed the
    target. Raises the errors of start_reserved."""
    if disk_space.find_low() or disk_space.is_engine_low(_get_provider_name(pool)):
        return None
    clock = clock_from(now)
    sandbox = _build_sandbox(pool, now=now)
    assert sandbox.host
    if start_breaker.is_open(sandbox.host, now=now):
        return None
    claim = starts.build_claim(sandbox, clock)
    try:
        with end_if_unanswered(claim.end, claim), transaction.atomic(durable=True):
            locked = Pool.objects.select_for_update(no_key=True).get(pk=pool.pk)
            if (
                prewarmed.find_unclaimed(locked).filter(state__in=(WARMING, WARM), host=sandbox.host).count()
                >= locked.warm_target
            ):
                return None
            if not take_place(locked, ahead=admission_queue.count_waiting(locked, now=now)):
                return None
            sandbox.slot = slots.choose_free_slot()  # under the lock no other sweep of this pool chooses the same slot
            if sandbox.slot is None:
                transaction.set_rollback(True)  # undoes take_place
                return None
            insert_warming(sandbox, now=now, code=TransitionReason.PREWARMED, actor="sweep")
            require_start_allowed(sandbox, now=now)
    except (StartsPaused, TooManyStarts):
        return None  # the next sweep tries again
    except IntegrityError as error:
        dialect.raise_unless_unique(error)
        return None  # sandbox_one_live_per_slot: another process took the slot, and the next sweep tries again
    checkpoint("reserved", sandbox)
    started = start_reserved(sandbox, now=clock(), actor="sweep", files={})
    registry.get_sandbox_provider(started).prepare_claim(started.ref)
    return started


def _build_sandbox(pool: Pool, *, now: datetime) -> Sandbox:
    """Build the row of a new sandbox in this pool, without saving it."""
    provider = _get_provider_name(pool)
    sandbox = Sandbox(
        pool=pool,
        provider=provider,
        host=registry.get_placement_host(provider, now=now),
        isolated=providers.get_provider(provider).isolated,
        network=providers.get_provider(provider).network,
        measured=providers.get_provider(provider).measures_usage,
        image=pool.image or providers.get_default_image(provider),
        memory_mib=pool.memory_mib,
        millicpus=pool.millicpus,
        pids=pool.pids,
        runtime=runtimes.get_runtime(pool, provider),
        idle_after=settings.IDLE_TIMEOUT,
        last_used_at=now,
        created_at=now,
        slot=slots.choose_free_slot(),
        slot_since=now,
        claim=uuid.uuid4(),
        claimed_by=settings.INSTANCE,
        deadline_at=now + settings.SANDBOX_START_TIMEOUT,
    )
    sandbox.ref = build_name(sandbox.pk, sandbox.incarnation)
    return sandbox


def take_place(pool: Pool, *, ahead: int = 0) -> bool:
    """Count one more sandbox in the pool, if it is not draining and has a free place besides those of `ahead` other requests.

    Returns whether a place was taken. Call this function last in its transaction, because the pool's row stays locked until the
    commit."""
    return sql.execute(TAKE_PLACE_SQL, pool.pk, ahead) > 0


def _take_quota(request: SandboxRequest) -> None:
    """Count one more sandbox for the agent, or raise QuotaExceeded."""
    if sql.execute(TAKE_QUOTA_SQL, request.pool.pk, request.agent_did):
        return
    quota, _ = Quota.objects.get_or_create(
        pool=request.pool, agent_did=request.agent_did, defaults={"most": settings.MAX_SANDBOXES_PER_AGENT or None}
    )
    if not sql.execute(TAKE_QUOTA_SQL, request.pool.pk, request.agent_did):
        raise QuotaExceeded(
            f'{request.agent_did} has {quota.used} sandboxes in the pool "{request.pool}", and its quota is {quota.most}. '
            "None of them is cold. Releasing one of its leases frees a place.",
            limit=quota.most,
        )


def _refuse_if_draining(pool: Pool) -> None:
    if Pool.objects.filter(pk=pool.pk, draining=True).exists():
        raise PoolDraining(f'The pool "{pool}" accepts no new sandboxes: an operator is draining it.')


def set_call_limits(holder: uuid.UUID, limits: CallLimits) -> None:
    """Copy the limits on model calls to the holder's live sandbox. They apply from the next call on.

    Call this function in the transaction that changes the holder's own limits."""
    Sandbox.objects.filter(holder=holder).exclude(state__in=GONE_STATES).update(**limits.columns)


def set_draining(pool: Pool, *, draining: bool, actor: str = "") -> bool:
    """Stop or resume the allocation of new sandboxes in a pool. Existing sandboxes go on and can still be woken.

    Returns whether this call changed the pool."""
    changed = Pool.objects.filter(pk=pool.pk, draining=not draining).update(draining=draining)
    if changed:
        log.info("pool draining" if draining else "pool resumed", pool=pool.name, actor=actor)
    return bool(changed)


def resume_warming(pool: Pool, *, now: datetime, actor: str = "") -> bool:
    """Close the circuit breaker of pre-warming and reset its failure count. The next sweep starts sandboxes again.

    Returns False if the breaker was not open. `warm_error` stays until a start succeeds."""
    closed = Pool.objects.filter(pk=pool.pk, warm_paused_until__gt=now).update(warm_failures=0, warm_paused_until=None)
    if closed:
        log.info("warming resumed", pool=pool.name, actor=actor)
    return bool(closed)

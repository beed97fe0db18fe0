"""Who gets a sandbox. Callers name a holder (a lease's key) and never see a provider. Who sleeps and who goes is in retiring.

Every verb claims with a guarded UPDATE, acts on the provider outside any transaction, and records. Whatever it leaves
half done has a deadline, after which sweeps.py takes the next step."""

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal

import structlog
from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import F, Q, QuerySet

from sandboxes import eviction, providers
from sandboxes.db import sql
from sandboxes.db.clock import clock_from
from sandboxes.egress import slots
from sandboxes.errors import (
    CapacityExhausted,
    PoolDraining,
    QuotaExceeded,
    SandboxBusy,
    SandboxLost,
    SandboxNotHeld,
    SandboxNotReady,
)
from sandboxes.guard import OPEN_GUARD, Guard, HolderTerms
from sandboxes.lifecycle import COLD, WARM, WARMING, advance, checkpoint, insert_warming
from sandboxes.models import ALIVE_STATES, GONE_STATES, Policy, Pool, Quota, Sandbox, TransitionReason
from sandboxes.providers.base import Provider, ProviderError, SandboxSpec
from sandboxes.state import mounts, workspace
from sandboxes.state.workspace import StateLost
from sandboxes.storage.base import StoreError

log = structlog.get_logger(__name__)
POLL_INTERVAL_SECONDS = 0.05  # seconds between two looks at a row that somebody else is moving
MAX_EVICTION_ATTEMPTS = 8  # places that one request tries to free before it is told that the pool is full


@dataclass(frozen=True)
class SandboxRequest:
    """What a holder needs a sandbox for, and what must be in it before the first run."""

    holder: uuid.UUID
    agent_did: str
    environment_id: str
    pool: Pool
    idle_after: timedelta
    files: Mapping[str, bytes] = field(default_factory=dict)  # absolute path in the sandbox -> content
    skill: str = ""  # what /data/skills has to have for it, if the image has it
    memory_mib: int | None = None  # None: the pool's default
    guard: Guard = OPEN_GUARD


class _PoolFull(Exception):
    """No place is free in the pool; rolls the reservation back."""


def find_by_holder(holder: uuid.UUID) -> Sandbox | None:
    """The holder's sandbox, unless it was given up."""
    return sql.find_first(Sandbox, "holder = %s AND state NOT IN ('destroying', 'destroyed')", holder)


def ensure_running(want: SandboxRequest, *, now: datetime, actor: str = "") -> Sandbox:
    """The holder's sandbox, alive: the one it has, woken if it sleeps, or else a new one. Safe to repeat and to call
    from many processes.

    Blocks while a sandbox starts or falls asleep, also when another caller is the one who does it. CapacityExhausted,
    QuotaExceeded and PoolDraining say that there is no place; NotReady that it could not be started; Lost that its
    stored state is gone; Busy that somebody else is still at it after the start timeout."""
    later = clock_from(now)
    patience = now + settings.SANDBOX_START_TIMEOUT
    while True:
        sandbox = find_by_holder(want.holder)
        if sandbox is None or sandbox.state == COLD:
            want.guard.check_affordable()
        if sandbox is None:
            if claimed := claim_warm(want, now=later(), actor=actor):
                return claimed
            if reserved := reserve_place(want, now=later(), actor=actor):
                return start_reserved(reserved, now=later(), actor=actor, files=want.files)
        elif sandbox.lost_at:
            raise SandboxLost()
        elif sandbox.state in ALIVE_STATES:
            sandbox.pool = want.pool
            return sandbox
        elif sandbox.state == COLD and (woken := wake(sandbox, now=later(), actor=actor)):
            return woken
        if later() > patience:
            raise SandboxBusy("Its sandbox is still being started or stored by somebody else.")
        time.sleep(POLL_INTERVAL_SECONDS)


def claim_warm(want: SandboxRequest, *, now: datetime, actor: str = "") -> Sandbox | None:
    """Give the holder a pre-warmed sandbox of its pool. None if there is none, or if the holder has one already."""
    if want.memory_mib not in (None, want.pool.memory_mib):
        return None  # what is ready was started with the pool's
    if not want.pool.warm_target or workspace.find_latest(want.holder):
        return None  # whoever has something stored gets a sandbox with that in it
    try:
        with transaction.atomic(durable=True):
            terms = want.guard.fence()
            policy = _resolve_policy(terms)
            if policy and policy.writable_root:
                return None  # those that were started ahead of demand are sealed
            # tier 1 is warm: so an index has them in this order, however many there are
            ready_made = find_unclaimed(want.pool).filter(tier=1, pool__draining=False).order_by("last_used_at")
            free = ready_made.select_for_update(skip_locked=True, of=("self",))
            pk = free.values_list("pk", flat=True).first()
            if pk is None or (mounts.is_mount_required(want.agent_did) and not mounts.has_mount_directory(pk)):
                return None
            _take_quota(want)
            claimed = advance(
                pk, WARM, WARM, now=now, code=TransitionReason.CLAIMED, actor=actor, guard=Q(holder__isnull=True),
                holder=want.holder, agent_did=want.agent_did, environment_id=want.environment_id,
                idle_after=want.idle_after, last_used_at=now, idle_at=now + want.idle_after, prepared=False,
                excludes=[*terms.excludes], llm_limit=terms.llm_limit, policy=policy,
            )  # fmt: skip
            if not claimed:
                transaction.set_rollback(True)  # the quota was taken
                return None
            Pool.objects.filter(pk=want.pool.pk).update(claimed_warm=F("claimed_warm") + 1)
    except IntegrityError:
        return None  # one live sandbox per holder: another request was first
    log.info("wake", sandbox=str(pk), source="prewarmed", agent=want.agent_did)
    return Sandbox.objects.select_related("pool").get(pk=pk)


def reserve_place(want: SandboxRequest, *, now: datetime, actor: str = "") -> Sandbox | None:
    """Take a place in the pool, freeing one if it must: a row in `warming`. None if this holder has one already."""
    later = clock_from(now)
    for _ in range(MAX_EVICTION_ATTEMPTS):
        try:
            return _insert_reservation(want, now=later(), actor=actor)
        except IntegrityError:
            return None  # one live sandbox per holder: another request was first
        except _PoolFull:
            if not eviction.free_place(want.pool, agent_did=want.agent_did, now=later(), actor=actor):
                break
    raise CapacityExhausted(
        f'All {want.pool.capacity} places of the pool "{want.pool}" are taken and none can be freed now: '
        "what is not running is protected by a guarantee. A lease that ends frees one."
    )


def _insert_reservation(want: SandboxRequest, *, now: datetime, actor: str) -> Sandbox:
    sandbox = _build_sandbox(want.pool, now=now)
    sandbox.holder, sandbox.agent_did, sandbox.environment_id = want.holder, want.agent_did, want.environment_id
    sandbox.idle_after = want.idle_after
    sandbox.memory_mib = want.memory_mib or want.pool.memory_mib
    with transaction.atomic(durable=True):
        terms = want.guard.fence()
        sandbox.excludes, sandbox.llm_limit, sandbox.policy = [*terms.excludes], terms.llm_limit, _resolve_policy(terms)
        insert_warming(sandbox, now=now, code=TransitionReason.REQUESTED, actor=actor)
        _take_quota(want)
        if not take_place(want.pool):
            _refuse_if_draining(want.pool)
            raise _PoolFull
    checkpoint("reserved", sandbox)
    return sandbox


def _resolve_policy(terms: HolderTerms) -> Policy | None:
    """Return the policy to store. The built-in policy is stored as None, so that "sealed" has one representation."""
    return None if terms.policy is None or terms.policy.built_in else terms.policy


def start_warm(pool: Pool, *, now: datetime) -> Sandbox | None:
    """Start one more sandbox that nobody holds yet, unless the pool has its target of them. None if it has, or is full.

    The pool's row is locked while the pending ones are counted, so that any number of sweeps start no more than that."""
    sandbox = _build_sandbox(pool, now=now)
    try:
        with transaction.atomic(durable=True):
            locked = Pool.objects.select_for_update(no_key=True).get(pk=pool.pk)
            if find_unclaimed(locked).filter(state__in=(WARMING, WARM)).count() >= locked.warm_target or not take_place(locked):
                return None
            sandbox.slot = slots.choose_free_slot()  # chosen anew: under the lock no other sweep of this pool chooses the same
            insert_warming(sandbox, now=now, code=TransitionReason.PREWARMED, actor="sweep")
    except IntegrityError:
        return None  # somebody else took its slot: the next sweep tries again
    checkpoint("reserved", sandbox)
    return start_reserved(sandbox, now=now, actor="sweep", files={})


def _build_sandbox(pool: Pool, *, now: datetime) -> Sandbox:
    """A row for a sandbox of this pool that is about to be started."""
    provider = pool.provider or providers.get_default_provider_name()
    sandbox = Sandbox(
        pool=pool,
        provider=provider,
        isolated=providers.get_provider(provider).isolated,
        measured=providers.get_provider(provider).measures_usage,
        image=pool.image or settings.SANDBOX_IMAGE,
        memory_mib=pool.memory_mib,
        millicpus=pool.millicpus,
        pids=pool.pids,
        idle_after=settings.IDLE_TIMEOUT,
        last_used_at=now,
        created_at=now,
        slot=slots.choose_free_slot(),
        claim=uuid.uuid4(),
        claimed_by=settings.INSTANCE,
        deadline_at=now + settings.SANDBOX_START_TIMEOUT,
    )
    sandbox.ref = sandbox.name
    return sandbox


def find_unclaimed(pool: Pool) -> QuerySet[Sandbox]:
    """Sandboxes that were started as this pool now wants them, and that nobody holds."""
    return Sandbox.objects.filter(
        pool=pool, holder__isnull=True, image=pool.image or settings.SANDBOX_IMAGE, memory_mib=pool.memory_mib
    ).exclude(state__in=GONE_STATES)


def take_place(pool: Pool) -> bool:
    """Take one place, in one statement. Last in its transaction: the pool's row is locked from here to the commit."""
    free = Q(used__lt=F("capacity"), draining=False)
    return bool(Pool.objects.filter(free, pk=pool.pk).update(used=F("used") + 1))


def _take_quota(want: SandboxRequest) -> None:
    """Count one more sandbox for this agent, or QuotaExceeded."""
    mine = Quota.objects.filter(pool=want.pool, agent_did=want.agent_did)
    room = Q(most__isnull=True) | Q(used__lt=F("most"))
    if mine.filter(room).update(used=F("used") + 1):
        return
    quota, _ = Quota.objects.get_or_create(
        pool=want.pool, agent_did=want.agent_did, defaults={"most": settings.MAX_SANDBOXES_PER_AGENT or None}
    )
    if not mine.filter(room).update(used=F("used") + 1):
        raise QuotaExceeded(
            f'{want.agent_did} has {quota.used} sandboxes in the pool "{want.pool}" and may have {quota.most}. '
            "Releasing one of its leases frees a place.",
            limit=quota.most,
        )


def _refuse_if_draining(pool: Pool) -> None:
    if Pool.objects.filter(pk=pool.pk, draining=True).exists():
        raise PoolDraining(f'The pool "{pool}" takes nothing new: an operator is draining it.')


def start_reserved(sandbox: Sandbox, *, now: datetime, actor: str = "", files: Mapping[str, bytes]) -> Sandbox:
    """Fill a reserved place: create, wait until commands run, unpack what is stored for its holder or put `files`.

    NotReady if that failed (the place is given up, what is stored stays), Lost if the stored state is nowhere, NotHeld
    if the place was taken away meanwhile."""
    later = clock_from(now)
    provider = providers.get_provider(sandbox.provider)
    try:
        provider.create(build_spec(sandbox))
        checkpoint("created", sandbox)
        provider.wait_ready(sandbox.ref, timeout=settings.SANDBOX_START_TIMEOUT)
        source, prepared = _restore_state(sandbox, provider, files, now=later())
        checkpoint("prepared", sandbox)
    except StateLost as lost:
        eviction.schedule_destroy(
            sandbox.pk, now=later(), code=TransitionReason.STATE_LOST, reason=f"stored state is lost: {lost}", actor=actor
        )
        raise SandboxLost(f"What was stored of this sandbox is gone: {lost}") from lost
    except (ProviderError, StoreError) as failed:
        eviction.schedule_destroy(
            sandbox.pk, now=later(), code=TransitionReason.START_FAILED, reason=f"start failed: {failed}", actor=actor
        )
        log.warning("sandbox start failed", sandbox=str(sandbox.pk), error=str(failed))
        raise SandboxNotReady(f"The sandbox could not be started: {failed}") from failed
    mine = Q(claim=sandbox.claim, incarnation=sandbox.incarnation)
    moment = later()
    woken = sandbox.incarnation > 1 or source != "fresh"
    counted = {f"woken_{source}": F(f"woken_{source}") + 1} if woken else {}
    if not advance(
        sandbox.pk, WARMING, WARM, now=moment, actor=actor, guard=mine,
        code=TransitionReason.READY, reason=f"ready, state: {source}" if woken else "",
        claim=None, deadline_at=None, tries=0, last_error="", source=source, prepared=prepared,
        idle_at=moment + sandbox.idle_after if sandbox.holder else None, **counted,
    ):  # fmt: skip
        # Given up while it was being created: a destroy may have come and gone before there was anything to destroy.
        _discard(provider, sandbox)
        raise SandboxNotHeld("The lease ended while its sandbox was being started.")
    if woken:
        log.info(
            "wake",
            sandbox=str(sandbox.pk),
            source=source,
            agent=sandbox.agent_did,
            seconds=round((moment - now).total_seconds(), 3),
        )
    return Sandbox.objects.select_related("pool").get(pk=sandbox.pk)


def _restore_state(sandbox: Sandbox, provider: Provider, files: Mapping[str, bytes], *, now: datetime) -> tuple[str, bool]:
    """Unpack the holder's newest snapshot, or put `files` where there is none: "local", "cloud" or "fresh", and whether
    the holder's first files are in it."""
    snapshot = workspace.find_latest(sandbox.holder) if sandbox.holder else None
    if snapshot:
        source, used = workspace.hydrate(snapshot, sandbox.ref, provider, now=now)
        return source, workspace.is_own(used)
    put_files(sandbox, provider, files)
    return "fresh", bool(files)


def put_files(sandbox: Sandbox, provider: Provider, files: Mapping[str, bytes]) -> None:
    """Write a holder's first files. Doing it twice is harmless."""
    for path, content in files.items():
        provider.write_file(sandbox.ref, path, content)


def _discard(provider: Provider, sandbox: Sandbox) -> None:
    try:
        provider.destroy(sandbox.ref)
    except ProviderError as failed:  # no row wants it any more, so the orphan sweep will find it
        log.warning("late sandbox left to the orphan sweep", sandbox=str(sandbox.pk), error=str(failed))


def build_spec(sandbox: Sandbox) -> SandboxSpec:
    """What to ask the provider for. The directory of its socket is made here, since it must exist to be mounted."""
    return SandboxSpec(
        name=sandbox.name,
        owner=str(sandbox.pool.owner),
        image=sandbox.image,
        labels={"agent": sandbox.agent_did, "environment": sandbox.environment_id, "sandbox": str(sandbox.pk)},
        memory_mib=sandbox.memory_mib,
        millicpus=sandbox.millicpus,
        pids=sandbox.pids,
        sockets=slots.ensure_slot_directory(sandbox.slot) if sandbox.slot is not None else None,
        data=mounts.prepare_mount_directory(sandbox),
        writable_root=sandbox.rules.writable_root,
    )


def wake(sandbox: Sandbox, *, now: datetime, actor: str = "") -> Sandbox | None:
    """Start the next incarnation of a cold sandbox with its stored state. None if somebody else moved it first."""
    sandbox = Sandbox.objects.select_related("pool", "policy").get(pk=sandbox.pk)
    same = Q(incarnation=sandbox.incarnation, holder=sandbox.holder)
    sandbox.incarnation += 1
    sandbox.ref, sandbox.claim = sandbox.name, uuid.uuid4()
    if sandbox.slot is None:  # it is older than slots are
        Sandbox.objects.filter(pk=sandbox.pk, slot=None).update(slot=(slot := slots.choose_free_slot()))
        sandbox.slot = slot
    if not advance(
        sandbox.pk, COLD, WARMING, now=now, code=TransitionReason.WOKEN, actor=actor, guard=same,
        incarnation=sandbox.incarnation, ref=sandbox.ref, claim=sandbox.claim, claimed_by=settings.INSTANCE,
        deadline_at=now + settings.SANDBOX_START_TIMEOUT, last_used_at=now,
    ):  # fmt: skip
        return None
    checkpoint("wake claimed", sandbox)
    return start_reserved(sandbox, now=now, actor=actor, files={})


def set_llm_limit(holder: uuid.UUID, limit: Decimal | None) -> None:
    """From its next model call on, whatever this holder has may spend so much. Called in the transaction that says so."""
    Sandbox.objects.filter(holder=holder).exclude(state__in=GONE_STATES).update(llm_limit=limit)


def set_draining(pool: Pool, *, draining: bool, actor: str = "") -> bool:
    """Take nothing new into a pool, or take new ones again. Leases in it go on, and their sandboxes still wake."""
    changed = Pool.objects.filter(pk=pool.pk, draining=not draining).update(draining=draining)
    if changed:
        log.info("pool draining" if draining else "pool resumed", pool=pool.name, actor=actor)
    return bool(changed)


def resume_warming(pool: Pool, *, now: datetime, actor: str = "") -> bool:
    """Close the circuit: the next sweep warms up again, with fresh failures to make. False if it was not open.

    warm_error stays until a start succeeds."""
    closed = Pool.objects.filter(pk=pool.pk, warm_paused_until__gt=now).update(warm_failures=0, warm_paused_until=None)
    if closed:
        log.info("warming resumed", pool=pool.name, actor=actor)
    return bool(closed)

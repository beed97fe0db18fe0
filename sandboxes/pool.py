"""Who gets a sandbox and who gives one back. Callers name a holder (a lease's key) and never see a provider.

Every verb claims with a guarded UPDATE, acts on the provider outside any transaction, and records. Whatever it leaves
half done has a deadline, after which sweeps.py takes the next step."""

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import structlog
from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import F, Q

from sandboxes import providers
from sandboxes.errors import Busy, CapacityExhausted, NotHeld, NotReady
from sandboxes.lifecycle import DESTROYED, DESTROYING, WARM, WARMING, advance, begin, step
from sandboxes.models import ALIVE, GONE, Outcome, Pool, Run, Sandbox, State
from sandboxes.moments import backoff, ticking
from sandboxes.providers.base import Missing, Provider, ProviderError, Spec

log = structlog.get_logger(__name__)
POLL = 0.05  # seconds between two looks at a row that somebody else is moving
DESTROY_CLAIM = timedelta(minutes=2)  # a destroy that takes longer is tried by the next sweep as well


@dataclass(frozen=True)
class Want:
    """What a holder needs a sandbox for, and what must be in it before the first run."""

    holder: uuid.UUID
    agent_did: str
    environment_id: str
    pool: Pool
    idle_after: timedelta
    files: Mapping[str, bytes] = field(default_factory=dict)  # absolute path in the sandbox -> content
    fence: Callable[[], object] = bool  # called in the transaction that takes a place; raises if the holder may not


def of(holder: uuid.UUID) -> Sandbox | None:
    """The holder's sandbox, unless it was given up."""
    return Sandbox.objects.select_related("pool").filter(holder=holder).exclude(state__in=GONE).first()


def ready(want: Want, *, now: datetime, actor: str = "") -> Sandbox:
    """The holder's sandbox, alive: the one it has, or else a new one. Safe to repeat and to call from many processes.

    Blocks while a sandbox starts, also when another caller is the one who starts it. CapacityExhausted when the pool
    is full; NotReady when it could not be started; Busy when somebody else is still at it after the start timeout."""
    later = ticking(now)
    patience = now + settings.SANDBOX_START_TIMEOUT
    while True:
        sandbox = of(want.holder)
        if sandbox is None:
            reserved = reserve(want, now=later(), actor=actor)
            if reserved:
                return start(reserved, want, now=later(), actor=actor)
        elif sandbox.state in ALIVE:
            return sandbox
        if later() > patience:
            raise Busy("Its sandbox is still being started by another request.")
        time.sleep(POLL)


def reserve(want: Want, *, now: datetime, actor: str = "") -> Sandbox | None:
    """Take a place in the pool: a row in `warming`. None if this holder has one already. CapacityExhausted."""
    provider = want.pool.provider or providers.default_name()
    sandbox = Sandbox(
        pool=want.pool,
        agent_did=want.agent_did,
        environment_id=want.environment_id,
        holder=want.holder,
        provider=provider,
        isolated=providers.get(provider).isolated,
        image=want.pool.image or settings.SANDBOX_IMAGE,
        memory_mib=want.pool.memory_mib,
        millicpus=want.pool.millicpus,
        pids=want.pool.pids,
        idle_after=want.idle_after,
        last_used_at=now,
        created_at=now,
        claim=uuid.uuid4(),
        claimed_by=settings.INSTANCE,
        deadline_at=now + settings.SANDBOX_START_TIMEOUT,
    )
    sandbox.ref = sandbox.name
    try:
        with transaction.atomic(durable=True):
            want.fence()
            begin(sandbox, now=now, reason="needed", actor=actor)
            if not take_place(want.pool):
                raise CapacityExhausted(f'Every place in the pool "{want.pool}" is taken and none can be freed now.')
    except IntegrityError:
        return None  # one live sandbox per holder: another request was first
    step("reserved", sandbox)
    return sandbox


def take_place(pool: Pool) -> bool:
    """Take one place, in one statement. Last in its transaction: the pool's row is locked from here to the commit."""
    return bool(Pool.objects.filter(pk=pool.pk, used__lt=F("capacity")).update(used=F("used") + 1))


def start(sandbox: Sandbox, want: Want, *, now: datetime, actor: str = "") -> Sandbox:
    """Fill a reserved place: create, wait until commands run, put the files, and call it warm.

    NotReady if that failed (the place is given up), NotHeld if it was taken away meanwhile."""
    later = ticking(now)
    provider = providers.get(sandbox.provider)
    spec = spec_of(sandbox)
    try:
        provider.create(spec)
        step("created", sandbox)
        provider.wait_ready(sandbox.ref, timeout=settings.SANDBOX_START_TIMEOUT)
        for path, content in want.files.items():
            provider.write_file(sandbox.ref, path, content)
        step("prepared", sandbox)
    except ProviderError as failed:
        give_up(sandbox.pk, now=later(), reason=f"start failed: {failed}", actor=actor)
        log.warning("sandbox start failed", sandbox=str(sandbox.pk), error=str(failed))
        raise NotReady(f"The sandbox could not be started: {failed}") from failed
    mine = Q(claim=sandbox.claim, incarnation=sandbox.incarnation)
    if not advance(
        sandbox.pk, WARMING, WARM, now=later(), reason="ready", actor=actor, guard=mine,
        claim=None, deadline_at=None, tries=0, last_error="",
    ):  # fmt: skip
        # Given up while it was being created: a destroy may have come and gone before there was anything to destroy.
        _discard(provider, sandbox)
        raise NotHeld("The lease ended while its sandbox was being started.")
    log.info("sandbox started", sandbox=str(sandbox.pk), agent=sandbox.agent_did, provider=sandbox.provider)
    return Sandbox.objects.select_related("pool").get(pk=sandbox.pk)


def _discard(provider: Provider, sandbox: Sandbox) -> None:
    try:
        provider.destroy(sandbox.ref)
    except ProviderError as failed:  # no row wants it any more, so the orphan sweep will find it
        log.warning("late sandbox left to the orphan sweep", sandbox=str(sandbox.pk), error=str(failed))


def spec_of(sandbox: Sandbox) -> Spec:
    """What to ask the provider for. The directory for its sockets is made here, since it must exist to be mounted."""
    return Spec(
        name=sandbox.name,
        owner=str(sandbox.pool.owner),
        image=sandbox.image,
        labels={"agent": sandbox.agent_did, "environment": sandbox.environment_id, "sandbox": str(sandbox.pk)},
        memory_mib=sandbox.memory_mib,
        millicpus=sandbox.millicpus,
        pids=sandbox.pids,
        sockets=sockets_of(sandbox),
    )


def sockets_of(sandbox: Sandbox) -> Path:
    """The host directory that the sandbox sees as /run/leasehold. Its name is short: a socket's path has 108 bytes."""
    directory: Path = settings.RUNTIME_DIR / sandbox.pk.hex[:16]
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    return directory


def give_up(pk: uuid.UUID, *, now: datetime, reason: str, actor: str = "", guard: Q | None = None, note: str = "") -> bool:
    """From any state to `destroying`, with its open Runs closed as lost. False if it was given up before, or the guard
    does not hold. The provider is not called: `destroy` or the next sweep does that."""
    while (state := Sandbox.objects.values_list("state", flat=True).get(pk=pk)) not in GONE:
        if guard is not None and not Sandbox.objects.filter(guard, pk=pk).exists():
            return False
        with transaction.atomic():
            if advance(
                pk, State(state), DESTROYING, now=now, reason=reason, actor=actor, guard=guard,
                claim=None, deadline_at=now, tries=0,
            ):  # fmt: skip
                Run.objects.filter(sandbox=pk, ended_at__isnull=True).update(
                    ended_at=now, outcome=Outcome.LOST, note=(note or f"Its sandbox was given up: {reason}")[:500]
                )
                return True
    return False


def give_up_held(holder: uuid.UUID, *, now: datetime, reason: str, actor: str = "") -> bool:
    """Give up whatever this holder has. Called in the transaction that ends the lease: both happen, or neither."""
    pks = Sandbox.objects.filter(holder=holder).exclude(state__in=GONE).values_list("pk", flat=True)
    return sum(give_up(pk, now=now, reason=reason, actor=actor) for pk in list(pks)) > 0


def destroy(pk: uuid.UUID, *, now: datetime, actor: str = "") -> bool:
    """Ask the provider to destroy one sandbox in `destroying`, and free its place when it says that it is gone.

    True if it is destroyed now. A failed or unknown answer keeps the place, and the row's next try waits longer each
    time; after LEASEHOLD_DESTROY_TRIES the row goes to quarantine for an operator to look at. Safe to repeat."""
    due = Q(deadline_at__lte=now, quarantined_at__isnull=True)
    claimed = Sandbox.objects.filter(due, pk=pk, state=DESTROYING).update(
        deadline_at=now + DESTROY_CLAIM, claimed_by=settings.INSTANCE
    )
    if not claimed:
        return False
    sandbox = Sandbox.objects.get(pk=pk)
    step("destroy claimed", sandbox)
    try:
        providers.get(sandbox.provider).destroy(sandbox.ref)
    except Missing:
        pass  # gone already
    except ProviderError as failed:
        _postpone(sandbox, failed, now=now)
        return False
    step("destroy answered", sandbox)
    with transaction.atomic():
        gone = advance(
            pk, DESTROYING, DESTROYED, now=now, reason="confirmed gone", actor=actor,
            destroyed_at=now, deadline_at=None, last_error="",
        )  # fmt: skip
        if gone:
            Pool.objects.filter(pk=sandbox.pool_id).update(used=F("used") - 1)
    return gone


def retry_destroy(pk: uuid.UUID, *, now: datetime) -> bool:
    """Out of quarantine: try again at the next sweep, with fresh tries. False if it is not in quarantine."""
    return bool(
        Sandbox.objects.filter(pk=pk, state=DESTROYING, quarantined_at__isnull=False).update(
            quarantined_at=None, tries=0, deadline_at=now
        )
    )


def _postpone(sandbox: Sandbox, failed: Exception, *, now: datetime) -> None:
    tries = sandbox.tries + 1
    given_up = tries >= settings.DESTROY_TRIES
    Sandbox.objects.filter(pk=sandbox.pk, state=DESTROYING).update(
        tries=tries,
        deadline_at=now + backoff(tries),
        last_error=str(failed)[:2000],
        quarantined_at=now if given_up else None,
    )
    log.error("destroy failed", sandbox=str(sandbox.pk), tries=tries, quarantined=given_up, error=str(failed))

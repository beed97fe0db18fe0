"""One lease: acquire, renew, release, end. The row is the only authority, and its id is the fence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from uuid import UUID, uuid4

import structlog
from django.conf import settings
from django.db import IntegrityError, transaction

from billing import budgets
from leases.errors import Conflict, InvalidRequest, LeaseEnded
from leases.models import Agent, EnvironmentType, Lease, LeaseEvent, LeaseStatus
from sandboxes import destruction, pool
from sandboxes.db import durations, sql
from sandboxes.db.clock import format_timestamp
from sandboxes.models import Pool
from sandboxes.models.webhooks import EventType
from sandboxes.webhooks import outbox

log = structlog.get_logger(__name__)
SECONDS_PER_MINUTE = 60
# Statuses are literals here: only then does PostgreSQL use the partial indexes on them in a prepared statement.
ACTIVE_LEASE_SQL = "agent_did = %s AND environment_id = %s AND status = 'active'"
RENEW_SQL = (
    "expires_at = %s, expires_minute = %s, last_activity_at = %s WHERE id = %s AND status = 'active' "
    "AND expires_at > %s AND last_activity_at <= %s AND expires_at <= %s"
)


@dataclass(frozen=True)
class LeaseRequest:
    """What an agent asks for. None means what its environment type says."""

    agent_did: str
    environment_id: str
    environment_type: str
    ttl: timedelta | None = None
    max_ttl: timedelta | None = None
    sleep_after: timedelta | None = None
    expiry_conditions: Sequence[str] | None = None
    pool: str = ""
    key_id: str = ""  # of the API key that asks, if one does: it may have budgets
    id: UUID | None = None  # of the lease, if it is new; used for one before, no other gets it


def compute_expires_at(*, renewed_at: datetime, ttl: timedelta, max_expires_at: datetime) -> datetime:
    """When a lease ends by itself: the earliest of its clocks. Everything that writes expires_at asks here."""
    return min(renewed_at + ttl, max_expires_at)


def find_elapsed_clock(lease: Lease, now: datetime) -> str:
    """The clock that has run out, "" if none has. A lease is over at its end even before a sweep has seen it."""
    if now < lease.expires_at:
        return ""
    return "max_ttl" if lease.expires_at >= lease.max_expires_at else "ttl"


def to_epoch_minute(moment: datetime) -> int:
    return int(moment.timestamp()) // SECONDS_PER_MINUTE


def acquire(ask: LeaseRequest, *, now: datetime, actor: str = "", admit: Callable[[], object] = bool) -> tuple[Lease, bool]:
    """The active lease of this agent in this environment, and whether this call granted it.

    Held already: the same lease, unchanged. Invalid names the field; Conflict when it is held for another type;
    BudgetExhausted when there is no room for a new one.
    `admit` is called in the transaction that grants a new lease, as its last act; it may raise."""
    for _ in range(5):
        held = sql.find_first(Lease, ACTIVE_LEASE_SQL, ask.agent_did, ask.environment_id)
        if held and not find_elapsed_clock(held, now):
            if held.environment_type_id != ask.environment_type:
                raise Conflict(
                    f'This agent holds a lease of type "{held.environment_type_id}" in this environment.',
                    field="environment_type",
                )
            return held, False
        try:
            with transaction.atomic(durable=True):
                if held:  # over, and no sweep has come by yet
                    end(held.pk, reason=find_elapsed_clock(held, now), now=now, actor="acquire")
                lease = _grant_lease(ask, now=now, actor=actor)
                admit()
                return lease, True
        except IntegrityError:
            continue  # a rival was granted it between our two looks: read theirs
    raise Conflict("This lease is being acquired and released at the same time, over and over.")


def _grant_lease(ask: LeaseRequest, *, now: datetime, actor: str) -> Lease:
    kind = sql.find_first(EnvironmentType, "name = %s", ask.environment_type)
    if kind is None:
        known = ", ".join(EnvironmentType.objects.values_list("name", flat=True))
        raise InvalidRequest("environment_type", f"There is no such environment type. Known: {known}.")
    max_ttl = ask.max_ttl or kind.max_ttl
    if max_ttl > kind.max_ttl:
        raise InvalidRequest("max_ttl_seconds", f"At most {kind.max_ttl.total_seconds():.0f} for this environment type.")
    if ask.ttl and ask.ttl > max_ttl:
        raise InvalidRequest("ttl_seconds", f"At most {max_ttl.total_seconds():.0f}, which is this lease's max_ttl.")
    ttl = ask.ttl or min(kind.ttl, max_ttl)
    latest = now + max_ttl
    expires_at = compute_expires_at(renewed_at=now, ttl=ttl, max_expires_at=latest)
    conditions = kind.expiry_conditions if ask.expiry_conditions is None else ask.expiry_conditions
    if sql.find_first(Agent, "did = %s", ask.agent_did) is None:
        Agent.objects.get_or_create(did=ask.agent_did)
    lease = Lease.objects.create(
        id=ask.id or uuid4(),
        agent_did=ask.agent_did,
        environment_id=ask.environment_id,
        environment_type=kind,
        llm_limit=kind.llm_limit,
        pool=_find_pool(ask, kind),
        leased_at=now,
        last_activity_at=now,
        ttl=ttl,
        expires_at=expires_at,
        expires_minute=to_epoch_minute(expires_at),
        max_expires_at=latest,
        sleep_after=ask.sleep_after or _resolve_sleep_after(kind),
        expiry_conditions=list(conditions),
    )
    LeaseEvent.objects.create(lease=lease, at=now, kind="granted", actor=actor)
    budgets.open_tab(lease.pk, agent_did=ask.agent_did, environment_type=ask.environment_type, key_id=ask.key_id, now=now)
    return lease


def _find_pool(ask: LeaseRequest, kind: EnvironmentType) -> Pool:
    if not ask.pool and kind.pool:
        return kind.pool
    found = sql.find_first(Pool, "name = %s", ask.pool or "default")
    if found is None:
        raise InvalidRequest("pool", "There is no such pool.")
    return found


def _resolve_sleep_after(kind: EnvironmentType) -> timedelta:
    return durations.parse_duration(kind.sleep_after) if kind.sleep_after else settings.SANDBOX_SLEEP_AFTER


def require_active(pk: UUID, *, now: datetime) -> Lease:
    """The lease, active and within its clocks; LeaseEnded says why it is not, Lease.DoesNotExist that there is none."""
    lease = sql.find_first(Lease, "id = %s", pk)
    if lease is None:
        raise Lease.DoesNotExist
    if over := lease.end_reason or find_elapsed_clock(lease, now):
        raise build_ended_error(lease, over)
    return lease


def build_ended_error(lease: Lease, reason: str) -> LeaseEnded:
    """The error that tells a late caller when and why its lease ended."""
    at = lease.ended_at or lease.expires_at
    return LeaseEnded(f"The lease ended ({reason}).", end_reason=reason, ended_at=at)


def apply_elapsed_clock(lease: Lease, now: datetime) -> Lease:
    """The lease as it stands now, for showing: ended once its clock has run out, also before a sweep has written so."""
    if lease.status == LeaseStatus.ACTIVE and (over := find_elapsed_clock(lease, now)):
        lease.status, lease.end_reason, lease.ended_at = LeaseStatus.EXPIRED, over, lease.expires_at
    return lease


def renew(lease: Lease, *, now: datetime) -> datetime:
    """Push the end to `ttl` from now, never past max_expires_at and never back. The new end; LeaseEnded if it is over.

    One guarded UPDATE. A renewal that arrives late cannot shorten what a later one has granted."""
    until = compute_expires_at(renewed_at=now, ttl=lease.ttl, max_expires_at=lease.max_expires_at)
    renewed = sql.update(Lease, RENEW_SQL, until, to_epoch_minute(until), now, lease.pk, now, now, until)
    return until if renewed else require_active(lease.pk, now=now).expires_at


def release(pk: UUID, *, now: datetime, actor: str = "") -> Lease:
    """The agent is done. Releasing an ended lease changes nothing and is no error."""
    # What has elapsed ended then, and why: nothing can renew it any more, so reading first is safe.
    over = find_elapsed_clock(Lease.objects.get(pk=pk), now)
    with transaction.atomic(durable=True):
        end(pk, reason=over or "released", now=now, actor=actor)
    return Lease.objects.select_related("environment_type", "pool").get(pk=pk)


def end(pk: UUID, *, reason: str, now: datetime, actor: str = "", why: str = "") -> bool:
    """End one active lease and give up its sandbox, in one transaction. False if it had ended before.

    From here on nothing can be done for this lease; the sandbox is destroyed by the next sweep, which is woken."""
    with transaction.atomic():
        ended_now = Lease.objects.filter(pk=pk, status=LeaseStatus.ACTIVE).update(
            status=LeaseStatus.EXPIRED, ended_at=now, end_reason=reason, end_detail=why[:500]
        )
        if not ended_now:
            return False
        LeaseEvent.objects.create(lease_id=pk, at=now, kind="ended", actor=actor, reason=f"{reason}: {why}" if why else reason)
        budgets.close_tab(pk, now=now)
        destruction.schedule_destroy_by_holder(pk, now=now, reason=f"lease ended: {reason}", actor=actor)
        _publish_lease_ended(pk, now)
    log.info("lease ended", lease=str(pk), reason=reason)
    return True


def _publish_lease_ended(pk: UUID, now: datetime) -> None:
    lease = sql.find_first(Lease, "id = %s", pk)
    assert lease  # our UPDATE locks it
    said = {
        "lease_id": str(pk),
        "agent_did": lease.agent_did,
        "environment_id": lease.environment_id,
        "environment_type": lease.environment_type_id,
        "end_reason": lease.end_reason,
        "leased_at": format_timestamp(lease.leased_at),
        "ended_at": format_timestamp(now),
    }
    outbox.enqueue_event(EventType.LEASE_ENDED, key=str(pk), payload=said, now=now)


def set_spend_limit(pk: UUID, limit: Decimal | None, *, now: datetime, actor: str = "", why: str = "") -> bool:
    """From its next model call on, an active lease may spend so many USD on them; None: any. False if it has ended, or had
    that limit. The sandbox that it has now follows at once, and one that it gets later is given the lease's."""
    with transaction.atomic():
        # Whoever gives it a sandbox locks this row, too, and reads the limit after that.
        lease = Lease.objects.select_for_update(no_key=True, of=("self",)).filter(pk=pk, status=LeaseStatus.ACTIVE).first()
        if lease is None or lease.llm_limit == limit:
            return False
        Lease.objects.filter(pk=pk).update(llm_limit=limit)
        said = f"{_format_usd(limit)} instead of {_format_usd(lease.llm_limit)}"
        LeaseEvent.objects.create(
            lease=lease, at=now, kind="spend_limit", actor=actor, reason=f"{said}: {why}" if why else said
        )
        pool.set_llm_limit(pk, limit)
    return True


def _format_usd(limit: Decimal | None) -> str:
    return "no limit" if limit is None else f"{limit.normalize():f} USD"

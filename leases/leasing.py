"""Lifecycle of one lease: acquire, renew, release, end. The row is the only authority, and its id is the fence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID, uuid4

import structlog
from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import Model

from billing import budgets
from billing.models import Tab
from leases import failed_by
from leases.allow_lists import AllowLists
from leases.environments.entry import IS_PARTICIPANT_SQL, Entry, EntryChanged
from leases.environments.models import Environment
from leases.errors import Conflict, InvalidRequest, LeaseEnded, NotAllowed
from leases.models import Agent, EnvironmentType, Lease, LeaseEvent, LeaseStatus
from leases.placement import TYPE_HAS_ALTERNATIVES_SQL, list_pools
from leases.projects.models import DEFAULT_PROJECT_ID, Project
from leases.resources import Resources, require_allowed
from sandboxes import destruction, stop_reasons
from sandboxes.db import dialect, durations, sql
from sandboxes.db.clock import format_timestamp
from sandboxes.models import Policy, Pool
from sandboxes.models.webhooks import EventType
from sandboxes.redaction.texts import omit_answers
from sandboxes.webhooks import outbox

log = structlog.get_logger(__name__)
SECONDS_PER_MINUTE = 60
MAX_ACQUIRE_ATTEMPTS = 5
CONCURRENT_ACQUIRES = "The lease is repeatedly acquired and released by concurrent requests. Try again."
# The status is a literal, not a parameter: PostgreSQL uses a partial index in a prepared statement only with the literal.
ACTIVE_LEASE_SQL = "agent_did = %s AND environment_id = %s AND status = 'active'"
BASIS_FLAGS = [IS_PARTICIPANT_SQL, budgets.ANY_HARD_SQL, TYPE_HAS_ALTERNATIVES_SQL]
BASIS_JOINS: list[tuple[type[Model], str]] = [
    (Lease, "leases_lease.agent_did = %s AND leases_lease.environment_id = %s AND leases_lease.status = 'active'"),
    (Environment, "leases_environment.id = %s"),
    (Agent, "leases_agent.did = %s"),
    (Project, "leases_project.id = COALESCE(leases_environment.project_id, leases_agent.project_id, %s)"),
    (Policy, "sandboxes_policy.id = leases_environmenttype.policy_id"),
]
RENEW_SQL = (
    "expires_at = %s, expires_minute = %s, last_activity_at = %s WHERE id = %s AND status = 'active' "
    "AND expires_at > %s AND last_activity_at <= %s AND expires_at <= %s"
)


@dataclass(frozen=True)
class LeaseRequest:
    """Parameters of a new lease. None selects the value of the environment type."""

    agent_did: str
    environment_id: str
    environment_type: str
    ttl: timedelta | None = None
    max_ttl: timedelta | None = None
    sleep_after: timedelta | None = None
    auto_stop: timedelta | None = None  # of the sandbox at its vendor; zero: never
    auto_delete: timedelta | None = None  # of the sandbox at its vendor; zero: never
    expiry_conditions: Sequence[str] | None = None
    pool: str = ""
    resources: Resources | None = None  # of the sandboxes; None: those of the pool
    key_id: str = ""  # API key of the caller, "" without one; budgets may apply to the key
    allowed: AllowLists | None = None  # of the caller's API key; None: an operator's command, without restriction
    llm_enabled: bool = True  # False: model calls of the sandboxes are refused
    id: UUID | None = None  # key of the new lease, which must be unused; None generates one


@dataclass(frozen=True)
class GrantBasis:
    """Rows that decide about a request for a lease, read in one query."""

    held: Lease | None  # the agent's active lease in the environment; a clock of it may have elapsed
    environment_type: EnvironmentType | None  # of the request, with its policy
    pool: Pool | None
    entry: Entry | None  # None only without an environment type
    project: str = ""  # name
    has_budgets: bool = False  # a hard budget exists, and may apply to the lease
    has_alternatives: bool = False  # the environment type lists further pools


def compute_expires_at(*, renewed_at: datetime, ttl: timedelta, max_expires_at: datetime) -> datetime:
    """Return the end of a lease by its own clocks: the earlier of TTL and max TTL. The only source of `expires_at`."""
    return min(renewed_at + ttl, max_expires_at)


def find_elapsed_clock(lease: Lease, now: datetime) -> str:
    """Return the clock that has elapsed, "ttl" or "max_ttl", or "". A lease ends at expires_at, swept or not."""
    if now < lease.expires_at:
        return ""
    return "max_ttl" if lease.expires_at >= lease.max_expires_at else "ttl"


def to_epoch_minute(moment: datetime) -> int:
    return int(moment.timestamp()) // SECONDS_PER_MINUTE


def acquire(request: LeaseRequest, *, now: datetime, actor: str = "", admit: Callable[[], object] = bool) -> tuple[Lease, bool]:
    """Return the active lease of an agent in an environment, and whether this call granted it. Idempotent.

    A lease that is already held is returned unchanged. `admit` is called last in the transaction that grants a new lease;
    an exception from it rolls the grant back.
    Raise InvalidRequest or NotAllowed naming the field, Conflict if the held lease or the environment has another type,
    EnvironmentNotFound if the agent may not enter the environment, EnvironmentEnded,
    BudgetExhausted if a budget leaves no room for a new lease."""
    for _ in range(MAX_ACQUIRE_ATTEMPTS):
        basis = read_basis(request)
        if basis.held and not check_held(request, basis.held, now=now):
            return basis.held, False
        try:
            with transaction.atomic(durable=True):
                return grant(request, basis, now=now, actor=actor, admit=admit), True
        except EntryChanged:
            continue  # the next attempt reads the rows again
        except IntegrityError as error:
            dialect.raise_unless_unique(error)
            continue  # a concurrent call granted it after the SELECT: return that lease
    raise Conflict(CONCURRENT_ACQUIRES)


def read_basis(request: LeaseRequest) -> GrantBasis:
    """Read the rows that decide about a request. Plan: lookups in unique indexes, and one in a partial index of budgets."""
    pool_condition, values = _build_pool_condition(request)
    environment_type, joined, flags = sql.find_joined(
        EnvironmentType, [*BASIS_JOINS, (Pool, pool_condition)], BASIS_FLAGS,
        "leases_environmenttype.name = %s",
        request.environment_id, request.agent_did, request.agent_did, request.environment_id, request.environment_id,
        request.agent_did, request.allowed.project_id if request.allowed else DEFAULT_PROJECT_ID, *values,
        request.environment_type,
    )  # fmt: skip
    if environment_type is None:  # an unknown type: the agent may hold a lease of another one
        held = sql.find_first(Lease, ACTIVE_LEASE_SQL, request.agent_did, request.environment_id)
        return GrantBasis(held, None, None, None)
    held, environment, agent, project, policy, pool = joined
    environment_type.policy = policy
    is_participant, has_budgets, has_alternatives = map(bool, flags)
    found = Entry(request.environment_id, request.agent_did, environment, agent, is_participant, request.allowed)
    return GrantBasis(held, environment_type, pool, found, project.name, has_budgets, has_alternatives)


def check_held(request: LeaseRequest, held: Lease, *, now: datetime) -> str:
    """Return the elapsed clock of the agent's active lease in the environment; "" if the lease goes on.

    Raise Conflict if it goes on and has another environment type."""
    elapsed = find_elapsed_clock(held, now)
    if not elapsed and held.environment_type_id != request.environment_type:
        raise Conflict(
            f'This agent holds a lease of type "{held.environment_type_id}" in this environment.', field="environment_type"
        )
    return elapsed


def find_held_lease(request: LeaseRequest, *, now: datetime) -> Lease | None:
    """Return the agent's active lease in the environment, unless a clock of it has elapsed. Raise the error of check_held."""
    held = sql.find_first(Lease, ACTIVE_LEASE_SQL, request.agent_did, request.environment_id)
    return None if held is None or check_held(request, held, now=now) else held


def grant(
    request: LeaseRequest, basis: GrantBasis, *, now: datetime, actor: str = "", admit: Callable[[], object] = bool
) -> Lease:
    """Grant a lease in the caller's transaction, and end the elapsed one that `basis` names, if there is one.

    Raise IntegrityError if the agent holds a lease in the environment or a row of `basis` was changed, and the errors of
    `acquire`."""
    lease = build_lease(request, basis, now=now)
    assert basis.entry  # build_lease has checked it
    basis.entry.enter(lease.environment_type, now=now, actor=actor)  # before the leases, see leases.environments.lifecycle
    if basis.held:
        end(basis.held.pk, reason=find_elapsed_clock(basis.held, now), now=now, actor="acquire")
    tab = Tab(
        holder=lease.pk, agent_did=request.agent_did, environment_type=request.environment_type, key_id=request.key_id,
        project=basis.project, opened_at=now,
    )  # fmt: skip
    rows: list[Model] = [lease, LeaseEvent(lease=lease, at=now, kind="granted", actor=actor), tab]
    if basis.has_budgets:
        # The lease first: a concurrent grant of the same lease violates its constraint before it finds no room in a budget.
        sql.insert_all(rows[:1])
        budgets.lock_for_grant(tab, now=now)
        sql.insert_all(rows[1:])
    else:
        sql.insert_all(rows)
    admit()
    return lease


def build_lease(request: LeaseRequest, basis: GrantBasis, *, now: datetime) -> Lease:
    """Build a new lease without saving it. Raise InvalidRequest or NotAllowed, naming the field, and the errors of an entry."""
    environment_type, pool_row = require_placement(request, basis)
    assert basis.entry  # read with the environment type
    basis.entry.check(environment_type)
    resources = request.resources or Resources()
    max_ttl = request.max_ttl or environment_type.max_ttl
    if max_ttl > environment_type.max_ttl:
        raise InvalidRequest(
            "max_ttl_seconds",
            f"Must be at most {environment_type.max_ttl.total_seconds():.0f} seconds for this environment type.",
        )
    if request.ttl and request.ttl > max_ttl:
        raise InvalidRequest(
            "ttl_seconds", f"Must be at most {max_ttl.total_seconds():.0f} seconds, the max_ttl of this lease."
        )
    ttl = request.ttl or min(environment_type.ttl, max_ttl)
    max_expires_at = now + max_ttl
    expires_at = compute_expires_at(renewed_at=now, ttl=ttl, max_expires_at=max_expires_at)
    conditions = environment_type.expiry_conditions if request.expiry_conditions is None else request.expiry_conditions
    return Lease(
        id=request.id or uuid4(),
        agent_did=request.agent_did,
        environment_id=request.environment_id,
        environment_type=environment_type,
        llm_limit=environment_type.llm_limit,
        llm_token_limit=environment_type.llm_token_limit,
        llm_enabled=request.llm_enabled,
        pool=pool_row,
        pools=[request.pool] if request.pool else [*request.allowed.pools] if request.allowed else [],
        memory_mib=resources.memory_mib,
        millicpus=resources.millicpus,
        disk_mib=resources.disk_mib,
        gpus=resources.gpus,
        gpu_type=resources.gpu_type,
        size=resources.size,
        image=resources.image,
        leased_at=now,
        last_activity_at=now,
        ttl=ttl,
        expires_at=expires_at,
        expires_minute=to_epoch_minute(expires_at),
        max_expires_at=max_expires_at,
        sleep_after=request.sleep_after or _resolve_sleep_after(environment_type),
        auto_stop=environment_type.auto_stop if request.auto_stop is None else request.auto_stop,
        auto_delete=environment_type.auto_delete if request.auto_delete is None else request.auto_delete,
        expiry_conditions=list(conditions),
    )


def find_type_and_pool(request: LeaseRequest) -> tuple[EnvironmentType, Pool]:
    """Return the environment type and the pool of a new lease. Raise InvalidRequest or NotAllowed, naming the field."""
    return require_placement(request, read_basis(request))


def require_placement(request: LeaseRequest, basis: GrantBasis) -> tuple[EnvironmentType, Pool]:
    """Like find_type_and_pool, of rows that were just read."""
    environment_type, pool_row = _require_type_and_pool(request, basis)
    if request.resources and request.resources != Resources():
        pools = _list_permitted_pools(request, basis, pool_row)
        limits = request.allowed.limits if request.allowed else None
        require_allowed(pools, request.resources, key=limits, environment_type=environment_type)
    return environment_type, pool_row


def _require_type_and_pool(request: LeaseRequest, basis: GrantBasis) -> tuple[EnvironmentType, Pool]:
    environment_type, pool_row = basis.environment_type, basis.pool
    if environment_type is None:
        known = ", ".join(
            row.name for row in EnvironmentType.objects.all()
            if request.allowed is None or request.allowed.allows_environment_type(row)
        )  # fmt: skip
        raise InvalidRequest("environment_type", f"There is no such environment type. Known: {known}.")
    if request.allowed and not request.allowed.allows_environment_type(environment_type):
        raise NotAllowed("This API key may not use that environment type.", field="environment_type")
    if pool_row is None:
        raise InvalidRequest("pool", "There is no such pool.")
    if request.allowed and not request.allowed.allows_placement(pool_row, environment_type):
        pool_row = None if request.pool or not basis.has_alternatives else _find_allowed_pool(request.allowed, environment_type)
        if pool_row is None:
            raise NotAllowed("This API key may not use that pool.", field="pool")
    return environment_type, pool_row


def _list_permitted_pools(request: LeaseRequest, basis: GrantBasis, first: Pool) -> list[Pool]:
    """Return the pools in which the sandbox of a new lease may be started."""
    if request.pool or not basis.has_alternatives or basis.environment_type is None:
        return [first]
    names = request.allowed.pools if request.allowed else ()
    return [pool for pool in list_pools(basis.environment_type) if not names or pool.name in names]


def _find_allowed_pool(allowed: AllowLists, environment_type: EnvironmentType) -> Pool | None:
    return next((pool for pool in list_pools(environment_type) if pool.name in allowed.pools), None)


def _build_pool_condition(request: LeaseRequest) -> tuple[str, list[str]]:
    """Return the condition, and its parameters, of the pool that the request names, or else the type's, or else "default"."""
    if request.pool:
        return "sandboxes_pool.name = %s", [request.pool]
    of_type = "sandboxes_pool.id = leases_environmenttype.pool_id"
    return f"{of_type} OR (leases_environmenttype.pool_id IS NULL AND sandboxes_pool.name = 'default')", []


def _resolve_sleep_after(environment_type: EnvironmentType) -> timedelta:
    if environment_type.sleep_after:
        return durations.parse_duration(environment_type.sleep_after)
    return settings.SANDBOX_SLEEP_AFTER or settings.IDLE_TIMEOUT


def require_active(pk: UUID, *, now: datetime) -> Lease:
    """Return a lease that is active and within its clocks. Raise LeaseEnded with the end reason, or Lease.DoesNotExist."""
    return check_active(sql.find_first(Lease, "id = %s", pk), now=now)


def check_active(lease: Lease | None, *, now: datetime) -> Lease:
    """Like require_active, for a lease that was just read; None if there is none."""
    if lease is None:
        raise Lease.DoesNotExist
    if elapsed := lease.end_reason or find_elapsed_clock(lease, now):
        raise build_ended_error(lease, elapsed)
    return lease


def build_ended_error(lease: Lease, reason: str) -> LeaseEnded:
    """Build the error for a call on an ended lease, with the end reason and time, and the reason of its sandbox's stop."""
    at = lease.ended_at or lease.expires_at
    return LeaseEnded(f"The lease ended ({reason}).", end_reason=reason, ended_at=at, **_describe_last_stop(lease.pk))


def _describe_last_stop(pk: UUID) -> dict[str, str | None]:
    """Describe the newest stop of a sandbox of this lease for clients. The values are None if there was none."""
    stop = stop_reasons.find_last_stop(pk)
    return {
        "sandbox_reason": stop.reason.value if stop else None,
        "sandbox_detail": omit_answers(stop.detail) if stop else None,
    }


def apply_elapsed_clock(lease: Lease, now: datetime) -> Lease:
    """Mark a lease past its clocks as expired in memory, for display before a sweep has recorded it. Return the lease."""
    if lease.status == LeaseStatus.ACTIVE and (elapsed := find_elapsed_clock(lease, now)):
        lease.status, lease.end_reason, lease.ended_at = LeaseStatus.EXPIRED, elapsed, lease.expires_at
    return lease


def renew(lease: Lease, *, now: datetime, lasts: timedelta = timedelta(0)) -> datetime:
    """Extend a lease to `ttl` or `lasts` from now, whichever is longer, at most to max_expires_at. Return the new end.

    Raise LeaseEnded if the lease has ended. One guarded UPDATE: a renewal that arrives late cannot shorten a later one."""
    until, renewal = _build_renewal(lease, now=now, lasts=lasts)
    return until if sql.execute(renewal.text, *renewal.values) else require_active(lease.pk, now=now).expires_at


def build_renewal(lease: Lease, *, now: datetime) -> sql.Statement:
    """Build the guarded UPDATE of `renew`, to be executed with another statement. It changes no row of an ended lease."""
    return _build_renewal(lease, now=now)[1]


def _build_renewal(lease: Lease, *, now: datetime, lasts: timedelta = timedelta(0)) -> tuple[datetime, sql.Statement]:
    until = compute_expires_at(renewed_at=now, ttl=max(lease.ttl, lasts), max_expires_at=lease.max_expires_at)
    values = (until, to_epoch_minute(until), now, lease.pk, now, now, until)
    return until, sql.Statement(f"UPDATE leases_lease SET {RENEW_SQL}", values)  # noqa: S608 - no user input


def release(pk: UUID, *, now: datetime, actor: str = "") -> Lease:
    """End a lease at its agent's request and return the lease. Idempotent: an ended lease is returned unchanged."""
    # An elapsed lease keeps its clock as the end reason. It cannot be renewed any more, so reading before the UPDATE is safe.
    elapsed = find_elapsed_clock(Lease.objects.get(pk=pk), now)
    with transaction.atomic(durable=True):
        end(pk, reason=elapsed or "released", now=now, actor=actor)
    return Lease.objects.select_related("environment_type", "pool").get(pk=pk)


def end(pk: UUID, *, reason: str, now: datetime, actor: str = "", detail: str = "", discard: bool = False) -> bool:
    """End an active lease and schedule its sandbox for destruction, in one transaction. Return False if it had already ended.

    Every later call for this lease fails. The next `reclaim` sweep stores the last state of the sandbox, unless it is to be
    discarded, and destroys the sandbox."""
    with transaction.atomic(savepoint=False):
        ended_now = Lease.objects.filter(pk=pk, status=LeaseStatus.ACTIVE).update(
            status=LeaseStatus.EXPIRED, ended_at=now, end_reason=reason, end_detail=detail
        )
        if not ended_now:
            return False
        LeaseEvent.objects.create(
            lease_id=pk, at=now, kind="ended", actor=actor, reason=f"{reason}: {detail}" if detail else reason
        )
        budgets.close_tab(pk, now=now)
        destruction.schedule_destroy_by_holder(
            pk, now=now, reason=f"lease ended: {reason}", actor=actor, discard=discard,
            stop_reason=failed_by.get_stop_reason(reason),
        )  # fmt: skip
        _publish_lease_ended(pk, now)
    log.info("lease ended", lease=str(pk), reason=reason)
    return True


def discard(pk: UUID, *, now: datetime, actor: str = "", detail: str = "") -> bool:
    """Have the sandbox of a lease destroyed without storing its last state. An active lease ends with the reason "operator".

    Also releases the sandbox of an ended lease from quarantine. Return False if neither remains."""
    with transaction.atomic():
        return end(pk, reason="operator", now=now, actor=actor, detail=detail, discard=True) or destruction.discard_by_holder(
            pk, now=now, reason=f"discarded: {detail}" if detail else "", actor=actor
        )


def _publish_lease_ended(pk: UUID, now: datetime) -> None:
    lease = sql.find_first(Lease, "id = %s", pk)
    assert lease  # the UPDATE in this transaction locks the row
    payload = {
        "lease_id": str(pk),
        "agent_did": lease.agent_did,
        "environment_id": lease.environment_id,
        "environment_type": lease.environment_type_id,
        "end_reason": lease.end_reason,
        "failed_by": failed_by.classify_end_reason(lease.end_reason),
        "leased_at": format_timestamp(lease.leased_at),
        "ended_at": format_timestamp(now),
        **_describe_last_stop(pk),
    }
    outbox.enqueue_event(EventType.LEASE_ENDED, key=str(pk), payload=payload, now=now)

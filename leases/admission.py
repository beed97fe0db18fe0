"""Admission of leases to a pool: grant the lease in the transaction that takes its place, if need be after a wait in the queue.

Before that transaction nothing but the row in the queue exists. A client that goes away while it waits therefore holds neither
a lease nor a place nor a budget's reservation. Its row expires within sandboxes.pool.admission_queue.ABANDONED_AFTER. A call
that fails after that transaction ends the lease that it granted: no client has learned the lease's id."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import NamedTuple
from uuid import UUID, uuid4

from django.db import IntegrityError, transaction

from leases import execution, leasing
from leases.environments.entry import EntryChanged
from leases.errors import Conflict
from leases.execution import LeaseClaim
from leases.guard import LeaseGuard, build_terms
from leases.leasing import GrantBasis, LeaseRequest
from leases.models import Lease
from sandboxes import eviction
from sandboxes.claims import KILL_GRACE, hold
from sandboxes.db import dialect, sql
from sandboxes.db.clock import Clock, clock_from
from sandboxes.db.connection_errors import RetriesExhausted, retry_connection_errors
from sandboxes.errors import CapacityExhausted, CapacityPending, TooManyLongCalls
from sandboxes.guard import HolderTerms
from sandboxes.lifecycle import checkpoint
from sandboxes.long_calls import WAITING_CALLS, is_shutting_down
from sandboxes.models import Pool, Run, Sandbox
from sandboxes.pool import admission_queue, allocation
from sandboxes.pool.admission_queue import ABANDONED_AFTER, RETRY_AFTER_SECONDS, Position

# Between two reads of the queue by one waiting request. A place is held for minutes, so a second is short, and a web process
# with its few waiting requests reads some rows a second.
POLL_INTERVAL_SECONDS = 1.0
RENEW_INTERVAL = ABANDONED_AFTER / 3
JOIN_ARGV = ["join"]  # of the operation with which a join writes the first files into a pre-warmed sandbox

Sleep = Callable[[float], object]


class Admission(NamedTuple):
    """Lease with a started sandbox."""

    lease: Lease
    is_new: bool  # this call granted the lease
    sandbox: Sandbox | None  # None: destroyed since its start


class _LeaseHeld(Exception):
    """A concurrent request has granted the lease. Rolls this grant back."""


@dataclass(frozen=True, kw_only=True)
class _GrantingGuard(LeaseGuard):
    """Guard that grants its lease when the pool locks it, in the transaction that takes a place.

    The lease exists if and only if that transaction commits."""

    request: LeaseRequest
    actor: str
    admit: Callable[[], object]
    just_read: list[GrantBasis]  # serves the first transaction; a later one, after an eviction, reads the rows again

    def fence(self) -> HolderTerms:
        now = self.clock()
        basis = self.just_read.pop() if self.just_read else leasing.read_basis(self.request)
        if basis.held and basis.held.pk == self.lease_id:  # granted with a place in a pool in which the sandbox did not start
            return super().fence()
        if basis.held and not leasing.check_held(self.request, basis.held, now=now):
            raise _LeaseHeld
        try:
            lease = leasing.grant(self.request, basis, now=now, actor=self.actor, admit=self.admit)
        except EntryChanged:
            raise _LeaseHeld from None
        except IntegrityError as error:
            dialect.raise_unless_unique(error)
            raise _LeaseHeld from None
        if basis.has_budgets:
            super().check_affordable(lease.pool)
        if now + KILL_GRACE > lease.expires_at:  # a start may take longer than a short TTL
            leasing.renew(lease, now=now, lasts=KILL_GRACE)
        return build_terms(lease)

    def check_affordable(self, pool: Pool) -> None:
        with suppress(Lease.DoesNotExist):  # not granted yet: `fence` checks the budgets
            super().check_affordable(pool)


def acquire_with_place(
    request: LeaseRequest,
    *,
    wait: timedelta | None,
    now: datetime,
    actor: str = "",
    admit: Callable[[], object] = bool,
    clock: Clock | None = None,
    sleep: Sleep = time.sleep,
) -> Admission:
    """Acquire a lease and start its sandbox. Wait in the queue of the pool if it is full.

    A call that gets no place within `wait` raises CapacityExhausted with `position` and `queue_length`. Its position is kept
    for ABANDONED_AFTER, so that a repeated call goes on from there; with a `wait` of 0 a client can poll. A process in which
    too many calls wait, or that is shutting down, answers at once, as if `wait` had passed. With a `wait` of None the call
    takes no position. Other errors are those of `leasing.acquire` and `execution.ensure_sandbox_ready`, and remove the request
    from the queue. A call that raises an error leaves no lease that it granted."""
    clock = clock or clock_from(now)
    until, since = now + (wait or timedelta(0)), None
    with _leave_queue_on_error(request):
        while True:
            try:
                return _acquire_now(request, now=clock(), actor=actor, admit=admit)
            except CapacityExhausted as exhausted:
                if wait is None or _has_place(request, now=clock()):
                    raise  # the wake of its cold sandbox needs an egress slot, not a place
                full_pool = exhausted.pool_id
            pool = Pool.objects.get(pk=full_pool) if full_pool else _find_pool(request, now=clock())
            since = admission_queue.enqueue(pool, request.agent_did, request.environment_id, now=clock(), since=since)
            checkpoint("place awaited", request)
            if not _wait_for_turn(request, pool, since, until=until, clock=clock, sleep=sleep):
                raise _build_error(pool, _find_position(request, pool, now=clock()))


def find_position(agent_did: str, environment_id: str, *, now: datetime) -> tuple[Pool, Position] | None:
    """Return the pool for whose places a join waits, and its position. None if none waits."""
    pool = admission_queue.find_pool(agent_did, environment_id, now=now)
    if pool is None:
        return None
    return pool, admission_queue.find_position(pool, agent_did, environment_id, now=now)


def read_admission(pk: UUID, *, is_new: bool) -> Admission:
    """Read a lease with its pool and its sandbox in one query. Raise Lease.DoesNotExist."""
    lease, (pool, sandbox), _ = sql.find_joined(Lease, execution.LEASE_JOINS, [], "leases_lease.id = %s", pk)
    if lease is None:
        raise Lease.DoesNotExist
    lease.pool = pool
    return Admission(lease, is_new, sandbox)


@contextmanager
def _leave_queue_on_error(request: LeaseRequest) -> Iterator[None]:
    try:
        yield
    except CapacityExhausted:
        raise
    except Exception:
        admission_queue.leave(request.agent_did, request.environment_id)
        raise


def _acquire_now(request: LeaseRequest, *, now: datetime, actor: str, admit: Callable[[], object]) -> Admission:
    """Return the held lease, or grant one, with a started sandbox in both cases. Raise CapacityExhausted without a place."""
    clock = clock_from(now)
    for _ in range(leasing.MAX_ACQUIRE_ATTEMPTS):
        basis = leasing.read_basis(request)
        if basis.held and not leasing.check_held(request, basis.held, now=clock()):
            execution.ensure_sandbox_ready(basis.held.pk, now=clock(), actor=actor)
            return read_admission(basis.held.pk, is_new=False)
        try:
            return _grant_with_place(replace(request, id=request.id or uuid4()), basis, clock, actor=actor, admit=admit)
        except _LeaseHeld:
            continue
    raise Conflict(leasing.CONCURRENT_ACQUIRES)


def _grant_with_place(
    request: LeaseRequest, basis: GrantBasis, clock: Clock, *, actor: str, admit: Callable[[], object]
) -> Admission:
    lease = leasing.build_lease(request, basis, now=clock())
    guard = _GrantingGuard(lease.pk, clock, request=request, actor=actor, admit=admit, just_read=[basis])
    unguarded = execution.build_sandbox_request(lease, now=clock(), has_alternatives=basis.has_alternatives)
    sandbox_request = replace(unguarded, guard=guard, is_new_holder=True)
    with end_on_error(lease.pk, clock=clock, actor=actor), hold(LeaseClaim(lease, clock)):
        allocation.ensure_running(sandbox_request, now=clock(), actor=actor)
        return read_admission(lease.pk, is_new=True)


@contextmanager
def end_on_error(pk: UUID, *, clock: Clock, actor: str = "") -> Iterator[None]:
    """End the lease that this call has granted if the body of the `with` raises: its client does not learn the lease's id.

    A lease in which another call has opened a run meanwhile, or whose sandbox is pending, goes on. Retried while the database
    does not respond; if it does not respond in time, or this process dies, a repeated join returns the lease, else its TTL ends
    it."""
    try:
        yield
    except (_LeaseHeld, CapacityPending):
        raise  # the sandbox of a pending start keeps its place, and a repeated call returns the lease
    except Exception as failed:
        detail = str(failed)
        with suppress(RetriesExhausted):
            retry_connection_errors(
                lambda: _end_unused(pk, detail, now=clock(), actor=actor), "lease not ended", clock=clock, lease=str(pk),
            )  # fmt: skip
        raise


def _end_unused(pk: UUID, detail: str, *, now: datetime, actor: str) -> None:
    if not Run.objects.filter(holder=pk).exclude(argv=JOIN_ARGV).exists():
        with transaction.atomic(durable=True):
            leasing.end(pk, reason="failed", now=now, actor=actor, detail=detail)


def _wait_for_turn(request: LeaseRequest, pool: Pool, since: datetime, *, until: datetime, clock: Clock, sleep: Sleep) -> bool:
    """Wait until the request may get a place. Return False if it may not by `until`.

    Between two reads of the queue no transaction is open."""
    if clock() >= until:
        return False
    try:
        with WAITING_CALLS.admit():
            renewed_at = clock()
            while (remaining := (until - clock()).total_seconds()) > 0 and not is_shutting_down():
                sleep(min(POLL_INTERVAL_SECONDS, remaining))
                position = _find_position(request, pool, now=clock())
                if _may_get_place(request, pool, position, now=clock()):
                    return True
                if clock() >= renewed_at + RENEW_INTERVAL:
                    renewed_at = clock()
                    admission_queue.enqueue(pool, request.agent_did, request.environment_id, now=renewed_at, since=since)
    except TooManyLongCalls:
        pass
    return False


def _may_get_place(request: LeaseRequest, pool: Pool, position: Position, *, now: datetime) -> bool:
    """Return whether a transaction that takes a place may succeed. Only reads, so that waiting requests lock nothing."""
    if not position.is_queued:
        return True  # another call got the lease, or the row expired while a victim was evicted
    pool.refresh_from_db(fields=["used", "capacity", "draining"])
    if pool.draining or pool.used + position.ahead < pool.capacity:
        return True
    if position.ahead:
        return False
    return eviction.find_victim(pool, agent_did=request.agent_did, now=now, spare_unused=True) is not None


def _has_place(request: LeaseRequest, *, now: datetime) -> bool:
    held = leasing.find_held_lease(request, now=now)
    return held is not None and allocation.find_by_holder(held.pk) is not None


def _find_pool(request: LeaseRequest, *, now: datetime) -> Pool:
    held = leasing.find_held_lease(request, now=now)
    return held.pool if held else leasing.find_type_and_pool(request)[1]


def _find_position(request: LeaseRequest, pool: Pool, *, now: datetime) -> Position:
    return admission_queue.find_position(pool, request.agent_did, request.environment_id, now=now)


def _build_error(pool: Pool, position: Position) -> CapacityExhausted:
    error = CapacityExhausted(
        f'No place in the pool "{pool}" is free yet. Position {position.number} of {position.length} in the queue: it is kept '
        f"for a request that is repeated within {ABANDONED_AFTER.total_seconds():.0f} seconds.",
        position=position.number,
        queue_length=position.length,
    )
    error.retry_after = RETRY_AFTER_SECONDS
    return error

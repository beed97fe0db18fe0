"""Admission queue: the order in which waiting requests get a place in a full pool.

A waiting request is a row that its client keeps alive. The row holds nothing: a place is taken in the transaction that also
deletes the row. The order is computed for each decision, from the rows and the places that their agents hold now:

1. requests of agents below their guarantee,
2. requests of agents with fewer places, where each earlier request of the same agent counts as a place,
3. requests of agents that were served longer ago,
4. requests that have waited longer.

Agents therefore take turns, however many requests one of them has, and however short its leases are. A request for a place
that is not in the queue, such as a command of a lease without a sandbox, comes after the queued requests."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.conf import settings
from django.db.models import QuerySet

from sandboxes.errors import CapacityExhausted, TooManyAdmissionRequests
from sandboxes.models import AdmissionRequest, Pool, Quota

# A client that polls returns after RETRY_AFTER_SECONDS. Until ABANDONED_AFTER an absent client may delay later requests.
ABANDONED_AFTER = timedelta(seconds=15)
RETRY_AFTER_SECONDS = 5
MAX_REQUESTS_PER_AGENT = 100  # in one pool: each decision reads all requests of the pool


@dataclass(frozen=True)
class Position:
    """Position of a request among those that wait for a place in a pool."""

    ahead: int  # requests that get a place before this one
    length: int  # all waiting requests
    enqueued_at: datetime | None = None  # None: the request is not in the queue

    @property
    def is_queued(self) -> bool:
        return self.enqueued_at is not None

    @property
    def number(self) -> int:
        """Position, counted from 1."""
        return self.ahead + 1


def enqueue(pool: Pool, agent_did: str, environment_id: str, *, now: datetime, since: datetime | None = None) -> datetime:
    """Add a request to the queue, or keep it there for another ABANDONED_AFTER. Return the time since which it has waited.

    A request that has expired waits from `now` again, unless its client passes the earlier time as `since`. Raise
    TooManyAdmissionRequests at the limit of the agent."""
    own_requests = _find_requests(agent_did, environment_id).filter(pool=pool)
    expires_at = now + ABANDONED_AFTER
    if own_requests.filter(expires_at__gt=now).update(expires_at=expires_at):
        return since or own_requests.values_list("enqueued_at", flat=True).first() or now
    if pool.admission_requests.filter(agent_did=agent_did, expires_at__gt=now).count() >= MAX_REQUESTS_PER_AGENT:
        raise TooManyAdmissionRequests(limit=MAX_REQUESTS_PER_AGENT)
    request = AdmissionRequest(
        pool=pool, agent_did=agent_did, environment_id=environment_id, enqueued_at=since or now, expires_at=expires_at
    )
    AdmissionRequest.objects.bulk_create(
        [request], update_conflicts=True, update_fields=["enqueued_at", "expires_at"],
        unique_fields=["agent_did", "environment_id", "pool"],
    )  # fmt: skip
    return request.enqueued_at


def admit(pool: Pool, agent_did: str, environment_id: str, *, now: datetime) -> None:
    """Remove a request that gets a place. Call this function in the transaction that takes the place and the agent's quota."""
    leave(agent_did, environment_id)
    Quota.objects.filter(pool=pool, agent_did=agent_did).update(admitted_at=now)


def leave(agent_did: str, environment_id: str) -> None:
    """Remove a request from the queues of all pools. Idempotent."""
    _find_requests(agent_did, environment_id).delete()


def find_pool(agent_did: str, environment_id: str, *, now: datetime) -> Pool | None:
    """Return the pool for whose places a request waits, or None if the request is in no queue."""
    request = _find_requests(agent_did, environment_id).filter(expires_at__gt=now).select_related("pool").first()
    return request.pool if request else None


def find_position(pool: Pool, agent_did: str, environment_id: str, *, now: datetime) -> Position:
    """Return the position of a request. One query if the queue is empty, else two.

    A request that is not in the queue comes last, or before requests of agents above their guarantee if its own is below."""
    waiting = list(pool.admission_requests.filter(expires_at__gt=now).order_by("enqueued_at", "pk"))
    if not waiting:
        return Position(ahead=0, length=0)
    quotas = _load_quotas(pool, {agent_did, *(request.agent_did for request in waiting)})
    order = _order(waiting, quotas)
    own_request = next((each for each in waiting if (each.agent_did, each.environment_id) == (agent_did, environment_id)), None)
    requests = [request for _, request in order]
    if own_request in requests:
        ahead = requests.index(own_request)
    else:
        own_requests = sum(request.agent_did == agent_did for request in waiting)
        below_guarantee = quotas[agent_did].used + own_requests < quotas[agent_did].guaranteed
        ahead = sum(is_guaranteed or not below_guarantee for is_guaranteed, _ in order)
    return Position(ahead, len(waiting), own_request.enqueued_at if own_request else None)


def count_waiting(pool: Pool, *, now: datetime) -> int:
    """Return how many requests wait for a place in the pool."""
    return pool.admission_requests.filter(expires_at__gt=now).count()


def build_waiting_error(pool: Pool, position: Position) -> CapacityExhausted:
    """Build the error for a request that gets no place before others."""
    return CapacityExhausted(
        f'The next free places of the pool "{pool}" go to the requests that wait for one ({position.ahead} before this one). '
        "Join the environment with wait_seconds to wait as well.",
        position=position.number,
        queue_length=position.length,
    )


def purge_abandoned(*, now: datetime) -> int:
    """Delete requests whose client went away. Return their number."""
    return AdmissionRequest.objects.filter(expires_at__lte=now).delete()[0]


def _find_requests(agent_did: str, environment_id: str) -> QuerySet[AdmissionRequest]:
    return AdmissionRequest.objects.filter(agent_did=agent_did, environment_id=environment_id)


def _load_quotas(pool: Pool, dids: Iterable[str]) -> dict[str, Quota]:
    rows = {quota.agent_did: quota for quota in Quota.objects.filter(pool=pool, agent_did__in=dids)}
    most = settings.MAX_SANDBOXES_PER_AGENT or None
    return {did: rows.get(did) or Quota(agent_did=did, most=most) for did in dids}


def _order(waiting: Sequence[AdmissionRequest], quotas: dict[str, Quota]) -> list[tuple[bool, AdmissionRequest]]:
    """Return the requests in the order in which they get places, each with whether its agent is below its guarantee.

    Requests above the quota of their agent are left out: they get no place, and must not delay others. `waiting` is in the
    order of arrival."""
    earlier: Counter[str] = Counter()
    order = []
    earliest = datetime.min.replace(tzinfo=UTC)
    for arrival, request in enumerate(waiting):
        quota = quotas[request.agent_did]
        places = quota.used + earlier[request.agent_did]
        earlier[request.agent_did] += 1
        if quota.most is None or places < quota.most:
            order.append((places >= quota.guaranteed, places, quota.admitted_at or earliest, arrival, request))
    return [(not above, request) for above, *_, request in sorted(order, key=lambda each: each[:4])]

"""Time for which the sandboxes of leases had a process."""

from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime, timedelta
from uuid import UUID

from sandboxes.models import SandboxState, Transition

STATES_WITHOUT_PROCESS = (SandboxState.COLD, SandboxState.DESTROYED)


def get_alive_time(holder: UUID, *, now: datetime) -> timedelta:
    """Return the total time up to `now` for which a lease's sandboxes had a process.

    Counted from the request of a start until the provider confirmed the end: the time that a provider may charge for."""
    return get_alive_times([holder], now=now)[holder]


def get_alive_times(holders: Iterable[UUID], *, now: datetime) -> dict[UUID, timedelta]:
    """Return `get_alive_time` of many leases, in one query. Leases that never had a sandbox have zero."""
    total: dict[UUID, timedelta] = defaultdict(timedelta)
    since: dict[UUID, tuple[UUID, datetime]] = {}  # sandbox -> (holder, start of the current process)
    latest: dict[UUID, datetime] = {}
    rows = Transition.objects.filter(holder__in=list(holders)).order_by("pk").values_list("sandbox", "holder", "to", "at")
    for sandbox, holder, to, at in rows:
        if holder is None:
            continue
        at = latest[sandbox] = max(at, latest.get(sandbox, at))  # the clock may have jumped back, as in build_intervals
        if to not in STATES_WITHOUT_PROCESS:
            since.setdefault(sandbox, (holder, at))
        elif sandbox in since:
            owner, began = since.pop(sandbox)
            total[owner] += at - began
    for owner, began in since.values():
        total[owner] += max(now - began, timedelta(0))
    return total

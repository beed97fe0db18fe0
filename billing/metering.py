"""How long things lasted, read off the facts: Transitions say when a sandbox had a process and when it had none."""

from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime, timedelta
from uuid import UUID

from sandboxes.models import State, Transition

WITHOUT_PROCESS = (State.COLD, State.DESTROYED)


def alive(holder: UUID, *, now: datetime) -> timedelta:
    """How long this holder's sandboxes have had a process, all of them together, up to `now`.

    From the moment a start was asked for until the provider confirmed the end: what it may have charged for."""
    return alive_each([holder], now=now)[holder]


def alive_each(holders: Iterable[UUID], *, now: datetime) -> dict[UUID, timedelta]:
    """`alive` for many holders, in one query; zero for those that never had a sandbox."""
    total: dict[UUID, timedelta] = defaultdict(timedelta)
    since: dict[UUID, tuple[UUID, datetime]] = {}  # sandbox -> its holder, and when its present process began
    rows = Transition.objects.filter(holder__in=list(holders)).order_by("at", "pk").values_list("sandbox", "holder", "to", "at")
    for sandbox, holder, to, at in rows:
        if holder is None:
            continue
        if to not in WITHOUT_PROCESS:
            since.setdefault(sandbox, (holder, at))
        elif sandbox in since:
            owner, began = since.pop(sandbox)
            total[owner] += at - began
    for owner, began in since.values():
        total[owner] += max(now - began, timedelta(0))
    return total

"""How many of what there are and what has become of them, pool by pool. For display: nothing decides by it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db.models import Case, Count, F, Min, Q, Sum, Value, When

from sandboxes import runs
from sandboxes.destruction import SANDBOX_COUNTER_FIELDS
from sandboxes.models import GONE_STATES, IN_FLIGHT_STATES, Pool, Quota, Sandbox, SandboxState

LIVE_STATES = [state for state in SandboxState if state != SandboxState.DESTROYED]
STALLED_AFTER = timedelta(minutes=2)  # past its deadline by two sweeps: nobody is taking the next step
POOL_COUNTER_FIELDS = (*SANDBOX_COUNTER_FIELDS, "claimed_warm", "evicted_cold", "evicted_warm", "evicted_waiting")


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What one pool has, or all of them together.

    Wakes (`woken_*`, and `warm_hits` for uses that found the sandbox alive), `slept`, `claimed_warm` and `evicted_*` have
    been counted since the pool was made. `slept` is every time a sandbox was put to sleep, by the idle sweep or for any
    other reason; `evicted_*` are the places that were taken for somebody else, by what the sandbox was before."""

    capacity: int
    used: int
    cold: int
    warming: int
    warm: int
    running: int
    waiting: int
    evicting: int
    destroying: int
    warm_hits: int
    woken_local: int
    woken_cloud: int
    woken_fresh: int
    slept: int
    claimed_warm: int
    evicted_cold: int
    evicted_warm: int
    evicted_waiting: int
    quarantined: int  # in `destroying`, and nobody tries any more
    stalled: int  # past its deadline, in flight or running, and no sweep has seen to it
    lost: int  # the provider has lost them, and their leases have not ended yet
    warm_target: int
    warm_ready: int  # nobody holds them yet
    oldest_waiting: timedelta  # since its last use; 0 if none waits

    @property
    def total(self) -> int:
        """Sandboxes that have a place. `used` is the counter of the same; if they differ for long, recount reports it."""
        return sum(getattr(self, state) for state in LIVE_STATES)

    @property
    def woken(self) -> int:
        return self.woken_local + self.woken_cloud + self.woken_fresh


@dataclass(frozen=True, kw_only=True)
class PoolStats(Stats):
    pk: int
    name: str
    draining: bool
    warm_paused_until: datetime | None  # the circuit is open until then
    warm_error: str


def collect_pool_stats(*, now: datetime) -> list[PoolStats]:
    """Every pool, by name. Two statements, which read the pools and the sandboxes that are not destroyed, by index.

    What a sandbox has counted moves to its pool when it is destroyed. So both are read in one statement: two would miss
    it or count it twice, and what only grows would be seen to shrink. A pool without sandboxes has only its own."""
    numbers = _build_count_filters(now)
    rows = (
        Sandbox.objects.exclude(state=SandboxState.DESTROYED)
        .order_by()
        .values("pool_id", *(f"pool__{name}" for name in POOL_COUNTER_FIELDS))
        .annotate(
            **{name: Count("pk", filter=which) for name, which in numbers.items()},
            **{f"now_{name}": Sum(name) for name in SANDBOX_COUNTER_FIELDS},
            waiting_since=Min("last_used_at", filter=Q(state=SandboxState.WAITING)),
        )
    )
    live = {row["pool_id"]: row for row in rows}
    return [_build_pool_stats(one, live.get(one.pk, {}), numbers, now) for one in Pool.objects.order_by("name")]


def _build_count_filters(now: datetime) -> dict[str, Q]:
    """Which sandboxes are counted under which name."""
    image = Case(When(pool__image="", then=Value(settings.SANDBOX_IMAGE)), default=F("pool__image"))
    return {
        **{state.value: Q(state=state) for state in LIVE_STATES},
        "quarantined": Q(state=SandboxState.DESTROYING, quarantined_at__isnull=False),
        "stalled": build_stalled_filter(now),
        "lost": Q(lost_at__isnull=False) & ~Q(state__in=GONE_STATES),
        "warm_ready": Q(state=SandboxState.WARM, holder__isnull=True, image=image, memory_mib=F("pool__memory_mib")),
    }


def build_stalled_filter(now: datetime) -> Q:
    """In flight, or running something, past its deadline, and no sweep has seen to it."""
    over = now - STALLED_AFTER
    in_flight = Q(state__in=IN_FLIGHT_STATES, deadline_at__lt=over, quarantined_at__isnull=True)
    return in_flight | Q(state=SandboxState.RUNNING, pk__in=runs.find_overdue(now=over).order_by().values("sandbox"))


def _build_pool_stats(pool: Pool, live: Mapping[str, Any], numbers: Iterable[str], now: datetime) -> PoolStats:
    waiting_since = live.get("waiting_since") or now
    return PoolStats(
        pk=pool.pk,
        name=pool.name,
        capacity=pool.capacity,
        used=pool.used,
        draining=pool.draining,
        warm_target=pool.warm_target,
        warm_paused_until=pool.warm_paused_until if (pool.warm_paused_until or now) > now else None,
        warm_error=pool.warm_error,
        oldest_waiting=max(now - waiting_since, timedelta(0)),
        **{name: live.get(name, 0) for name in numbers},
        **{name: live.get(f"pool__{name}", getattr(pool, name)) + live.get(f"now_{name}", 0) for name in POOL_COUNTER_FIELDS},
    )


def sum_stats(pools: Sequence[Stats]) -> Stats:
    """All of these as one."""
    sums = {each.name: sum(getattr(one, each.name) for one in pools) for each in fields(Stats) if each.name != "oldest_waiting"}
    return Stats(**sums, oldest_waiting=max((one.oldest_waiting for one in pools), default=timedelta(0)))


def find_quotas(pool_id: int, dids: Sequence[str]) -> list[Quota]:
    """What these agents may have in a pool, and have. One that has had nothing there gets what the settings say."""
    found = {one.agent_did: one for one in Quota.objects.filter(pool=pool_id, agent_did__in=dids)} if dids else {}
    unset = settings.MAX_SANDBOXES_PER_AGENT or None
    return [found.get(did) or Quota(pool_id=pool_id, agent_did=did, most=unset) for did in dids]

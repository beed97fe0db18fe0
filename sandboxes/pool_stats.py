"""Statistics of pools: gauges by state and cumulative counters. For display only: no decision depends on these values."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db.models import Case, Count, F, Min, Q, QuerySet, Sum, Value, When

from sandboxes import providers
from sandboxes.db import sql
from sandboxes.destruction import SANDBOX_COUNTER_FIELDS
from sandboxes.models import GONE_STATES, IN_FLIGHT_STATES, Attachment, Pool, Quota, Sandbox, SandboxState
from sandboxes.runs import abandoned

LIVE_STATES = [state for state in SandboxState if state != SandboxState.DESTROYED]
RECENT_PERIOD = timedelta(minutes=10)  # longer than usual scrape intervals, so that no transition is missed between two scrapes
STALLED_AFTER = timedelta(minutes=2)  # past its deadline: two intervals of the sweep that takes the next step
POOL_COUNTER_FIELDS = (*SANDBOX_COUNTER_FIELDS, "claimed_warm", "evicted_cold", "evicted_warm", "evicted_waiting")


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Statistics of one pool, or of several together.

    `warm_hits` (runs in a sandbox that had run something since its start), `woken_*`, `slept`, `claimed_warm` and `evicted_*`
    count since the pool was created. `slept` counts evictions for any reason. `evicted_*` count places that were freed for
    another sandbox, by the state of the evicted sandbox; `evicted_waiting` includes suspended ones."""

    capacity: int
    used: int
    cold: int
    warming: int
    warm: int
    running: int
    waiting: int
    suspended: int
    evicting: int
    destroying: int
    warm_hits: int
    woken_local: int
    woken_cloud: int
    woken_vendor: int
    woken_fresh: int
    slept: int
    claimed_warm: int
    evicted_cold: int
    evicted_warm: int
    evicted_waiting: int
    quarantined: int  # in `destroying`, not retried until an operator requests a retry
    stalled: int  # in flight or running, past the deadline by more than STALLED_AFTER
    unstored: int  # whose state could not be stored at the last attempt to put them to sleep
    lost: int  # missing at the provider, row not destroyed yet
    warm_target: int
    warm_ready: int  # pre-warmed, without a holder
    queue_length: int  # requests that wait for a place in the full pool
    oldest_waiting: timedelta  # time since the last use of the longest waiting or suspended sandbox; 0 if there is none

    @property
    def total(self) -> int:
        """Number of sandboxes that have a place. The counter `used` should equal it; the recount sweep reports a difference."""
        return sum(getattr(self, state) for state in LIVE_STATES)

    @property
    def woken(self) -> int:
        return self.woken_local + self.woken_cloud + self.woken_vendor + self.woken_fresh


@dataclass(frozen=True, kw_only=True)
class PoolStats(Stats):
    pk: int
    name: str
    restricted: bool
    draining: bool
    warm_paused_until: datetime | None  # end of the open state of the pre-warming circuit breaker; None: closed
    warm_error: str
    starts_failing_since: datetime | None  # None: the last start succeeded
    start_error_code: str


def collect_pool_stats(*, now: datetime) -> list[PoolStats]:
    """Return the statistics of all pools, by name. Executes two statements, both served by an index.

    A sandbox's counters move to its pool when it is destroyed. One statement therefore reads both. With two
    statements, counters that move in between would be missed or counted twice, and a counter would appear to decrease. For a
    pool without live sandboxes the second statement reads the counters."""
    filters = _build_count_filters(now)
    rows = (
        Sandbox.objects.exclude(state=SandboxState.DESTROYED)
        .order_by()
        .values("pool_id", *(f"pool__{name}" for name in POOL_COUNTER_FIELDS))
        .annotate(
            **{name: Count("pk", filter=condition) for name, condition in filters.items()},
            **{f"now_{name}": Sum(name) for name in SANDBOX_COUNTER_FIELDS},
            waiting_since=Min("last_used_at", filter=Q(state__in=(SandboxState.WAITING, SandboxState.SUSPENDED))),
        )
    )
    live = {row["pool_id"]: row for row in rows}
    queued = Count("admission_requests", filter=Q(admission_requests__expires_at__gt=now))
    pools = Pool.objects.annotate(queue_length=queued).order_by("name")
    return [_build_pool_stats(pool, pool.queue_length, live.get(pool.pk, {}), filters, now) for pool in pools]


def _build_count_filters(now: datetime) -> dict[str, Q]:
    """Return the filter of each gauge, by the gauge's name."""
    defaults = [When(provider=name, then=Value(providers.get_default_image(name))) for name in settings.REMOTE_PROVIDERS]
    image = Case(When(pool__image__gt="", then=F("pool__image")), *defaults, default=Value(settings.SANDBOX_IMAGE))
    return {
        **{state.value: Q(state=state) for state in LIVE_STATES},
        "quarantined": Q(state=SandboxState.DESTROYING, quarantined_at__isnull=False),
        "stalled": build_stalled_filter(now),
        "unstored": Q(state=SandboxState.WAITING, persist_failures__gt=0, lost_at__isnull=True),
        "lost": Q(lost_at__isnull=False) & ~Q(state__in=GONE_STATES),
        "warm_ready": Q(state=SandboxState.WARM, holder__isnull=True, image=image, memory_mib=F("pool__memory_mib")),
    }


def find_unsaved_attachments() -> QuerySet[Attachment]:
    """Attachments of sandboxes whose /data has changes that are stored nowhere else."""
    unsaved = Attachment.objects.filter(unsaved_since__isnull=False, incarnation=F("sandbox__incarnation"))
    return unsaved.filter(sandbox__lost_at__isnull=True).exclude(sandbox__state__in=[SandboxState.COLD, SandboxState.DESTROYED])


def build_stalled_filter(now: datetime) -> Q:
    """Build the filter of sandboxes that are in flight or running, and past their deadline by more than STALLED_AFTER."""
    overdue = now - STALLED_AFTER
    in_flight = Q(state__in=IN_FLIGHT_STATES, deadline_at__lt=overdue, quarantined_at__isnull=True)
    return in_flight | Q(state=SandboxState.RUNNING, pk__in=abandoned.find_overdue(now=overdue).order_by().values("sandbox"))


def _build_pool_stats(
    pool: Pool, queue_length: int, live: Mapping[str, Any], gauges: Iterable[str], now: datetime
) -> PoolStats:
    waiting_since = live.get("waiting_since") or now
    return PoolStats(
        pk=pool.pk,
        name=pool.name,
        restricted=pool.restricted,
        capacity=pool.capacity,
        used=pool.used,
        draining=pool.draining,
        warm_target=pool.warm_target,
        warm_paused_until=pool.warm_paused_until if (pool.warm_paused_until or now) > now else None,
        warm_error=pool.warm_error,
        starts_failing_since=pool.starts_failing_since,
        start_error_code=pool.start_error_code,
        queue_length=queue_length,
        oldest_waiting=max(now - waiting_since, timedelta(0)),
        **{name: live.get(name, 0) for name in gauges},
        **{name: live.get(f"pool__{name}", getattr(pool, name)) + live.get(f"now_{name}", 0) for name in POOL_COUNTER_FIELDS},
    )


# The condition repeats that of the index `transition_not_of_runs`, because SQLite uses a partial index only for literals.
RECENT_TRANSITIONS_SQL = """
SELECT p.name, t."to", t.code, COUNT(*) FROM sandboxes_transition t
JOIN sandboxes_sandbox s ON s.id = t.sandbox_id JOIN sandboxes_pool p ON p.id = s.pool_id
WHERE NOT t.code IN ('run_started', 'run_ended') AND t.at > %s GROUP BY p.name, t."to", t.code
"""


def count_recent_transitions(*, now: datetime) -> dict[tuple[str, str, str], int]:
    """Count the transitions of the last RECENT_PERIOD by pool name, target state and reason, without those of runs.

    Executes one statement, served by an index. A combination without a transition is absent."""
    return {(pool, to, code): count for pool, to, code, count in sql.fetch_all(RECENT_TRANSITIONS_SQL, now - RECENT_PERIOD)}


def sum_stats(pools: Sequence[Stats]) -> Stats:
    """Add up the statistics of several pools. `oldest_waiting` is the longest of them."""
    names = [field.name for field in fields(Stats) if field.name != "oldest_waiting"]
    sums = {name: sum(getattr(pool, name) for pool in pools) for name in names}
    return Stats(**sums, oldest_waiting=max((pool.oldest_waiting for pool in pools), default=timedelta(0)))


def find_quotas(pool_id: int, dids: Sequence[str]) -> list[Quota]:
    """Return the quotas of these agents in a pool, in the same order.

    An agent without a row gets an unsaved quota with the default limit of the settings."""
    rows = {quota.agent_did: quota for quota in Quota.objects.filter(pool=pool_id, agent_did__in=dids)} if dids else {}
    default_limit = settings.MAX_SANDBOXES_PER_AGENT or None
    return [rows.get(did) or Quota(pool_id=pool_id, agent_did=did, most=default_limit) for did in dids]


def serialize_stats(stats: Stats) -> dict[str, Any]:
    """Return the numbers of one pool or of all pools, as the API and the health report show them."""
    return {
        "total": stats.total,
        "cold": stats.cold,
        "warming": stats.warming,
        "warm": stats.warm,
        "waiting": stats.waiting,
        "suspended": stats.suspended,
        "running": stats.running,
        "evicting": stats.evicting,
        "destroying": stats.destroying,
        "max_capacity": stats.capacity,
        "used": stats.used,
        "resume_warm_hits": stats.warm_hits,
        "resume_cold_hits": stats.woken,
        "resume_cold_local_hits": stats.woken_local,
        "resume_cold_cloud_hits": stats.woken_cloud,
        "resume_cold_vendor_hits": stats.woken_vendor,
        "resume_cold_fresh_hits": stats.woken_fresh,
        "pre_warm_hits": stats.claimed_warm,
        "slept": stats.slept,
        "evicted_cold": stats.evicted_cold,
        "evicted_warm": stats.evicted_warm,
        "evicted_waiting": stats.evicted_waiting,
        "quarantined": stats.quarantined,
        "stalled": stats.stalled,
        "lost": stats.lost,
        "queue_length": stats.queue_length,
        "oldest_waiting_seconds": stats.oldest_waiting.total_seconds(),
        "warm_target": stats.warm_target,
        "warm_ready": stats.warm_ready,
    }

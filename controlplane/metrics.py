"""/metrics for Prometheus: what the database says of pools, leases, sweeps and the queue. Every web process answers the
same, so it does not matter which of them is asked.

Served without a key, like health: pools are named in it, agents are not. Where pools' names and numbers are nobody's
business, let only the scraper reach the path, by the address that is bound or in the proxy before it."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from threading import Lock

from django.db import Error as DatabaseError
from django.db import connection, transaction
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe
from django_q.models import OrmQ
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from leases.models import Lease, LeaseStatus
from sandboxes import pool_stats
from sandboxes.models import Sweep
from sandboxes.pool_stats import LIVE_STATES, PoolStats

# Seconds for which what was read is shown again. Shorter than the time between two scrapes: else another process could
# show the second one an older number, and a counter that falls looks like one that was reset.
CACHE_SECONDS = 2.0
STATEMENT_TIMEOUT_MS = 800  # milliseconds for each of six statements: together they stay within 5 seconds

GAUGES: dict[str, tuple[str, Callable[[PoolStats], float]]] = {
    "pool_capacity": ("Sandboxes that may exist at once.", lambda one: one.capacity),
    "pool_used": ("Places taken: sandboxes that exist, asleep ones and those being destroyed included.", lambda one: one.used),
    "pool_draining": ("1 while the pool takes nothing new.", lambda one: one.draining),
    "quarantined": ("Sandboxes of which destroying failed too often.", lambda one: one.quarantined),
    "sandboxes_stalled": ("Sandboxes past a deadline, of which no sweep has taken care.", lambda one: one.stalled),
    "sandboxes_lost": ("Sandboxes that their provider lost while a lease held them.", lambda one: one.lost),
    "oldest_waiting_seconds": (
        "Since the last use of the waiting sandbox that is longest unused; 0 if none waits.",
        lambda one: one.oldest_waiting.total_seconds(),
    ),
    "warm_target": ("Sandboxes to keep ready that nobody holds yet.", lambda one: one.warm_target),
    "warm_ready": ("Sandboxes that are ready and nobody holds yet.", lambda one: one.warm_ready),
    "warm_circuit_open": (
        "1 while nothing is warmed up, since starts have failed.",
        lambda one: one.warm_paused_until is not None,
    ),
}
# name -> what it counts, by which labels, and what for which values of them
COUNTERS: dict[str, tuple[str, tuple[str, ...], Mapping[tuple[str, ...], Callable[[PoolStats], int]]]] = {
    "wakes": (
        "Uses that found their sandbox alive (warm), and wakes by where the state came from.",
        ("source",),
        {
            ("warm",): lambda one: one.warm_hits,
            ("local",): lambda one: one.woken_local,
            ("cloud",): lambda one: one.woken_cloud,
            ("fresh",): lambda one: one.woken_fresh,
        },
    ),
    "evictions": (
        "Places taken for another sandbox, by what was there before.",
        ("tier",),
        {
            ("cold",): lambda one: one.evicted_cold,
            ("warm",): lambda one: one.evicted_warm,
            ("waiting",): lambda one: one.evicted_waiting,
        },
    ),
    "sleeps": ("Times a sandbox was put to sleep, when idle or for any other reason.", (), {(): lambda one: one.slept}),
    "prewarmed_claims": ("Claims that found a sandbox ready.", (), {(): lambda one: one.claimed_warm}),
}


@require_safe
@never_cache
def metrics(request: HttpRequest) -> HttpResponse:
    try:
        found = snapshot_cache.of(timezone.now())
    except DatabaseError:
        return HttpResponse("The database does not answer.\n", status=503, content_type="text/plain; charset=utf-8")
    return HttpResponse(generate_latest(SnapshotCollector(found)), content_type=CONTENT_TYPE_PLAIN_0_0_4)


@dataclass(frozen=True)
class MetricsSnapshot:
    """What there is to count, as of one moment."""

    pools: list[PoolStats]
    leases: dict[str, int]
    sweeps: dict[str, float]  # seconds since each last succeeded
    queue: int


def read_snapshot(*, now: datetime) -> MetricsSnapshot:
    """Read everything, or DatabaseError. No statement reads history."""
    with _limit_statement_time():
        return MetricsSnapshot(
            pools=pool_stats.collect_pool_stats(now=now),
            # Destroyed leases are history. A statement for each of the others: no index serves both.
            leases={
                each.value: Lease.objects.filter(status=each).count() for each in (LeaseStatus.ACTIVE, LeaseStatus.EXPIRED)
            },
            sweeps={
                name: max((now - at).total_seconds(), 0.0)
                for name, at in Sweep.objects.values_list("name", "succeeded_at")
                if at
            },
            queue=OrmQ.objects.count(),
        )


@contextmanager
def _limit_statement_time() -> Iterator[None]:
    """Statements that take too long are errors. Not on SQLite, where a transaction would wait for every writer."""
    if connection.vendor != "postgresql":
        yield
        return
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(f"SET LOCAL statement_timeout = {STATEMENT_TIMEOUT_MS}")
        yield


@dataclass
class SnapshotCache:
    """Reads at most every FRESH seconds, however many ask. A failure is not remembered, nor shown over with old numbers."""

    lock: Lock = field(default_factory=Lock)
    read_at: float = 0.0
    found: MetricsSnapshot | None = None

    def of(self, now: datetime) -> MetricsSnapshot:
        with self.lock:
            if self.found is None or time.monotonic() - self.read_at > CACHE_SECONDS:
                self.found = None
                self.found, self.read_at = read_snapshot(now=now), time.monotonic()
            return self.found


snapshot_cache = SnapshotCache()


class SnapshotCollector(Collector):
    """Facts, as Prometheus reads them."""

    def __init__(self, found: MetricsSnapshot) -> None:
        self.found = found

    def collect(self) -> Iterator[Metric]:
        found = self.found
        yield _build_family(
            GaugeMetricFamily, "sandboxes", "Sandboxes that exist.", ["pool", "state"],
            {(one.name, state.value): getattr(one, state) for one in found.pools for state in LIVE_STATES},
        )  # fmt: skip
        for name, (what, value) in GAUGES.items():
            yield _build_family(GaugeMetricFamily, name, what, ["pool"], {(one.name,): value(one) for one in found.pools})
        for name, (what, labels, values) in COUNTERS.items():
            yield _build_family(
                CounterMetricFamily, name, what, ["pool", *labels],
                {(one.name, *these): value(one) for one in found.pools for these, value in values.items()},
            )  # fmt: skip
        yield _build_family(
            GaugeMetricFamily, "leases", "Leases that are active, or expired and not yet without a sandbox.", ["status"],
            {(status,): number for status, number in found.leases.items()},
        )  # fmt: skip
        yield _build_family(
            GaugeMetricFamily, "sweep_age_seconds", "Since each sweep last succeeded; one that never did is not here.",
            ["sweep"], {(name,): age for name, age in found.sweeps.items()},
        )  # fmt: skip
        yield _build_family(GaugeMetricFamily, "queue_depth", "Tasks that wait in the queue.", [], {(): found.queue})


def _build_family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    what: str,
    labels: list[str],
    samples: Mapping[tuple[str, ...], float],
) -> Metric:
    family = kind(f"leasehold_{name}", what, labels=labels)
    for of, value in samples.items():
        family.add_metric(of, value)
    return family

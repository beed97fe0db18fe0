"""/metrics for Prometheus: pools, leases, sweeps and the queue, read from the database by any web process.

The endpoint needs no API key. It names pools, but no agents. A scrape needs LEASEHOLD_METRICS_TOKEN as a bearer token. Without
that setting only a direct scrape from this host is answered."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from ipaddress import IPv6Address, ip_address
from threading import Lock

from django.conf import settings
from django.core.exceptions import DisallowedHost
from django.db import Error as DatabaseError
from django.db import InterfaceError, OperationalError, connection, transaction
from django.http import HttpRequest, HttpResponse
from django.utils.crypto import constant_time_compare
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe
from django_q.models import OrmQ
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controlplane import health, schedules
from leases.agent_runs.models import AgentRun
from leases.models import Lease, LeaseStatus
from leases.queue import statistics
from leases.queue.models import QueuedRun
from leases.queue.statistics import QueueStats
from sandboxes import installation_marks, pool_stats
from sandboxes.agent.gateway import FALLBACK_REASONS
from sandboxes.db import database_time, dialect
from sandboxes.egress.allow_list.connections import PROXY_EVENTS
from sandboxes.egress.request_filter import COUNT_NAME as DROPPED_FIELDS
from sandboxes.hosts import registry
from sandboxes.lifecycle import EDGES, START_REASONS
from sandboxes.models import Host, Sweep
from sandboxes.models.transition_reasons import RUN_REASONS
from sandboxes.pool import start_breaker
from sandboxes.pool_stats import LIVE_STATES, PoolStats
from sandboxes.state import disk_space
from sandboxes.streams.registry import OPEN_STREAMS
from sandboxes.webhooks import subscriptions
from sandboxes.webhooks.subscriptions import FailingWebhooks

LOOPBACK_HOSTS = {"127.0.0.1", "localhost", "[::1]"}
PROXY_HEADERS = ("HTTP_FORWARDED", "HTTP_X_FORWARDED_", "HTTP_X_REAL_IP", "HTTP_VIA")  # prefixes of WSGI variables

# Seconds for which a snapshot is reused. It must be shorter than the scrape interval: otherwise a second process could report
# an older value, and Prometheus takes a decreasing counter for a reset.
CACHE_SECONDS = 2.0
PLAIN_TEXT = "text/plain; charset=utf-8"
STATEMENT_TIMEOUT_MS = 600  # for each of nine statements, so that a scrape takes less than 5 seconds

GATEWAY_EVENTS = ("sessions", "executions", "violations", "rejections")

GAUGES: dict[str, tuple[str, Callable[[PoolStats], float]]] = {
    "pool_capacity": ("Maximum number of sandboxes.", lambda pool: pool.capacity),
    "pool_used": ("Existing sandboxes, cold ones and those being destroyed included.", lambda pool: pool.used),
    "pool_draining": ("1 while the pool accepts no new sandboxes.", lambda pool: pool.draining),
    "quarantined": ("Sandboxes in quarantine after failed destroy attempts.", lambda pool: pool.quarantined),
    "sandboxes_stalled": ("Sandboxes past a deadline that no sweep has recovered.", lambda pool: pool.stalled),
    "sandboxes_unstored": (
        "Sandboxes whose state could not be stored at the last attempt to put them to sleep.",
        lambda pool: pool.unstored,
    ),
    "sandboxes_lost": ("Sandboxes lost by their provider while a lease held them.", lambda pool: pool.lost),
    "admission_queue_length": ("Requests that wait for a place in the full pool.", lambda pool: pool.queue_length),
    "oldest_waiting_seconds": (
        "Time since the last use of the least recently used waiting or suspended sandbox; 0 if there is none.",
        lambda pool: pool.oldest_waiting.total_seconds(),
    ),
    "warm_target": ("Target number of ready sandboxes without a lease.", lambda pool: pool.warm_target),
    "warm_ready": ("Ready sandboxes without a lease.", lambda pool: pool.warm_ready),
    "starts_failing": (
        "1 from a failed start of the pool until a start succeeds.",
        lambda pool: pool.starts_failing_since is not None,
    ),
    "warm_circuit_open": (
        "1 while no warm sandboxes are started, after failed starts.",
        lambda pool: pool.warm_paused_until is not None,
    ),
}
# name -> help text, label names, value by label values
COUNTERS: dict[str, tuple[str, tuple[str, ...], Mapping[tuple[str, ...], Callable[[PoolStats], int]]]] = {
    "wakes": (
        "Uses of a live sandbox (warm), and wakes by the source of the state.",
        ("source",),
        {
            ("warm",): lambda pool: pool.warm_hits,
            ("local",): lambda pool: pool.woken_local,
            ("cloud",): lambda pool: pool.woken_cloud,
            ("vendor",): lambda pool: pool.woken_vendor,
            ("fresh",): lambda pool: pool.woken_fresh,
        },
    ),
    "evictions": (
        "Sandboxes evicted to make room for another one, by their state before; suspended ones count as waiting.",
        ("tier",),
        {
            ("cold",): lambda pool: pool.evicted_cold,
            ("warm",): lambda pool: pool.evicted_warm,
            ("waiting",): lambda pool: pool.evicted_waiting,
        },
    ),
    "sleeps": ("Sandboxes put to sleep, for any reason.", (), {(): lambda pool: pool.slept}),
    "prewarmed_claims": ("Claims of a pre-warmed sandbox.", (), {(): lambda pool: pool.claimed_warm}),
}
# (target state, reason): every combination is reported, with 0 if none occurred, so that no series comes and goes.
REPORTED_TRANSITIONS = sorted({
    *(("warming", reason.value) for reason in START_REASONS),
    *((to.value, reason.value) for (_, to), reasons in EDGES.items() for reason in reasons if reason not in RUN_REASONS),
})  # fmt: skip


@require_safe
@never_cache
def metrics(request: HttpRequest) -> HttpResponse:
    if settings.METRICS_TOKEN and not _has_token(request):
        response = HttpResponse("The bearer token is missing or wrong.\n", status=401, content_type=PLAIN_TEXT)
        response["WWW-Authenticate"] = "Bearer"
        return response
    if not settings.METRICS_TOKEN and not _is_direct_local_request(request):
        message = "Set LEASEHOLD_METRICS_TOKEN to scrape from another host or behind a proxy.\n"
        return HttpResponse(message, status=403, content_type=PLAIN_TEXT)
    try:
        snapshot = snapshot_cache.get(database_time.now())
    except DatabaseError as error:
        if not isinstance(error, OperationalError | InterfaceError):  # lost, or too slow for STATEMENT_TIMEOUT_MS
            raise
        return HttpResponse("The database does not respond.\n", status=503, content_type=PLAIN_TEXT)
    return HttpResponse(generate_latest(SnapshotCollector(snapshot)), content_type=CONTENT_TYPE_PLAIN_0_0_4)


def _has_token(request: HttpRequest) -> bool:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return scheme.lower() == "bearer" and constant_time_compare(token.strip(), settings.METRICS_TOKEN)


def _is_direct_local_request(request: HttpRequest) -> bool:
    """Return whether the request comes from a process on this host that is not known to be a proxy.

    Behind a proxy on this host every peer is a loopback address. A proxy shows in its headers or in the public names that are
    configured for it. The latter matter because nginx adds no header and replaces Host by default."""
    if settings.CSRF_TRUSTED_ORIGINS or not LOOPBACK_HOSTS.issuperset(settings.ALLOWED_HOSTS):
        return False
    with suppress(ValueError, DisallowedHost):
        request.get_host()  # raises DisallowedHost for a name that is not in ALLOWED_HOSTS
        peer = ip_address(request.META.get("REMOTE_ADDR", ""))
        peer = (peer.ipv4_mapped or peer) if isinstance(peer, IPv6Address) else peer
        return peer.is_loopback and not any(name.startswith(PROXY_HEADERS) for name in request.META)
    return False


@dataclass(frozen=True)
class MetricsSnapshot:
    """Values of all metrics at one moment."""

    pools: list[PoolStats]
    transitions: dict[tuple[str, str, str], int]  # (pool, target state, reason) -> number in the last ten minutes
    leases: dict[str, int]
    sweeps: dict[tuple[str, ...], float]  # (name, host or "") -> seconds since the last success, or the registration
    gateways: dict[str, dict[str, int]]  # host -> counts of AgentGateway.read_counts
    hosts: dict[tuple[str, ...], float]  # (host, state) -> seconds since the last heartbeat
    paused_starts: dict[tuple[str, ...], bool]  # (host, provider) -> whether starts are paused
    missing_images: dict[tuple[str, ...], int]  # (host, provider) -> number of pools whose image the engine does not have
    webhooks: FailingWebhooks
    queue: int
    queued_runs: QueueStats
    mismatch: bool
    disk: dict[str, int]  # directory -> free bytes on this host


def read_snapshot(*, now: datetime) -> MetricsSnapshot:
    """Read all values from current rows only. Raise DatabaseError."""
    with _limit_statement_time():
        sweeps = [*Sweep.objects.select_related("host")]
        hosts = [*Host.objects.all()]
        return MetricsSnapshot(
            pools=pool_stats.collect_pool_stats(now=now),
            transitions=pool_stats.count_recent_transitions(now=now),
            # Destroyed leases are history. Each other status needs its own statement: no index covers both.
            leases={
                status.value: Lease.objects.filter(status=status).count()
                for status in (LeaseStatus.ACTIVE, LeaseStatus.EXPIRED)
            },
            sweeps=_measure_sweep_ages(sweeps, hosts, now=now),
            gateways={
                _get_host_name(sweep): {name.removeprefix("agent "): count for name, count in sweep.counts.items()}
                for sweep in sweeps
                if sweep.name == "egress"
            },
            hosts={
                (host.name, registry.get_state(host, now=now)): (now - (host.heartbeat_at or host.created_at)).total_seconds()
                for host in hosts
            },
            paused_starts={(host.name, host.provider): start_breaker.is_open(host, now=now) for host in hosts},
            missing_images={(host.name, host.provider): len(host.missing_images or {}) for host in hosts},
            webhooks=subscriptions.count_failing(),
            queue=OrmQ.objects.count(),
            queued_runs=statistics.get_stats(QueuedRun.objects.filter(ended_at__isnull=True), AgentRun.objects.all(), now=now),
            mismatch=installation_marks.has_recorded_mismatch(),
            disk=disk_space.measure_free_space() | health.provider_probe.get_status().get("disk", {}),
        )


def _measure_sweep_ages(rows: Sequence[Sweep], hosts: Sequence[Host], *, now: datetime) -> dict[tuple[str, ...], float]:
    """Return the age of every scheduled sweep by name and host, and of the others that have succeeded.

    A sweep that has not succeeded yet is as old as its host, or as the first host if it is the installation's."""
    since = {(name, host.name): host.created_at for host in hosts if not host.lost_at for name in schedules.HOST_SWEEPS}
    if hosts:
        installed_at = min(host.created_at for host in hosts)
        since |= {(name, ""): installed_at for name in schedules.SCHEDULE if name not in schedules.HOST_SWEEPS}
    since |= {(row.name, _get_host_name(row)): row.succeeded_at for row in rows if row.succeeded_at}
    return {key: max((now - at).total_seconds(), 0.0) for key, at in since.items()}


def _get_host_name(sweep: Sweep) -> str:
    return sweep.host.name if sweep.host else ""


@contextmanager
def _limit_statement_time() -> Iterator[None]:
    """Limit the duration of each statement, on PostgreSQL only: on SQLite the transaction would wait for every writer."""
    statement = dialect.statement_timeout(STATEMENT_TIMEOUT_MS)
    if not statement:
        yield
        return
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(statement)
        yield


@dataclass
class SnapshotCache:
    """The latest snapshot, read again after CACHE_SECONDS. After a failure neither the error nor old values are served."""

    lock: Lock = field(default_factory=Lock)
    read_at: float = 0.0
    snapshot: MetricsSnapshot | None = None

    def get(self, now: datetime) -> MetricsSnapshot:
        with self.lock:
            if self.snapshot is None or time.monotonic() - self.read_at > CACHE_SECONDS:
                self.snapshot = None
                self.snapshot, self.read_at = read_snapshot(now=now), time.monotonic()
            return self.snapshot


snapshot_cache = SnapshotCache()


class SnapshotCollector(Collector):
    """Converts a snapshot to Prometheus metric families."""

    def __init__(self, snapshot: MetricsSnapshot) -> None:
        self.snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        snapshot = self.snapshot
        yield _build_family(
            GaugeMetricFamily, "sandboxes", "Existing sandboxes.", ["pool", "state"],
            {(pool.name, state.value): getattr(pool, state) for pool in snapshot.pools for state in LIVE_STATES},
        )  # fmt: skip
        for name, (help, value) in GAUGES.items():
            yield _build_family(GaugeMetricFamily, name, help, ["pool"], {(pool.name,): value(pool) for pool in snapshot.pools})
        for name, (help, labels, values) in COUNTERS.items():
            yield _build_family(
                CounterMetricFamily, name, help, ["pool", *labels],
                {(pool.name, *label_values): value(pool) for pool in snapshot.pools for label_values, value in values.items()},
            )  # fmt: skip
        yield _build_family(
            GaugeMetricFamily, "recent_transitions", "State changes of the last 10 minutes by reason, without those of runs.",
            ["pool", "to", "reason"],
            {
                (pool.name, to, reason): snapshot.transitions.get((pool.name, to, reason), 0)
                for pool in snapshot.pools for to, reason in REPORTED_TRANSITIONS
            },
        )  # fmt: skip
        yield _build_family(
            GaugeMetricFamily, "leases", "Leases that are active, or expired with a sandbox not yet destroyed.", ["status"],
            {(status,): number for status, number in snapshot.leases.items()},
        )  # fmt: skip
        yield _build_family(
            GaugeMetricFamily, "sweep_age_seconds",
            "Time since the last success of each sweep; before the first, since the registration of the host.",
            ["sweep", "host"], snapshot.sweeps,
        )  # fmt: skip
        yield _build_family(
            GaugeMetricFamily, "host_heartbeat_age_seconds", "Time since a worker last reached the engine of each host.",
            ["host", "state"], snapshot.hosts,
        )  # fmt: skip
        yield _build_family(
            GaugeMetricFamily, "starts_paused", "1 while the provider starts no sandboxes on the host, after failed starts.",
            ["host", "provider"], snapshot.paused_starts,
        )  # fmt: skip
        yield _build_family(
            GaugeMetricFamily, "missing_images", "Pools whose image the engine of the host does not have.",
            ["host", "provider"], snapshot.missing_images,
        )  # fmt: skip
        yield _build_family(
            GaugeMetricFamily, "webhooks_failing", "Webhooks that are disabled after failures, or whose receiver fails.",
            ["state"], {("disabled",): snapshot.webhooks.disabled, ("failing",): snapshot.webhooks.failing},
        )  # fmt: skip
        yield from _build_gateway_families(snapshot.gateways)
        yield _build_family(
            GaugeMetricFamily, "queued_runs", "Queued runs that have not ended.", ["state"],
            {(state,): snapshot.queued_runs.counts[state] for state in ("queued", "started")},
        )  # fmt: skip
        yield _build_family(
            GaugeMetricFamily, "direct_agent_runs", "Agent runs in progress that were started without the queue.", [],
            {(): snapshot.queued_runs.direct_agent_runs},
        )  # fmt: skip
        yield _build_family(
            GaugeMetricFamily, "oldest_pending_run_seconds", "Age of the oldest pending queued run; 0 if there is none.",
            [], {(): snapshot.queued_runs.oldest_pending_seconds},
        )  # fmt: skip
        yield _build_family(GaugeMetricFamily, "queue_depth", "Queued tasks.", [], {(): snapshot.queue})
        yield _build_family(
            GaugeMetricFamily, "clock_skew_seconds", "Clock of the scraped host minus the database's; each host has its own.",
            [], {(): -database_time.get_skew().total_seconds()},
        )  # fmt: skip
        yield _build_family(
            GaugeMetricFamily, "open_streams", "Open output streams of the web process that responds.",
            [], {(): OPEN_STREAMS.count()},
        )  # fmt: skip
        yield _build_family(
            GaugeMetricFamily, "installation_mismatch",
            "1 while destructive sweeps are refused, because store or state directory do not match the database.",
            [], {(): snapshot.mismatch},
        )  # fmt: skip
        yield _build_family(
            GaugeMetricFamily, "disk_free_bytes", "Free space of the control plane's disks on the host that responds.",
            ["directory"], {(name,): free for name, free in snapshot.disk.items()},
        )  # fmt: skip


def _build_gateway_families(gateways: Mapping[str, Mapping[str, int]]) -> Iterator[Metric]:
    """Build the families of the egress process of each host. Counters begin again at 0 with the egress process of a host."""
    yield _build_family(
        GaugeMetricFamily, "agents_connected", "Agents in sandboxes that are connected to the gateway of each host.",
        ["host"], {(host,): counts.get("connected", 0) for host, counts in gateways.items()},
    )  # fmt: skip
    yield _build_family(
        GaugeMetricFamily, "agents_outdated", "Agents in sandboxes whose version this one does not speak with.",
        ["host"], {(host,): counts.get("outdated", 0) for host, counts in gateways.items()},
    )  # fmt: skip
    yield _build_family(
        CounterMetricFamily, "agent_events",
        "Sessions of agents, executions by agents, violations of their protocol and rejected connections of other processes.",
        ["host", "event"],
        {(host, event): counts.get(event, 0) for host, counts in gateways.items() for event in GATEWAY_EVENTS},
    )  # fmt: skip
    yield _build_family(
        GaugeMetricFamily, "egress_connections_open", "Open connections of sandboxes to domains of their policy's allow list.",
        ["host"], {(host,): counts.get("connections open", 0) for host, counts in gateways.items()},
    )  # fmt: skip
    yield _build_family(
        CounterMetricFamily, "egress_connections", "Connections that the proxy of the allow lists admitted and refused.",
        ["host", "event"],
        {(host, event): counts.get(f"connections {event}", 0) for host, counts in gateways.items() for event in PROXY_EVENTS},
    )  # fmt: skip
    yield _build_family(
        CounterMetricFamily, "model_request_fields_dropped", "Unknown fields of model requests that were not forwarded.",
        ["host"], {(host,): counts.get(DROPPED_FIELDS, 0) for host, counts in gateways.items()},
    )  # fmt: skip
    yield _build_family(
        CounterMetricFamily, "agent_fallbacks", "Commands and file operations executed by the engine instead of an agent.",
        ["host", "reason"],
        {
            (host, reason): counts.get(f"fallbacks {reason}", 0)
            for host, counts in gateways.items() for reason in FALLBACK_REASONS
        },
    )  # fmt: skip


def _build_family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    help: str,
    labels: list[str],
    samples: Mapping[tuple[str, ...], float],
) -> Metric:
    family = kind(f"leasehold_{name}", help, labels=labels)
    for label_values, value in samples.items():
        family.add_metric(label_values, value)
    return family

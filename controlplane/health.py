"""Health endpoints: /livez (process), /healthz (database, with a report), /readyz (able to serve leases).

A missing requirement makes /readyz fail; a problem that does not affect leases is only a warning. So is a failure of all
starts: without /readyz a load balancer would cut off the sandboxes that run.
The endpoints need no API key, so a report contains no error text and no agent name, and requests share it."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from threading import Lock
from typing import Any

import structlog
from django.conf import settings
from django.db import Error as DatabaseError
from django.db import OperationalError
from django.db.models import F, Q
from django.http import HttpRequest, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe
from django_q.models import OrmQ

from billing import budgets
from controlplane import schedules
from sandboxes import installation_marks, long_calls, pool_stats, providers
from sandboxes.db import database_time, dialect, pooler
from sandboxes.db.clock import format_optional_timestamp
from sandboxes.db.migrations import SchemaStatus, read_status
from sandboxes.failures import find_cause
from sandboxes.hosts import registry
from sandboxes.models import Host, Installation, Sweep
from sandboxes.pool import start_breaker
from sandboxes.pool_stats import PoolStats, Stats
from sandboxes.providers.errors import FailureCause
from sandboxes.state import disk_space, missing_snapshots
from sandboxes.sweeps.passes import COUNTERS_CORRECTED
from sandboxes.webhooks import subscriptions
from sandboxes.webhooks.subscriptions import FailingWebhooks

log = structlog.get_logger(__name__)
PROBE_CACHE_SECONDS = 5.0  # maximum age of a reused provider status
CLOCK_AGREEMENT = timedelta(seconds=2)  # difference of two hosts' measurements that may be one clock's
PROBE_TIMEOUT_SECONDS = 1.0  # wait of a health request for a provider
EGRESS_HEARTBEAT, EGRESS_HEARTBEAT_INTERVAL = "egress", timedelta(minutes=1)  # the heartbeat of `manage.py egress`


@require_safe
@never_cache
def livez(request: HttpRequest) -> JsonResponse:
    return JsonResponse({"status": "ok"})


@require_safe
@never_cache
def healthz(request: HttpRequest) -> JsonResponse:
    report = shared_report.get()
    return JsonResponse(report, status=200 if report["database"] else 503)


@require_safe
@never_cache
def readyz(request: HttpRequest) -> JsonResponse:
    report = shared_report.get()
    return JsonResponse(report, status=503 if report["missing"] else 200)


def check_health(*, now: datetime) -> dict[str, Any]:
    """Build the health report. `missing` has the conditions that prevent leases, `warnings` those that need an operator."""
    try:
        schema = read_status()
        if schema_error := schema.explain_error():
            return _build_report(database=True, migrated=False, missing=[schema_error])
        sweep_rows = _load_sweeps()
        queued = OrmQ.objects.count()
        pools = pool_stats.collect_pool_stats(now=now)
        unsaved = pool_stats.find_unsaved_attachments().count()
        missing_state = missing_snapshots.find_missing().count()
        exhausted = len(budgets.find_exhausted(now=now))
        hosts = [*Host.objects.all()]
        webhooks = subscriptions.count_failing()
        mismatch = installation_marks.has_recorded_mismatch()
        is_writable = _is_writable()
    except DatabaseError as error:
        if dialect.is_unavailable(error):
            return _build_report(database=False, missing=["The database does not respond."])
        log.exception("health report failed")
        return _build_report(database=True, missing=["The database reports an error. The log has it."])
    skew = database_time.get_skew()
    egress_row = sweep_rows.pop(EGRESS_HEARTBEAT)
    egress = _get_sweep_status(egress_row, now, EGRESS_HEARTBEAT_INTERVAL)
    sweeps = {name: _get_sweep_status(row, now, schedules.get_interval(name)) for name, row in sweep_rows.items()}
    installed_at = min((host.created_at for host in hosts), default=None)
    host_counts = registry.count_by_state(hosts, now=now)
    has_queue = not sweeps[schedules.HEARTBEAT]["late"]  # without it all sweeps are late, which `missing` says
    is_unmarked = has_queue and _is_unmarked(sweep_rows["mark"], sweeps["mark"])
    overdue = [name for name, status in sweeps.items() if has_queue and is_overdue(status, installed_at, now=now)]
    if is_unmarked:  # has a warning of its own
        overdue = [name for name in overdue if name != "mark"]
    total = pool_stats.sum_stats(pools)
    drift = sweep_rows["recount"].counts.get(COUNTERS_CORRECTED, 0) if sweep_rows["recount"] else 0
    provider = {**provider_probe.get_status()}
    missing = [] if is_writable else ["The database refuses writes."]
    if long_calls.is_shutting_down():
        missing.append("This server is shutting down.")
    if provider.get("key_refused"):
        since = f" since {refused_at:%Y-%m-%d %H:%M} UTC" if (refused_at := provider_probe.refused_at) else ""
        missing.append(f"The provider {provider['name']} refuses the API key{since}.")
    elif not provider["answers"]:
        missing.append(f"The provider {provider['name']} does not respond.")
    if not has_queue:
        missing.append("The queue has no recent heartbeat, so no sweeps run.")
    if pooler.PROBE.is_undeclared():
        missing.append(pooler.UNDECLARED)
    disk = disk_space.measure_free_space() | provider.pop("disk", {})
    warnings = [
        *_iter_schema_warnings(schema), *_iter_warnings(pools, total, unsaved, drift, egress),
        *_iter_budget_warnings(exhausted), *_iter_disk_warnings(disk),
        *_iter_installation_warnings(mismatch), *_iter_skew_warnings(skew, hosts, now=now),
        *_iter_host_warnings(host_counts), *_iter_start_warnings(hosts, pools, now=now), *_iter_sweep_warnings(overdue),
        *_iter_store_warnings(missing_state, is_unmarked=is_unmarked), *_iter_webhook_warnings(webhooks),
        *_iter_agent_warnings(egress_row),
    ]  # fmt: skip
    return _build_report(
        database=True, migrated=True, missing=missing, provider=provider, sweeps=sweeps, queue={"waiting": queued},
        hosts=host_counts, egress=egress, warnings=warnings, disk_free_bytes=disk,
        quarantined=total.quarantined, stalled=total.stalled, lost=total.lost, unsaved=unsaved, drift=drift,
        clock_skew_seconds=round(-skew.total_seconds(), 1),
        pool=pool_stats.serialize_stats(total),
        warming={pool.name: _get_warm_status(pool) for pool in pools if pool.warm_target},
    )  # fmt: skip


def _is_writable() -> bool:
    """Return whether the database accepts a write that changes nothing.

    A standby, a server that is read-only and one with a full disk answer queries."""
    try:
        Installation.objects.update(id=F("id"))
    except OperationalError as error:
        log.error("database refuses writes", error=str(error))
        return False
    return True


def _iter_warnings(pools: Sequence[PoolStats], total: Stats, unsaved: int, drift: int, egress: dict[str, Any]) -> Iterator[str]:
    if egress["late"]:
        yield "The egress proxy has no recent heartbeat, so sandboxes reach no model. Is manage.py egress running?"
    for pool in pools:
        if pool.queue_length:
            yield f'Pool "{pool.name}" is full. Requests that wait for a place: {pool.queue_length}.'
        if pool.warm_target and pool.warm_paused_until:
            until = f"{pool.warm_paused_until:%H:%M:%S} UTC"
            yield f'Pool "{pool.name}" starts no warm sandboxes until {until}, after failed starts.'
    if total.quarantined:
        yield f"Sandboxes in quarantine after failed destroy attempts: {total.quarantined}."
    if unsaved:
        yield f"Sandboxes with unsaved changes in /data: {unsaved}."
    if total.unstored:
        yield f"Sandboxes whose state cannot be stored, so that they do not sleep: {total.unstored}."
    if total.lost:
        yield f"Sandboxes lost by their provider while a lease held them: {total.lost}."
    if total.stalled:
        yield f"Sandboxes stalled past their deadline: {total.stalled}."
    if drift:
        yield f"Pool or quota counters corrected by the last recount: {drift}."


def _iter_schema_warnings(schema: SchemaStatus) -> Iterator[str]:
    """Yield a warning about a newer database. It makes nothing unready: the version before serves until it is replaced."""
    if newer := schema.explain_newer():
        yield newer


def _iter_sweep_warnings(overdue: Sequence[str]) -> Iterator[str]:
    if overdue:
        yield f"Sweeps without a recent success: {', '.join(overdue)}. The page Sweeps and the log have their errors."


def is_overdue(status: Mapping[str, Any], installed_at: datetime | None, *, now: datetime) -> bool:
    """Return whether a sweep is late, and the installation has existed for long enough for the sweep to have succeeded."""
    is_new = installed_at is None or now - installed_at <= get_max_age(timedelta(seconds=status["every_seconds"]))
    return bool(status["late"]) and not (is_new and status["age_seconds"] is None)


def _iter_budget_warnings(exhausted: int) -> Iterator[str]:
    if exhausted:
        yield f"Exhausted hard budgets, whose leases are refused and ended: {exhausted}."


def _iter_host_warnings(hosts: Mapping[str, int]) -> Iterator[str]:
    if hosts["unreachable"]:
        yield f"Hosts without a recent heartbeat, whose sandboxes wait for them: {hosts['unreachable']}. See manage.py hosts."


def _iter_start_warnings(hosts: Sequence[Host], pools: Sequence[PoolStats], *, now: datetime) -> Iterator[str]:
    for host in hosts:
        if start_breaker.is_open(host, now=now):
            until = f"{host.starts_paused_until:%H:%M:%S} UTC"
            yield f'The provider {host.provider} starts no sandboxes on the host "{host}" until {until}, after failed starts.'
        for pool_name in sorted(host.missing_images or {}) if not host.lost_at else ():
            yield f'The image of the pool "{pool_name}" does not exist on the host "{host}": its starts fail there.'
    for pool in pools:
        if pool.starts_failing_since:
            since = f"{pool.starts_failing_since:%Y-%m-%d %H:%M:%S} UTC"
            yield f'Starts of the pool "{pool.name}" fail since {since}: {pool.start_error_code}. See the page of the pool.'


def _is_unmarked(row: Sweep | None, status: Mapping[str, Any]) -> bool:
    """Return whether the sweep that writes to the store each minute is started, and does not succeed."""
    return bool(row and row.started_at) and bool(status["late"])


def _iter_store_warnings(missing: int, *, is_unmarked: bool) -> Iterator[str]:
    if is_unmarked:
        yield "The sweep `mark` fails: the store or the state directory cannot be written, so no state is stored."
    if missing:
        yield f"Snapshots whose objects the store does not find: {missing}. Leases that need one cannot start."


def _iter_webhook_warnings(failing: FailingWebhooks) -> Iterator[str]:
    if failing.disabled:
        yield f"Webhooks disabled after failures, which send nothing: {failing.disabled}. The page Webhooks has their errors."
    if failing.failing:
        yield f"Webhooks whose receiver fails: {failing.failing}. The page Webhooks has their errors."


def _iter_agent_warnings(egress: Sweep | None) -> Iterator[str]:
    if egress and (outdated := egress.counts.get("agent outdated", 0)):
        yield (
            f"Sandboxes whose agent is of another version, so that background processes and terminals fail: {outdated}. "
            "Put them to sleep: they wake with this version's agent."
        )


def _iter_skew_warnings(skew: timedelta, hosts: Sequence[Host], *, now: datetime) -> Iterator[str]:
    """Yield a warning if the clocks of this host and of the database differ. The clocks of other hosts tell which is wrong."""
    if abs(skew) <= database_time.TOLERATED_SKEW:
        return
    offsets = _list_other_clock_offsets(hosts, now=now)
    difference = f"{-skew.total_seconds():+.0f} s"
    if not offsets:
        yield f"The clock of this host differs from the database's by {difference}: synchronize both."
    elif all(abs(offset + skew) <= CLOCK_AGREEMENT for offset in offsets):
        yield f"The clocks of all {len(offsets) + 1} hosts differ from the database's by {difference}: synchronize its host."
    else:
        yield f"The clock of this host differs from the database's by {difference}: synchronize it."


def _list_other_clock_offsets(hosts: Sequence[Host], *, now: datetime) -> list[timedelta]:
    """List the clock offsets of the other machines' live hosts. The hosts of one worker are one machine."""
    own_id = registry.get_remembered_host_id()
    own = next((host for host in hosts if host.pk == own_id), None)
    others = [host for host in hosts if own and host.queue != own.queue and registry.get_state(host, now=now) == "live"]
    return [host.clock_offset for host in others if host.clock_offset is not None]


def set_draining(draining: bool) -> None:
    """Make /readyz of the web processes with this state directory fail, or succeed again."""
    if draining:
        long_calls.get_shutdown_path().touch()
    else:
        long_calls.get_shutdown_path().unlink(missing_ok=True)


def _iter_installation_warnings(mismatch: bool) -> Iterator[str]:
    if mismatch:
        yield (
            "Store or state directory do not match this database: destructive sweeps are refused, no queued run or task "
            "begins, and nothing is delivered. See manage.py installation."
        )
    if settings.OBSERVE:
        yield "Observe mode: nothing is destroyed, deleted or delivered, and no queued run or task begins."


def _iter_disk_warnings(free_bytes: Mapping[str, int]) -> Iterator[str]:
    for name, free in free_bytes.items():
        if free < settings.MIN_FREE_DISK:
            yield f"The {name} disk has {free >> 20} MiB free, less than LEASEHOLD_MIN_FREE_DISK: no sandbox is started."


def _get_warm_status(pool: PoolStats) -> dict[str, Any]:
    paused_until = pool.warm_paused_until
    return {
        "target": pool.warm_target,
        "ready": pool.warm_ready,
        "paused_until": format_optional_timestamp(paused_until),
    }


def _build_report(*, missing: list[str], **report: Any) -> dict[str, Any]:
    return {"status": "not ready" if missing else "ok", "missing": missing, **report}


def _load_sweeps() -> dict[str, Sweep | None]:
    """Load the rows of this host's sweeps and of the installation's. Those of other hosts are in their reports."""
    rows: dict[str, Sweep | None] = dict.fromkeys([*schedules.SCHEDULE, EGRESS_HEARTBEAT])
    own = Q(host__isnull=True) | Q(host=registry.get_remembered_host_id())
    known = Sweep.objects.filter(own, name__in=rows).order_by(F("host").asc(nulls_first=True))
    return rows | {row.name: row for row in known}


def _get_sweep_status(row: Sweep | None, now: datetime, interval: timedelta) -> dict[str, Any]:
    age = now - row.succeeded_at if row and row.succeeded_at else None
    return {
        "age_seconds": round(age.total_seconds(), 1) if age is not None else None,
        "every_seconds": interval.total_seconds(),
        "late": age is None or age > get_max_age(interval),
    }


def get_max_age(interval: timedelta) -> timedelta:
    """Return the age of the last success from which on a sweep of this interval is late."""
    return 3 * interval + timedelta(minutes=1)


@dataclass
class ProviderProbe:
    """Cached status of the provider, queried in a separate thread so that a hanging provider does not block requests."""

    lock: Lock = field(default_factory=Lock)
    queried_at: float = 0.0
    query: Future[dict[str, Any]] | None = None
    refused_at: datetime | None = None  # first of the refusals of the API key in a row that this process has seen
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "health"))

    def get_status(self) -> dict[str, Any]:
        with self.lock:
            if self.query is None or (self.query.done() and time.monotonic() - self.queried_at > PROBE_CACHE_SECONDS):
                self.query, self.queried_at = self.threads.submit(self.query_and_note), time.monotonic()
            query = self.query
        try:
            return query.result(timeout=PROBE_TIMEOUT_SECONDS)
        except TimeoutError:
            return {"name": settings.SANDBOX_PROVIDER, "isolated": None, "answers": False}

    def query_and_note(self) -> dict[str, Any]:
        """Query the provider, and note since when it refuses the API key."""
        status = query_provider()
        if not status.get("key_refused"):
            self.refused_at = None
        elif self.refused_at is None:
            self.refused_at = database_time.now()
        return status


def query_provider() -> dict[str, Any]:
    """Query the provider of new sandboxes. Return its name, whether it isolates and responds, and its free disk space."""
    name = providers.get_default_provider_name()
    try:
        provider = providers.get_provider(name)
        provider.ping()
    except Exception as error:  # any failure means that the provider does not respond
        log.warning("provider does not respond", provider=name, error=f"{type(error).__name__}: {error}")
        refused = {"key_refused": True} if find_cause(error) == FailureCause.CREDENTIALS_REFUSED else {}
        return {"name": name, "isolated": None, "answers": False, **refused}
    free = disk_space.measure_engine_space(provider)
    return {"name": name, "isolated": provider.isolated, "answers": True, "disk": {} if free is None else {"engine": free}}


provider_probe = ProviderProbe()


@dataclass
class SharedReport:
    """Health report for all requests of HEALTH_REPORT_SECONDS. One thread builds it, and the others wait for it."""

    lock: Lock = field(default_factory=Lock)
    built_at: float = -math.inf
    report: dict[str, Any] = field(default_factory=dict)

    def get(self) -> dict[str, Any]:
        with self.lock:
            if time.monotonic() - self.built_at >= settings.HEALTH_REPORT_SECONDS:
                self.report, self.built_at = check_health(now=database_time.now()), time.monotonic()
            return self.report


shared_report = SharedReport()

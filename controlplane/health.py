"""Is it well? /livez: this process answers. /healthz: so does the database, and what else there is to say. /readyz:
nothing that is needed is missing. What is wrong and takes no lease away is in `warnings`.

Without a key, so without a secret: no error's text, no agent's name."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from threading import Lock
from typing import Any

import structlog
from django.conf import settings
from django.db import Error as DatabaseError
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from django.http import HttpRequest, JsonResponse
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe
from django_q.models import OrmQ

from billing import budgets
from controlplane import schedules
from sandboxes import pool_stats, providers
from sandboxes.admin import tabs
from sandboxes.db.clock import format_timestamp
from sandboxes.models import Sweep
from sandboxes.pool_stats import PoolStats, Stats
from sandboxes.sweeps import COUNTERS_CORRECTED

log = structlog.get_logger(__name__)
PROBE_CACHE_SECONDS = 5.0  # seconds for which a provider's answer counts
PROBE_TIMEOUT_SECONDS = 1.0  # seconds that a probe waits for a provider
EGRESS_HEARTBEAT, EGRESS_HEARTBEAT_INTERVAL = "egress", timedelta(minutes=1)  # the heartbeat of `manage.py egress`


@require_safe
@never_cache
def livez(request: HttpRequest) -> JsonResponse:
    return JsonResponse({"status": "ok"})


@require_safe
@never_cache
def healthz(request: HttpRequest) -> JsonResponse:
    found = check_health(now=timezone.now())
    return JsonResponse(found, status=200 if found["database"] else 503)


@require_safe
@never_cache
def readyz(request: HttpRequest) -> JsonResponse:
    found = check_health(now=timezone.now())
    return JsonResponse(found, status=503 if found["missing"] else 200)


def check_health(*, now: datetime) -> dict[str, Any]:
    """What there is to see. `missing` has one sentence for each thing without which leases cannot be served, `warnings`
    for each that an operator should look at."""
    try:
        if find_unapplied_migrations():
            return _build_report(database=True, migrated=False, missing=["Migrations are not applied: run manage.py migrate."])
        passes = _load_sweeps()
        waiting = OrmQ.objects.count()
        pools = pool_stats.collect_pool_stats(now=now)
        unsaved = tabs.find_unsaved_attachments().count()
        spent = len(budgets.find_exhausted(now=now))
    except DatabaseError:
        return _build_report(database=False, missing=["The database does not answer."])
    egress = _get_sweep_status(passes.pop(EGRESS_HEARTBEAT), now, EGRESS_HEARTBEAT_INTERVAL)
    sweeps = {name: _get_sweep_status(row, now, schedules.get_interval(name)) for name, row in passes.items()}
    every = pool_stats.sum_stats(pools)
    drift = passes["recount"].counts.get(COUNTERS_CORRECTED, 0) if passes["recount"] else 0
    provider = provider_probe.answer()
    missing = []
    if not provider["answers"]:
        missing.append(f"The provider {provider['name']} does not answer.")
    if sweeps["heartbeat"]["late"]:
        missing.append("The queue gives no heartbeat, so no sweep runs.")
    return _build_report(
        database=True, migrated=True, missing=missing, provider=provider, sweeps=sweeps, queue={"waiting": waiting},
        egress=egress, warnings=[*_iter_warnings(pools, every, unsaved, drift, egress), *_iter_budget_warnings(spent)],
        quarantined=every.quarantined, stalled=every.stalled, lost=every.lost, unsaved=unsaved, drift=drift,
        warming={one.name: _get_warm_status(one) for one in pools if one.warm_target},
    )  # fmt: skip


def _iter_warnings(pools: Sequence[PoolStats], every: Stats, unsaved: int, drift: int, egress: dict[str, Any]) -> Iterator[str]:
    if egress["late"]:
        yield "The way out gives no heartbeat, so no sandbox reaches a model: is manage.py egress running?"
    for one in pools:
        if one.warm_target and one.warm_paused_until:
            yield f'The pool "{one.name}" warms nothing until {one.warm_paused_until:%H:%M:%S} UTC: its starts failed.'
    if every.quarantined:
        yield f"In quarantine, since destroying failed too often: {every.quarantined}."
    if unsaved:
        yield f"With changes in /data that are stored nowhere else: {unsaved}."
    if every.lost:
        yield f"Lost by their provider while a lease held them: {every.lost}."
    if every.stalled:
        yield f"Stalled, since nobody takes the next step: {every.stalled}."
    if drift:
        yield f"Counters of pools or quotas that the last recount found wrong and set right: {drift}."


def _iter_budget_warnings(budgets_: int) -> Iterator[str]:
    if budgets_:
        yield f"Hard budgets that are spent, so leases are refused and ended: {budgets_}."


def _get_warm_status(pool: PoolStats) -> dict[str, Any]:
    until = pool.warm_paused_until
    return {"target": pool.warm_target, "ready": pool.warm_ready, "paused_until": format_timestamp(until) if until else None}


def _build_report(*, missing: list[str], **found: Any) -> dict[str, Any]:
    return {"status": "not ready" if missing else "ok", "missing": missing, **found}


def find_unapplied_migrations() -> list[str]:
    """Names of migrations that are not applied. Once there are none, this process does not look again."""
    if not _migrations_applied:
        executor = MigrationExecutor(connection)
        plan = executor.migration_plan(executor.loader.graph.leaf_nodes())
        if plan:
            return [str(migration) for migration, _ in plan]
        _migrations_applied.append(True)
    return []


_migrations_applied: list[bool] = []


def _load_sweeps() -> dict[str, Sweep | None]:
    found: dict[str, Sweep | None] = dict.fromkeys([*schedules.SCHEDULE, EGRESS_HEARTBEAT])
    return found | {row.name: row for row in Sweep.objects.filter(name__in=[*schedules.SCHEDULE, EGRESS_HEARTBEAT])}


def _get_sweep_status(row: Sweep | None, now: datetime, every: timedelta) -> dict[str, Any]:
    age = now - row.succeeded_at if row and row.succeeded_at else None
    return {
        "age_seconds": round(age.total_seconds(), 1) if age is not None else None,
        "every_seconds": every.total_seconds(),
        "late": age is None or age > 3 * every + timedelta(minutes=1),
    }


@dataclass
class ProviderProbe:
    """Asks the provider at most every FRESH seconds, in a thread of its own: one that hangs holds up nobody."""

    lock: Lock = field(default_factory=Lock)
    asked_at: float = 0.0
    asked: Future[dict[str, Any]] | None = None
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "health"))

    def answer(self) -> dict[str, Any]:
        with self.lock:
            if self.asked is None or (self.asked.done() and time.monotonic() - self.asked_at > PROBE_CACHE_SECONDS):
                self.asked, self.asked_at = self.threads.submit(query_provider), time.monotonic()
            asked = self.asked
        try:
            return asked.result(timeout=PROBE_TIMEOUT_SECONDS)
        except TimeoutError:
            return {"name": settings.SANDBOX_PROVIDER, "isolated": None, "answers": False}


def query_provider() -> dict[str, Any]:
    """The provider that new sandboxes come from, and whether it answers a question now."""
    name = providers.get_default_provider_name()
    try:
        provider = providers.get_provider(name)
        provider.list("health")
    except Exception as failed:  # whatever it is, it is no answer
        log.warning("provider does not answer", provider=name, error=f"{type(failed).__name__}: {failed}")
        return {"name": name, "isolated": None, "answers": False}
    return {"name": name, "isolated": provider.isolated, "answers": True}


provider_probe = ProviderProbe()

"""Reconciliation of sandbox rows with the listings of providers."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from uuid import UUID

import structlog
from django.core.exceptions import ImproperlyConfigured
from django.db.models import Q

from sandboxes import eviction, providers, suspension
from sandboxes.egress import nginx
from sandboxes.errors import WorkspaceFull
from sandboxes.hosts import registry
from sandboxes.hosts.bound_provider import require_engine
from sandboxes.inventory.names import has_row
from sandboxes.lifecycle import COLD, DESTROYED, SUSPENDED
from sandboxes.models import ALIVE_STATES, Pool, Sandbox
from sandboxes.providers.base import ProviderSandbox
from sandboxes.providers.errors import Missing, ProviderError
from sandboxes.state import unrecorded, unrecorded_data
from sandboxes.storage.base import StoreError
from sandboxes.sweep_log import SweepResult

log = structlog.get_logger(__name__)


def reconcile(*, now: datetime, grace: timedelta) -> SweepResult:
    """Compare the rows of each pool with the listings of the engines that this process reaches.

    - Listed, and named by a row of the same host: unchanged.
    - Listed, and named by no such row (earlier incarnations included): destroyed once older than `grace`. The row of a younger
      sandbox may not be committed yet. If a lease holds the row of its name, its files are kept as a snapshot of the lease
      first; without them it is not destroyed.
    - Alive in its row, not listed, and missing when inspected by name: cold if nothing in it was unsaved, otherwise lost.
    - Listed as suspended, and not `suspended` in its row: resumed. Listed as running, and `suspended` in its row: frozen again.
    - A listing that fails, is empty or comes from another engine changes nothing. A provider that cannot list is skipped.
    - At an engine that a pool has left, the pool's remaining sandboxes are destroyed as those without a row are.
    - A failure is recorded, and the next sandbox, pool or engine follows.
    - An egress proxy without a server is removed, once older than `grace`."""
    result = SweepResult()
    pairs = [*iter_pool_providers()]
    for pool, name in pairs:
        try:
            if not providers.get_provider(name).can_list:  # a lost sandbox is found by its next use
                continue
            host_id = registry.get_local_host_id(name)
            # Read before the listing: a sandbox created later is not expected in the listing.
            alive = find_alive(pool, host_id)
            listed = list_sandboxes(pool, name, host_id)
            _destroy_orphans(pool, name, host_id, listed, result, now=now, grace=grace)
            if listed:
                _handle_missing(alive, listed, result, now=now)
                _repair_suspensions(alive, listed, result, now=now)
            elif alive:
                result.failures.append(f'pool "{pool}", {name}: lists nothing, but {len(alive)} rows are alive')
        except (ProviderError, ImproperlyConfigured) as failed:
            result.failures.append(f'pool "{pool}", {name}: {failed}')
    _destroy_remaining(pairs, result, now=now, grace=grace)
    if nginx.get_proxy_kind() == "nginx":
        try:
            if removed := nginx.remove_orphans(now=now, grace=grace):
                result.note("egress proxies removed", removed)
        except ProviderError as failed:
            result.failures.append(f"egress proxies: {failed}")
    return result


def iter_pool_providers() -> Iterator[tuple[Pool, str]]:
    """Yield each pool with the name of each provider that may have sandboxes for the pool on a host of this process."""
    local = registry.filter_local()
    for pool in Pool.objects.all():
        for name in {pool.provider or providers.get_default_provider_name(), *find_used_providers(pool, local)}:
            yield pool, name


def find_used_providers(pool: Pool, local: Q) -> set[str]:
    """Return the providers of the pool's sandboxes that are not destroyed. The pool's provider may have been changed since."""
    return set(Sandbox.objects.filter(local, pool=pool).exclude(state=DESTROYED).values_list("provider", flat=True))


def find_alive(pool: Pool, host_id: UUID) -> list[Sandbox]:
    return list(Sandbox.objects.filter(pool=pool, host=host_id, state__in=ALIVE_STATES, lost_at__isnull=True))


def list_sandboxes(pool: Pool, provider_name: str, host_id: UUID) -> list[ProviderSandbox]:
    """List the pool's sandboxes on the engine of this host. Raise ProviderError if the listing is not complete.

    Empty for a provider that cannot list.
    The engine is asked for its identity after the listing: the listing of another engine would show orphans and losses."""
    provider = providers.get_provider(provider_name)
    if not provider.can_list:
        return []
    listed = provider.list(str(pool.owner))
    require_engine(provider, host_id)
    return listed


def find_orphans(pool: Pool, provider_name: str, *, now: datetime, grace: timedelta) -> list[ProviderSandbox]:
    """Return the sandboxes that this host's engine lists for a pool, that no row names, and that are older than `grace`.

    Raises ProviderError if the listing is not complete."""
    host_id = registry.get_local_host_id(provider_name)
    return _filter_orphans(pool, host_id, list_sandboxes(pool, provider_name, host_id), now=now, grace=grace)


def _filter_orphans(
    pool: Pool, host_id: UUID, listed: list[ProviderSandbox], *, now: datetime, grace: timedelta
) -> list[ProviderSandbox]:
    # Read after the listing: a row is inserted before its sandbox is created, so each listed sandbox's row is visible here.
    # A row without a host may belong to this host.
    on_this_host = Q(host=host_id) | Q(host__isnull=True)
    rows = Sandbox.objects.filter(on_this_host, pool=pool).exclude(state__in=(DESTROYED, COLD))
    known_names = {sandbox.name for sandbox in rows}
    return [entry for entry in listed if entry.name not in known_names and entry.created_at <= now - grace]


def _destroy_orphans(
    pool: Pool, name: str, host_id: UUID, listed: list[ProviderSandbox], result: SweepResult, *, now: datetime, grace: timedelta
) -> None:
    for orphan in _filter_orphans(pool, host_id, listed, now=now, grace=grace):
        if has_row(orphan.name, host_id):  # adopted since
            continue
        try:
            if (row := unrecorded.find_row(orphan.name)) and unrecorded.store(
                row, orphan, providers.get_provider(name), now=now
            ):
                result.note("unrecorded files kept")
        except (ProviderError, StoreError, WorkspaceFull, *unrecorded_data.NOT_KEPT) as failed:
            result.failures.append(f'pool "{pool}", {name}: {orphan.name} not destroyed, its files could not be kept: {failed}')
            continue
        log.warning("orphan destroyed", name=orphan.name, provider=name, created_at=orphan.created_at.isoformat())
        try:
            providers.get_provider(name).destroy(orphan.ref)
            result.note("orphans destroyed")
        except ProviderError as failed:
            result.failures.append(f'pool "{pool}", {name}: {orphan.name} not destroyed: {failed}')


def _destroy_remaining(pairs: list[tuple[Pool, str]], result: SweepResult, *, now: datetime, grace: timedelta) -> None:
    """Destroy the sandboxes without a row at engines that their pools do not use any more. One listing for each engine.

    An engine that no pool uses may be gone for good: that it does not respond is no failure."""
    pools = {str(pool.owner): pool for pool in Pool.objects.all()}
    for name in registry.find_local_provider_names():
        remaining = {owner: pool for owner, pool in pools.items() if (pool, name) not in pairs}
        try:
            if not remaining or not providers.get_provider(name).can_list:
                continue
            host_id = registry.get_local_host_id(name)
            listed = providers.get_provider(name).list_all()
            require_engine(providers.get_provider(name), host_id)
        except (ProviderError, ImproperlyConfigured) as failed:
            log.info("unused engine not listed", provider=name, error=str(failed))
            result.note("unused engines without a listing")
            continue
        for owner, pool in remaining.items():
            own = [entry for entry in listed if entry.owner == owner]
            _destroy_orphans(pool, name, host_id, own, result, now=now, grace=grace)


def _handle_missing(alive: list[Sandbox], listed: list[ProviderSandbox], result: SweepResult, *, now: datetime) -> None:
    listed_names = {entry.name for entry in listed if not entry.is_remnant}
    for sandbox in alive:
        if sandbox.name in listed_names:
            result.note("kept")
            continue
        try:
            registry.get_sandbox_provider(sandbox).inspect(sandbox.ref)
        except Missing as missing:
            result.note(eviction.record_missing(sandbox, str(missing), now=now, actor="sweep") or "lost race")
        except ProviderError as failed:
            result.failures.append(f'pool "{sandbox.pool}", {sandbox.provider}: {sandbox.name} not found: {failed}')


def _repair_suspensions(alive: list[Sandbox], listed: list[ProviderSandbox], result: SweepResult, *, now: datetime) -> None:
    """Resume frozen sandboxes whose rows are not suspended, and freeze or stop those that were suspended before the listing."""
    listed_by_name = {entry.name: entry for entry in listed}
    for sandbox in alive:
        entry = listed_by_name.get(sandbox.name)
        if entry is None:
            continue
        is_suspended = sandbox.state == SUSPENDED
        provider = registry.get_sandbox_provider(sandbox)
        if entry.suspended and not is_suspended:
            if not provider.suspend_keeps_processes:  # its vendor has stopped it when it was idle, and the next use starts it
                continue
            resumed = suspension.recover_frozen(sandbox, provider)
            result.note("frozen sandboxes resumed" if resumed else "lost race")
        elif entry.running and is_suspended and sandbox.deadline_at is None:
            suspended = suspension.continue_suspension(sandbox, now=now, actor="sweep")
            result.note("suspended sandboxes frozen" if suspended else "lost race")

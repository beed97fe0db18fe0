"""Reconciliation of sandbox rows with the listings of providers."""

from collections.abc import Iterator
from datetime import datetime, timedelta

import structlog
from django.core.exceptions import ImproperlyConfigured

from sandboxes import eviction, providers
from sandboxes.egress import nginx
from sandboxes.lifecycle import COLD, DESTROYED
from sandboxes.models import ALIVE_STATES, Pool, Sandbox
from sandboxes.providers.base import Missing, ProviderError, ProviderSandbox
from sandboxes.sweep_log import SweepResult

log = structlog.get_logger(__name__)


def reconcile(*, now: datetime, grace: timedelta) -> SweepResult:
    """Compare the rows of each pool with the listings of its providers.

    - Listed, and named by a row: unchanged.
    - Listed, and named by no row (earlier incarnations included): destroyed once older than `grace`. The row of a younger
      sandbox may not be committed yet.
    - Alive in its row, not listed, and missing when inspected by name: cold if nothing in it was unsaved, otherwise lost.
    - A listing that fails or is empty changes nothing.
    - An egress proxy without a server is removed, once older than `grace`."""
    result = SweepResult()
    for pool, name in iter_pool_providers():
        try:
            alive = find_alive(pool, name)  # read before the listing: a sandbox created later is not expected in the listing
            listed = providers.get_provider(name).list(str(pool.owner))
            _destroy_orphans(pool, name, listed, result, now=now, grace=grace)
            if listed:
                _handle_missing(alive, listed, result, now=now)
            elif alive:
                result.failures.append(f'pool "{pool}", {name}: lists nothing, but {len(alive)} rows are alive')
        except (ProviderError, ImproperlyConfigured) as failed:
            result.failures.append(f'pool "{pool}", {name}: {failed}')
    if nginx.get_proxy_kind() == "nginx":
        try:
            if removed := nginx.remove_orphans(now=now, grace=grace):
                result.note("egress proxies removed", removed)
        except ProviderError as failed:
            result.failures.append(f"egress proxies: {failed}")
    return result


def iter_pool_providers() -> Iterator[tuple[Pool, str]]:
    """Yield each pool with the name of each provider that may have sandboxes for the pool."""
    for pool in Pool.objects.all():
        for name in {pool.provider or providers.get_default_provider_name(), *find_used_providers(pool)}:
            yield pool, name


def find_used_providers(pool: Pool) -> set[str]:
    """Return the providers of the pool's sandboxes that are not destroyed. The pool's provider may have been changed since."""
    return set(Sandbox.objects.filter(pool=pool).exclude(state=DESTROYED).values_list("provider", flat=True))


def find_alive(pool: Pool, provider_name: str) -> list[Sandbox]:
    return list(Sandbox.objects.filter(pool=pool, provider=provider_name, state__in=ALIVE_STATES, lost_at__isnull=True))


def find_orphans(pool: Pool, provider_name: str, *, now: datetime, grace: timedelta) -> list[ProviderSandbox]:
    """Return the sandboxes that a provider lists for a pool, that no row names, and that are older than `grace`.

    Raises ProviderError if the listing is not complete."""
    return _filter_orphans(pool, providers.get_provider(provider_name).list(str(pool.owner)), now=now, grace=grace)


def _filter_orphans(pool: Pool, listed: list[ProviderSandbox], *, now: datetime, grace: timedelta) -> list[ProviderSandbox]:
    # Read after the listing: a row is inserted before its sandbox is created, so each listed sandbox's row is visible here.
    known_names = {sandbox.name for sandbox in Sandbox.objects.filter(pool=pool).exclude(state__in=(DESTROYED, COLD))}
    return [entry for entry in listed if entry.name not in known_names and entry.created_at <= now - grace]


def _destroy_orphans(
    pool: Pool, name: str, listed: list[ProviderSandbox], result: SweepResult, *, now: datetime, grace: timedelta
) -> None:
    for orphan in _filter_orphans(pool, listed, now=now, grace=grace):
        log.warning("orphan destroyed", name=orphan.name, provider=name, created_at=orphan.created_at.isoformat())
        providers.get_provider(name).destroy(orphan.ref)
        result.note("orphans destroyed")


def _handle_missing(alive: list[Sandbox], listed: list[ProviderSandbox], result: SweepResult, *, now: datetime) -> None:
    listed_names = {entry.name for entry in listed if not entry.is_remnant}
    for sandbox in alive:
        if sandbox.name in listed_names:
            result.note("kept")
            continue
        try:
            providers.get_provider(sandbox.provider).inspect(sandbox.ref)
        except Missing as missing:
            result.note(eviction.record_missing(sandbox, str(missing), now=now, actor="sweep") or "lost race")

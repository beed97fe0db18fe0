"""Heartbeat sweep: record of reachable hosts, assignment of sandboxes to them, and clean-up of returned hosts."""

from contextlib import suppress
from datetime import datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import structlog
from django.core.exceptions import ImproperlyConfigured

from sandboxes import providers
from sandboxes.db import database_time
from sandboxes.hosts import engine_quotas, images, registry
from sandboxes.lifecycle import COLD, DESTROYED
from sandboxes.models import Host, Pool, Sandbox
from sandboxes.providers.base import Provider
from sandboxes.providers.errors import Missing, ProviderError
from sandboxes.sweep_log import SweepResult
from sandboxes.sweeps import installation, reconciliation

log = structlog.get_logger(__name__)


def record_heartbeats(*, now: datetime) -> SweepResult:
    """Sweep: record each engine that this process reaches as alive.

    1. Ask the engine for its identity, its memory, its limits and the images of pools, and update the row of its host.
    2. Assign sandboxes of earlier versions, whose rows have no host.
    3. Clean up a host that was declared lost and has returned."""
    result = SweepResult()
    for name in registry.find_provider_names():
        try:
            host = _record(providers.get_provider(name), now=now)
        except ProviderError as failed:
            result.failures.append(f"{name}: {failed}")
            _note_silence(name, str(failed))
            continue
        except ImproperlyConfigured:  # provider of a pool whose sandboxes are on other hosts
            continue
        engine_quotas.record_quotas(providers.get_provider(name), host, now=now)
        result.note("images missing", len(images.record_missing_images(providers.get_provider(name), host)))
        result.note("hosts seen")
        result.note("sandboxes assigned", _assign_sandboxes(host))
        if host.lost_at:
            cleaned = installation.run_if_matching(partial(_clean_up, host))
            result.counts |= cleaned.counts
            result.failures += cleaned.failures
    return result


def _record(provider: Provider, *, now: datetime) -> Host:
    """Update the row of the host whose engine responds now. Raise ProviderError if it does not respond."""
    registry.remember_engine(provider.name, provider.engine_id())
    host = registry.get_local_host(provider.name, now=now)
    Host.objects.filter(pk=host.pk).update(
        heartbeat_at=now,
        queue=registry.get_queue_name(),
        version=get_version(),
        memory_mib=provider.total_memory_mib(),
        clock_offset=-database_time.get_skew(),
    )
    return host


def _note_silence(provider_name: str, error: str) -> None:
    """Record at the host, if this process knows it, that its engine does not respond: limits on its page are the last ones."""
    with suppress(ProviderError):
        if host := Host.objects.filter(pk=registry.get_local_host_id(provider_name)).exclude(quotas_read_at=None).first():
            engine_quotas.record_failure(host, error)


def get_version() -> str:
    try:
        return version("leasehold")
    except PackageNotFoundError:  # run from a source directory
        return ""


def _assign_sandboxes(host: Host) -> int:
    """Assign rows without a host to this host: all if the provider has no other host, else the sandboxes that its engine has.

    Return the number assigned."""
    unassigned = Sandbox.objects.filter(host__isnull=True, provider=host.provider).exclude(state__in=(COLD, DESTROYED))
    if not Host.objects.filter(provider=host.provider).exclude(pk=host.pk).exists():
        return unassigned.update(host=host)
    provider = providers.get_provider(host.provider)
    pks = [sandbox.pk for sandbox in unassigned if _has_sandbox(provider, sandbox)]
    return Sandbox.objects.filter(pk__in=pks, host__isnull=True).update(host=host)


def _has_sandbox(provider: Provider, sandbox: Sandbox) -> bool:
    try:
        provider.inspect(sandbox.ref)
    except (Missing, ProviderError):
        return False
    return True


def _clean_up(host: Host) -> SweepResult:
    """Destroy the remaining sandboxes of a returned host, then accept the host again.

    Their places and egress slots were released when the host was declared lost. Until the old sandboxes are gone, a new
    sandbox on the host could share the socket of a slot with one of them."""
    result, provider = SweepResult(), providers.get_provider(host.provider)
    if Sandbox.objects.filter(host=host).exclude(state__in=(COLD, DESTROYED)).exists():
        result.failures.append(f'host "{host}": declared lost, and its sandboxes are still being released')
        return result
    try:
        for pool in Pool.objects.all():
            for leftover in reconciliation.list_sandboxes(pool, host.provider, host.pk):
                log.warning("leftover of a lost host destroyed", host=host.name, name=leftover.name)
                provider.destroy(leftover.ref)
                result.note("leftovers destroyed")
    except ProviderError as failed:
        result.failures.append(f'host "{host}": {failed}')
        return result
    if Host.objects.filter(pk=host.pk, lost_at=host.lost_at).update(lost_at=None):
        log.warning("lost host returned", host=host.name)
        result.note("hosts returned")
    return result

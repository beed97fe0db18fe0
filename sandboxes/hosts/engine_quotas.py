"""Limits of an engine on all sandboxes together, as its worker last read them, beside the capacity of the pools.

Pages read the row of the host: they do not wait for the engine."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta

from sandboxes import providers
from sandboxes.models import Host, Pool
from sandboxes.providers.base import Provider
from sandboxes.providers.engine_reports import EngineQuota, QuotaMeasure
from sandboxes.providers.errors import ProviderError
from sandboxes.providers.registry import PROVIDERS

STALE_AFTER = timedelta(minutes=5)  # the worker reads every minute
GIBI_IN_MEBI = 1024


@dataclass(frozen=True)
class QuotaUse:
    """One limit with its use, and the amount that all pools need at their capacities. An empty text: not known."""

    name: str
    resource: str
    used: str
    hard: str
    percent: float | None
    needed: str
    exceeds: bool  # the capacities need more than the limit permits


def record_quotas(provider: Provider, host: Host, *, now: datetime) -> None:
    """Store the limits of the engine of a host, or why they cannot be read; the last values stay then."""
    if not provider.has_quotas:
        return
    try:
        entries = provider.read_quotas()
    except ProviderError as error:
        record_failure(host, str(error))
        return
    stored = [asdict(entry) for entry in entries]
    Host.objects.filter(pk=host.pk).update(quotas=stored, quotas_read_at=now, quotas_error="")


def record_failure(host: Host, error: str) -> None:
    """Store why the limits cannot be read."""
    Host.objects.filter(pk=host.pk).update(quotas_error=error)


def find_hosts(provider_name: str) -> list[Host]:
    """Return the hosts of a provider that has limits of this kind, without those that are lost."""
    entry = PROVIDERS.get(provider_name)
    return [*Host.objects.filter(provider=provider_name, lost_at__isnull=True)] if entry and entry.has_quotas else []


def describe_failure(host: Host, *, now: datetime) -> str:
    """Return why the stored limits may be outdated. Empty: they are not."""
    if host.quotas_error:
        return host.quotas_error
    if host.quotas_read_at and host.quotas_read_at < now - STALE_AFTER:
        return "No worker has read them since."
    return ""


def list_uses(host: Host) -> list[QuotaUse]:
    """Return the stored limits of a host, each compared with the capacities of the pools whose sandboxes it runs.

    Pools that share several hosts of the provider are not compared: the division of their places is not known."""
    entries = [EngineQuota(**stored) for stored in host.quotas]
    shares_pools = Host.objects.filter(provider=host.provider, lost_at__isnull=True).exclude(pk=host.pk).exists()
    totals = {} if shares_pools or not entries else sum_capacities(find_pools(host.provider))
    return [_compare(entry, totals.get(QuotaMeasure(entry.measure))) for entry in entries]


def find_pools(provider_name: str) -> list[Pool]:
    """Return the pools whose sandboxes start at a provider."""
    is_default = provider_name == providers.get_default_provider_name()
    return [pool for pool in Pool.objects.all() if pool.provider == provider_name or (is_default and not pool.provider)]


def sum_capacities(pools: Iterable[Pool]) -> dict[QuotaMeasure, int]:
    """Return number and sizes of the sandboxes of full pools."""
    totals = dict.fromkeys(QuotaMeasure, 0)
    for pool in pools:
        totals[QuotaMeasure.SANDBOXES] += pool.capacity
        totals[QuotaMeasure.MEMORY_MIB] += pool.capacity * pool.memory_mib
        totals[QuotaMeasure.MILLICPUS] += pool.capacity * pool.millicpus
    return totals


def _compare(entry: EngineQuota, total: int | None) -> QuotaUse:
    used, hard = entry.used_amount, entry.hard_amount
    if hard is None:
        return QuotaUse(entry.name, entry.resource, entry.used, entry.hard, None, "", False)
    needed = None if total is None else round(total * entry.amount_per_measure)
    return QuotaUse(
        name=entry.name,
        resource=entry.resource,
        used="" if used is None else format_amount(used, entry.unit),
        hard=format_amount(hard, entry.unit),
        percent=None if used is None else min(100.0 * used / hard if hard else 100.0, 100.0),
        needed="" if needed is None else format_amount(needed, entry.unit),
        exceeds=needed is not None and needed > hard,
    )


def format_amount(amount: int, unit: str) -> str:
    """Format an amount of EngineQuota in the notation of Kubernetes, with CPUs and Gi where these are shorter."""
    if unit == "Mi" and amount >= GIBI_IN_MEBI:
        return f"{round(amount / GIBI_IN_MEBI, 1):,g}Gi"
    if unit == "m":
        return f"{round(amount / 1000, 3):,g}"
    return f"{amount:,}{unit if amount else ''}"

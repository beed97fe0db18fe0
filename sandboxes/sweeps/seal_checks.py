"""Sweep of the checks that sandboxes reach the gateway alone, for providers that have to prove it."""

from datetime import datetime, timedelta

import structlog
from django.core.exceptions import ImproperlyConfigured
from django.db.models import Q, QuerySet

from sandboxes import providers
from sandboxes.db.clock import clock_from
from sandboxes.hosts import registry
from sandboxes.models import Host
from sandboxes.providers.errors import ProviderError
from sandboxes.sweep_log import SweepResult

log = structlog.get_logger(__name__)
CHECK_INTERVAL = timedelta(days=1)
RETRY_INTERVAL = timedelta(minutes=10)  # until a check has passed


def check_seals(*, now: datetime) -> SweepResult:
    """Check each engine of this process that has to prove its isolation, once a day and until it has.

    A check that could not be made changes nothing: the result of the last one stays, and the next pass tries again."""
    result, clock = SweepResult(), clock_from(now)
    for name in registry.find_provider_names():
        try:
            provider = providers.get_provider(name)
            if not provider.proves_isolation:
                continue
            host = registry.get_local_host(name, now=now)
            if not _claim(host, now=now):
                continue
            report = provider.check_seal()
        except (ProviderError, ImproperlyConfigured) as failed:
            result.failures.append(f"{name}: not checked: {failed}")
            continue
        Host.objects.filter(pk=host.pk).update(sealed=report.sealed, seal_checked_at=clock(), seal_report=report.text)
        result.note("sealed" if report.sealed else "not sealed")
        if not report.sealed:
            log.error("sandboxes are not sealed", host=host.name, report=report.text)
            result.failures.append(f"{name}: {report.text}")
    return result


def find_due_hosts(*, now: datetime) -> QuerySet[Host]:
    """Select the known hosts of this process whose check is due."""
    proving = [name for name in registry.find_local_provider_names() if providers.get_provider(name).proves_isolation]
    return Host.objects.filter(find_due(now=now), provider__in=proving, pk__in=registry.find_local_host_ids())


def find_due(*, now: datetime) -> Q:
    """Return the condition that the check of a host is due."""
    return (
        Q(seal_checked_at__isnull=True)
        | Q(sealed=True, seal_checked_at__lte=now - CHECK_INTERVAL)
        | (~Q(sealed=True) | Q(sealed__isnull=True)) & Q(seal_checked_at__lte=now - RETRY_INTERVAL)
    )


def _claim(host: Host, *, now: datetime) -> bool:
    """Take over the check of a host that is due. Another process does not check it within the interval."""
    return bool(Host.objects.filter(find_due(now=now), pk=host.pk).update(seal_checked_at=now))

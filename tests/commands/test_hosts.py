"""manage.py hosts: the list, and the declaration of a loss; and the same state in health and metrics."""

from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError
from django.test import Client
from django.utils import timezone

from controlplane import metrics
from leases.models import Lease
from sandboxes.models import Host, Sandbox
from sandboxes.providers.memory import MemoryProvider
from tests.commands.manage import call
from tests.support.leases import run

pytestmark = pytest.mark.django_db


@pytest.fixture
def host(grant: Any, memory: MemoryProvider) -> Host:
    """Host with a sandbox and a recent heartbeat."""
    with memory.on_engine("engine-a"):
        run(grant(now=timezone.now()), now=timezone.now())
    Host.objects.update(name="alpha", heartbeat_at=timezone.now(), memory_mib=4096)
    return Host.objects.get()


def silence(host: Host) -> None:
    Host.objects.filter(pk=host.pk).update(heartbeat_at=timezone.now() - timedelta(hours=1))


def test_hosts_are_listed_with_state_sandboxes_and_engine(host: Host) -> None:
    assert call("hosts").startswith("alpha: live, last heartbeat 20")
    assert "1 sandboxes, 4,096 MiB, memory engine engine-a" in call("hosts")
    silence(host)
    assert call("hosts").startswith("alpha: unreachable")


def test_only_a_silent_host_is_declared_lost_and_a_dry_run_changes_nothing(host: Host) -> None:
    with pytest.raises(CommandError, match=r"Unknown host: beta. Known: alpha."):
        call("hosts", "--lost", "beta")
    with pytest.raises(CommandError, match="has a recent heartbeat"):
        call("hosts", "--lost", "alpha")
    silence(host)
    assert f"would release {Sandbox.objects.get().pk} waiting" in call("hosts", "--lost", "alpha", "--dry-run")
    assert (Sandbox.objects.get().state, Lease.objects.get().status) == ("waiting", "active")
    assert "alpha: declared lost, 1 sandboxes released, 0 remain" in call("hosts", "--lost", "alpha")
    assert (Sandbox.objects.get().state, Lease.objects.get().end_reason) == ("destroyed", "lost")
    assert call("hosts").startswith("alpha: lost")


def test_a_silent_host_is_a_warning_and_a_metric(host: Host, client: Client, settings: Any) -> None:
    silence(host)
    settings.METRICS_TOKEN = "scraper-" * 3
    report = client.get("/healthz").json()
    assert report["hosts"] == {"live": 0, "unreachable": 1, "lost": 0}
    assert any("Hosts without a recent heartbeat" in warning for warning in report["warnings"])
    scraped = client.get("/metrics", headers={"Authorization": f"Bearer {settings.METRICS_TOKEN}"}).content.decode()
    assert 'leasehold_host_heartbeat_age_seconds{host="alpha",state="unreachable"} 36' in scraped


def test_paused_starts_are_shown_everywhere_and_resumed(
    host: Host, client: Client, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "snapshot_cache", metrics.SnapshotCache())
    settings.METRICS_TOKEN = "scrape"
    until = timezone.now() + timedelta(minutes=5)
    Host.objects.update(start_failures=3, starts_paused_until=until)
    warning = f'The provider memory starts no sandboxes on the host "alpha" until {until:%H:%M:%S} UTC, after failed starts.'
    assert warning in client.get("/healthz").json()["warnings"]
    scraped = client.get("/metrics", headers={"Authorization": "Bearer scrape"}).content.decode()
    assert 'leasehold_starts_paused{host="alpha",provider="memory"} 1.0' in scraped
    assert f"starts paused until {until:%H:%M:%S} UTC" in call("hosts")
    assert call("hosts", "--resume-starts", "alpha") == "alpha: starts resumed\n"
    assert call("hosts", "--resume-starts", "alpha") == "alpha: starts were not paused\n"

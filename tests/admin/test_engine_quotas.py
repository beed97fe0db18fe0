"""Quota of a cluster beside the capacity of the pools, on the pages of pools and hosts."""

from dataclasses import asdict
from uuid import uuid4

import pytest
from django.test import Client
from django.utils import timezone

from sandboxes.hosts import engine_quotas
from sandboxes.models import Host, Pool
from sandboxes.providers.engine_reports import EngineQuota, QuotaMeasure
from tests.conftest import MINUTE
from tests.support.console import fetch, get_fields, row_url

pytestmark = pytest.mark.django_db
PODS = EngineQuota("sandboxes", "pods", "60", "12", 60, 12)
MEMORY = EngineQuota("sandboxes", "limits.memory", "40Gi", "6442450944", 40960, 6144, "Mi", QuotaMeasure.MEMORY_MIB)
REQUESTED_CPU = EngineQuota("sandboxes", "requests.cpu", "10", "0", 10000, 0, "m", QuotaMeasure.MILLICPUS, 0.25)
SECRETS = EngineQuota("objects", "count/secrets", "1k", "12")


@pytest.fixture
def host() -> Host:
    entries = [asdict(entry) for entry in (PODS, MEMORY, REQUESTED_CPU, SECRETS)]
    now = timezone.now()
    return Host.objects.create(
        pk=uuid4(), provider="kubernetes", engine_id="uid", name="cluster", created_at=now, heartbeat_at=now,
        quotas=entries, quotas_read_at=now,
    )  # fmt: skip


@pytest.fixture
def pods_pool(host: Host) -> Pool:
    return Pool.objects.create(name="pods", provider="kubernetes", capacity=40, memory_mib=1024, millicpus=1000)


def test_quota_is_compared_with_the_capacity_of_all_pools_of_the_cluster(viewer: Client, host: Host, pods_pool: Pool) -> None:
    field = get_fields(viewer, row_url(pods_pool))["Cluster quota"]
    assert (field.value, field.alarm) == ("covers capacity", False)
    assert field.note == "pods: 12 of 60 used"
    uses = {use.resource: (use.used, use.hard, use.needed) for use in engine_quotas.list_uses(host)}
    assert uses == {
        "pods": ("12", "60", "40"), "limits.memory": ("6Gi", "40Gi", "40Gi"), "requests.cpu": ("0", "10", "10"),
        "count/secrets": ("12", "1k", ""),
    }  # fmt: skip

    Pool.objects.create(name="more", provider="kubernetes", capacity=1, memory_mib=512, millicpus=100)
    for row in (host, pods_pool):
        field = get_fields(viewer, row_url(row))["Cluster quota"]
        assert (field.value, field.alarm) == ("below capacity", True)
        assert field.note == "limits.memory: pools need 40.5Gi, quota 40Gi; requests.cpu: pools need 10.025, quota 10"
        assert "capacity_exhausted" in fetch(viewer, row_url(row))


def test_engine_that_does_not_respond_is_said_and_the_last_values_are_dated(viewer: Client, host: Host) -> None:
    engine_quotas.record_failure(host, "no answer of the API server")
    field, page = get_fields(viewer, row_url(host))["Cluster quota"], fetch(viewer, row_url(host))
    assert (field.value, field.note, field.alarm) == ("outdated", "no answer of the API server", True)
    assert "Not read since then: no answer of the API server" in page and "40Gi" in page
    Host.objects.filter(pk=host.pk).update(quotas_error="", quotas_read_at=timezone.now() - 6 * MINUTE)
    assert get_fields(viewer, row_url(host))["Cluster quota"].alarm

    Host.objects.filter(pk=host.pk).update(quotas=[], quotas_read_at=None, quotas_error="refused")
    assert get_fields(viewer, row_url(host))["Cluster quota"].value == "unknown"
    assert "Not readable: refused" in fetch(viewer, row_url(host))


def test_namespace_without_a_quota_and_clusters_that_share_pools_are_not_compared(
    viewer: Client, host: Host, pods_pool: Pool
) -> None:
    Host.objects.create(pk=uuid4(), provider="kubernetes", engine_id="other", name="second", created_at=timezone.now())
    assert get_fields(viewer, row_url(host))["Cluster quota"].value == "not compared"
    Host.objects.filter(pk=host.pk).update(quotas=[])
    assert get_fields(viewer, row_url(host))["Cluster quota"].value == "none"
    assert "Cluster quota" not in get_fields(viewer, row_url(Pool.objects.get(name="default")))

"""ResourceQuotas as the worker reads them from the API server."""

import pytest
from django.utils import timezone

from sandboxes.hosts import engine_quotas
from sandboxes.models import Host
from sandboxes.sweeps.heartbeat import record_heartbeats
from tests.conftest import MINUTE
from tests.emulators.base import CUT_BEFORE, Fault
from tests.emulators.kubernetes.api.resources import QUOTAS
from tests.emulators.kubernetes.faults import NOT_STARTED, PodFault
from tests.support.cluster import NAMESPACE

pytestmark = [pytest.mark.docker, pytest.mark.django_db]


@pytest.fixture
def scoped(cluster):
    """A second quota, for some Pods only."""
    item = {"metadata": {"name": "scoped", "namespace": NAMESPACE}, "spec": {"hard": {"pods": "5"}, "scopes": ["BestEffort"]}}
    cluster.emulator.store.create(QUOTAS, {"apiVersion": "v1", "kind": "ResourceQuota", **item})
    yield
    cluster.emulator.store.remove(QUOTAS, NAMESPACE, "scoped")


def test_worker_records_the_quota_and_keeps_it_while_the_api_server_does_not_respond(
    cluster, provider, spec, default_provider, scoped
):
    cluster.emulator.cluster_faults.pods.append(PodFault("lhp-", NOT_STARTED))
    provider.create(spec)
    now = timezone.now()
    record_heartbeats(now=now)
    host = Host.objects.get(provider="kubernetes")
    uses = {(use.name, use.resource): (use.used, use.hard) for use in engine_quotas.list_uses(host)}
    assert uses["sandboxes", "limits.memory"] == ("64Mi", "40Gi")
    assert uses["sandboxes", "pods"] == ("1", "60")
    assert host.quotas[-1]["hard_amount"] is None  # of the scoped one: it does not count every Pod
    assert (host.quotas_read_at, host.quotas_error) == (now, "")

    for pattern in (r"^GET .*/resourcequotas$", r"^GET /api/v1/namespaces/leasehold-sandboxes$"):
        cluster.emulator.faults.append(Fault(pattern, CUT_BEFORE))
        record_heartbeats(now=now + MINUTE)
        host.refresh_from_db()
        assert "no answer of the API server" in host.quotas_error
        assert (len(host.quotas), host.quotas_read_at) == (3, now)
        record_heartbeats(now=now)

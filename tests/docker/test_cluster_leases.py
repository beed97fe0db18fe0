"""Leases on a real cluster. The emulator has more ends of Pods: test_kubernetes_leases.py."""

import re
from datetime import timedelta

import pytest
from django.utils import timezone

from sandboxes import providers
from sandboxes.errors import NotIsolated
from sandboxes.models import Host, Pool
from sandboxes.providers.errors import FailureCause, Missing
from sandboxes.sweeps import end_watch, seal_checks
from tests.conftest import DOCKER_IMAGE, MINUTE
from tests.emulators.kubernetes.emulator import GATEWAY
from tests.support import real_cluster
from tests.support.cluster import configured_cluster
from tests.support.leases import get_sandbox, read, run, write
from tests.support.remote_agent import serving_gateway
from tests.support.servers.egress import EventLoopThread
from tests.support.servers.tls import create_certificates

pytestmark = [
    pytest.mark.docker,
    pytest.mark.matrix("needs a cluster: test_kubernetes_leases.py has a life of a lease on the emulator"),
    pytest.mark.django_db(transaction=True),
]


@pytest.fixture
def cluster(cluster_access, tmp_path, settings):
    """The cluster as the default provider's, with a running gateway."""
    files, loop = create_certificates(tmp_path, GATEWAY), EventLoopThread()
    listen, url = cluster_access.listen, f"https://{GATEWAY}:{cluster_access.gateway.port}"
    with (
        serving_gateway(loop, listen.port, files, host=listen.host),
        real_cluster.prepared_cluster(cluster_access, tmp_path) as cluster,
    ):
        settings.SANDBOX_IMAGE, settings.GATEWAY_AUTHORITY = DOCKER_IMAGE, str(files.authority)
        with configured_cluster(cluster, url, settings):
            yield cluster
    loop.close()


@pytest.fixture
def pool(db):
    return Pool.objects.create(name="pods", provider="kubernetes", image=DOCKER_IMAGE, capacity=10, memory_mib=256)


def test_permissions_and_quota_of_the_deployment(cluster):
    provider = cluster.connect()
    assert provider.find_setup_problems() == []
    assert {quota.resource for quota in provider.read_quotas()} == {"pods", "limits.memory"}


def test_sandboxes_are_sealed_if_the_cluster_enforces_policies(cluster, pool, grant, settings):
    settings.ALLOW_UNISOLATED = settings.DEBUG = False
    seal_checks.check_seals(now=timezone.now())
    host = Host.objects.get(provider="kubernetes")
    assert "gateway: answered" in host.seal_report
    assert host.sealed == cluster.access.enforces_policies, host.seal_report
    if not host.sealed:
        assert re.search(r"^another Pod \(.*\): REACHED$", host.seal_report, re.MULTILINE)
        with pytest.raises(NotIsolated):
            run(grant(now=timezone.now()), "true", now=timezone.now())


def test_lease_survives_an_eviction_and_ends_as_lost_once_its_pod_is_deleted(cluster, grant, settings, monkeypatch):
    now = timezone.now()
    lease = grant(now=now)
    assert run(lease, "id", "-u", now=now).stdout == b"10001\n"
    write(lease, now=now)
    sandbox = get_sandbox(lease)
    assert cluster.kubectl.read("pod", sandbox.ref)["metadata"]["uid"] == sandbox.pod_uid

    cluster.evict(sandbox.ref)
    monkeypatch.setattr(end_watch, "WATCH_TIME", timedelta(seconds=10))
    assert end_watch.watch_ends(now=now).counts == {"put to sleep": 1}
    assert not cluster.lists(sandbox.ref)
    sandbox.refresh_from_db()
    # Since 1.26 the condition DisruptionTarget has the reason. Before, an eviction looks like any deletion.
    assert sandbox.pod_end_cause == (FailureCause.NODE_DRAINED if cluster.version >= (1, 26) else FailureCause.REMOVED)
    assert read(lease, now=now + MINUTE) == "kept"

    sandbox.refresh_from_db()
    write(lease, "unsaved", now=now + 2 * MINUTE)
    cluster.kubectl.run("delete", "pod", sandbox.ref, "--grace-period=1", "--wait=true")
    with pytest.raises(Missing):
        providers.get_provider("kubernetes").inspect(sandbox.ref)
    assert end_watch.watch_ends(now=now + 3 * MINUTE).counts == {"lost": 1}
    sandbox.refresh_from_db()
    assert sandbox.lost_at

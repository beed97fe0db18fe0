"""Leases on Kubernetes: start, command, drain of the node, wake and loss, on the emulator, with the agent over TLS."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.utils import timezone

from leases import leasing
from sandboxes.errors import NotIsolated
from sandboxes.models import Host, Pool, Sandbox
from sandboxes.pool.lifetimes import end_lifetimes
from sandboxes.sweeps import end_watch, reconciliation, seal_checks
from tests.conftest import DOCKER_IMAGE, MINUTE
from tests.emulators.kubernetes.api.resources import PODS, SECRETS
from tests.emulators.kubernetes.emulator import GATEWAY
from tests.emulators.registry import serve_kubernetes
from tests.support.cluster import NAMESPACE, Cluster, configured_cluster
from tests.support.leases import get_sandbox, read, run, write
from tests.support.remote_agent import serving_gateway
from tests.support.servers import ports
from tests.support.servers.egress import EventLoopThread
from tests.support.servers.tls import create_certificates

pytestmark = [pytest.mark.docker, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def cluster(docker_ready, tmp_path_factory, settings):
    """The cluster as the default provider's, with a running gateway."""
    files, [port], loop = (
        create_certificates(tmp_path_factory.mktemp("tls"), GATEWAY),
        ports.find_free_ports(),
        EventLoopThread(),
    )
    with serving_gateway(loop, port, files), serve_kubernetes(tmp_path_factory.mktemp("kubernetes")) as emulator:
        cluster = Cluster(emulator, SimpleNamespace(port=port))
        settings.SANDBOX_IMAGE, settings.GATEWAY_AUTHORITY = DOCKER_IMAGE, str(files.authority)
        with configured_cluster(cluster, f"https://{GATEWAY}:8443", settings):
            yield cluster
    loop.close()


@pytest.fixture
def pool(db):
    return Pool.objects.create(name="pods", provider="kubernetes", image=DOCKER_IMAGE, capacity=10, memory_mib=128)


def test_lease_on_kubernetes_survives_a_drain_and_ends_as_lost_with_the_reason(cluster, grant, settings, monkeypatch):
    now = timezone.now()  # as the cluster
    lease = grant(now=now)
    settings.ALLOW_UNISOLATED = settings.DEBUG = False
    with pytest.raises(NotIsolated):
        run(lease, "true", now=now)
    assert seal_checks.check_seals(now=now).counts == {"sealed": 1}
    assert "another Pod" in Host.objects.get(provider="kubernetes").seal_report

    result = run(lease, "sh", "-c", "id -u; cat /run/leasehold/gateway.json | wc -c", now=now)
    assert (result.exit_code, result.stdout.split()[0]) == (0, b"10001")
    write(lease, now=now)
    sandbox = get_sandbox(lease)
    assert (sandbox.isolated, sandbox.pod_uid) == (True, cluster.find(PODS, sandbox.ref)["metadata"]["uid"])

    cluster.emulator.disruptions.drain(NAMESPACE)
    assert end_lifetimes(now=now + MINUTE).counts == {"ends announced": 1, "put to sleep": 1}
    assert (cluster.find(PODS, sandbox.ref), cluster.find(SECRETS, sandbox.ref)) == (None, None)
    assert read(lease, now=now + 2 * MINUTE) == "kept"

    cluster.emulator.disruptions.drain(NAMESPACE)
    monkeypatch.setattr(end_watch, "WATCH_TIME", timedelta(seconds=1))
    assert end_watch.watch_ends(now=now + 2 * MINUTE).counts == {"put to sleep": 1}
    assert read(lease, now=now + 3 * MINUTE) == "kept"

    sandbox.refresh_from_db()
    assert sandbox.incarnation == 3
    write(lease, "unsaved", now=now + 3 * MINUTE)
    cluster.emulator.disruptions.evict_for_storage(NAMESPACE, sandbox.ref, "workspace", "4Gi")
    reconciliation.reconcile(now=now + 4 * MINUTE, grace=MINUTE)
    sandbox.refresh_from_db()
    assert sandbox.lost_at
    assert 'volume "workspace"' in sandbox.last_error
    leasing.release(lease.pk, now=now + 5 * MINUTE)
    assert Sandbox.objects.count() == 1

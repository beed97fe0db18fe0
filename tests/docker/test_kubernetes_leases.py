"""Leases on Kubernetes: start, command, drain of the node, wake and loss, on the emulator, with the agent over TLS."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.utils import timezone

from leases import execution, leasing
from sandboxes import processes
from sandboxes.agent import protocol
from sandboxes.errors import NotIsolated, SandboxError
from sandboxes.failures import find_cause, needs_operator
from sandboxes.models import AgentRoute, Host, Pool, Sandbox
from sandboxes.pool.lifetimes import end_lifetimes
from sandboxes.processes import ProcessSpec
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
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def loop():
    loop = EventLoopThread()
    yield loop
    loop.close()


@pytest.fixture
def files(tmp_path_factory):
    return create_certificates(tmp_path_factory.mktemp("tls"), GATEWAY)


@pytest.fixture
def gateway(loop, files):
    """Running gateway, and its port."""
    [port] = ports.find_free_ports()
    with serving_gateway(loop, port, files) as server:
        yield server, port


@pytest.fixture
def cluster(docker_ready, gateway, files, tmp_path_factory, settings):
    """The cluster as the default provider's, with the gateway."""
    with serve_kubernetes(tmp_path_factory.mktemp("kubernetes")) as emulator:
        cluster = Cluster(emulator, SimpleNamespace(port=gateway[1]))
        settings.SANDBOX_IMAGE, settings.GATEWAY_AUTHORITY = DOCKER_IMAGE, str(files.authority)
        with configured_cluster(cluster, f"https://{GATEWAY}:8443", settings):
            yield cluster


@pytest.fixture
def pool(db):
    return Pool.objects.create(name="pods", provider="kubernetes", image=DOCKER_IMAGE, capacity=10, memory_mib=128)


def test_agent_of_another_version_is_named_to_callers_and_ends_a_start(cluster, gateway, loop, grant, monkeypatch):
    now = timezone.now()
    lease = grant(now=now)
    assert run(lease, "true", now=now).exit_code == 0
    with monkeypatch.context() as upgrade:  # of the control plane: the Pod stays, its agent connects again
        upgrade.setattr(protocol, "OLDEST_VERSION", protocol.VERSION + 1)
        upgrade.setattr(protocol, "VERSION", protocol.VERSION + 1)
        session = loop.run(gateway[0].agents.wait_for_session(get_sandbox(lease).ref, 0.0))
        loop.loop.call_soon_threadsafe(session.end)
        wait_until(AgentRoute.objects.filter(refused_version__isnull=False).exists, "the agent is refused", within=30)
        for act in (
            lambda: run(lease, "true", now=now),
            lambda: write(lease, now=now),
            lambda: processes.start_process(execution.build_sandbox_request(lease, now=now), ProcessSpec(["true"]), now=now),
        ):
            with pytest.raises(SandboxError, match="agent is of another version") as failed:
                act()
            assert (find_cause(failed.value), needs_operator(failed.value)) == ("agent_outdated", True)
        further = grant(environment="game-2", now=now)
        began = timezone.now()
        with pytest.raises(SandboxError, match="Build the image again") as failed:
            run(further, "true", now=now)
        assert (find_cause(failed.value), needs_operator(failed.value)) == ("agent_outdated", True)
        assert timezone.now() - began < MINUTE  # and not after the time limit of a start
    wait_until(AgentRoute.objects.filter(ref=get_sandbox(lease).ref).exclude(address="").exists, "it is accepted", within=30)
    assert run(lease, "true", now=now).exit_code == 0


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

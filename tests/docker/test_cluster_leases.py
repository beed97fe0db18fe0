"""Leases on a real cluster, and faults of its parts. The emulator has more ends of Pods: test_kubernetes_leases.py."""

import re
import subprocess
from dataclasses import replace
from datetime import timedelta

import pytest
from django.utils import timezone

from leases import leasing
from sandboxes import providers
from sandboxes.errors import CapacityExhausted, CapacityPending, NotIsolated, SandboxNotReady
from sandboxes.models import Host, Pool
from sandboxes.providers.errors import FailureCause, Missing, ProviderError, Unavailable
from sandboxes.providers.kubernetes import pods
from sandboxes.sweeps import end_watch, reconciliation, seal_checks
from tests.conftest import DOCKER_IMAGE, MINUTE
from tests.emulators.kubernetes.emulator import GATEWAY
from tests.support import real_cluster
from tests.support.cluster import configured_cluster
from tests.support.leases import evict, get_sandbox, read, run, write
from tests.support.own_cluster.programs import NODE
from tests.support.remote_agent import serving_gateway
from tests.support.servers.egress import EventLoopThread
from tests.support.servers.tls import create_certificates
from tests.support.waiting import wait_until

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
    assert sandbox.pod_end_cause == (FailureCause.NODE_DRAINED if cluster.version >= (1, 26) else "")
    assert read(lease, now=now + MINUTE) == "kept"

    sandbox.refresh_from_db()
    write(lease, "unsaved", now=now + 2 * MINUTE)
    cluster.kubectl.run("delete", "pod", sandbox.ref, "--grace-period=1", "--wait=true")
    with pytest.raises(Missing):
        providers.get_provider("kubernetes").inspect(sandbox.ref)
    assert end_watch.watch_ends(now=now + 3 * MINUTE).counts == {"lost": 1}
    sandbox.refresh_from_db()
    assert sandbox.lost_at


def test_commands_go_on_without_the_api_server_and_a_watch_goes_on_after_it(own_cluster, cluster, grant, monkeypatch):
    now = timezone.now()
    lease = grant(now=now)
    write(lease, now=now)
    sandbox, provider = get_sandbox(lease), providers.get_provider("kubernetes")
    monkeypatch.setattr(end_watch, "WATCH_TIME", timedelta(seconds=5))
    assert end_watch.watch_ends(now=now).counts == {}  # the watch has a resource version now

    own_cluster.kill("kube-apiserver")
    try:
        assert read(lease, now=now) == "kept"
        assert run(lease, "sh", "-c", "sleep 1; echo done", now=now).stdout == b"done\n"
        with pytest.raises(Unavailable) as failed:
            provider.inspect(sandbox.ref)
        assert failed.value.cause == FailureCause.ENGINE_UNREACHABLE
        with pytest.raises(SandboxNotReady, match="no answer of the API server"):
            run(grant(agent="did:web:other.example", now=now), "true", now=now)
        assert end_watch.watch_ends(now=now).failures
    finally:
        own_cluster.run("kube-apiserver")
        own_cluster.wait_for_api()
    sandbox.refresh_from_db()
    assert not sandbox.lost_at

    # The version of the watch is older than what the new API server remembers, so the Pods are listed again.
    cluster.kubectl.run("delete", "pod", sandbox.ref, "--grace-period=30", "--wait=false")
    monkeypatch.setattr(end_watch, "WATCH_TIME", timedelta(seconds=10))
    assert end_watch.watch_ends(now=now + MINUTE).counts == {"put to sleep": 1}
    assert read(lease, now=now + 2 * MINUTE) == "kept"


def test_sandbox_on_a_node_that_stops_answering_works_and_is_destroyed_once_the_node_is_deleted(
    own_cluster, cluster, grant, monkeypatch
):
    now = timezone.now()
    lease = grant(now=now)
    write(lease, now=now)
    sandbox, provider = get_sandbox(lease), providers.get_provider("kubernetes")
    own_cluster.kill("kubelet")
    try:
        assert read(lease, now=now) == "kept"  # through the gateway
        leasing.release(lease.pk, now=now)
        monkeypatch.setattr(pods, "REMOVAL_TIMEOUT_SECONDS", 5.0)
        with pytest.raises(Unavailable, match=f"node: {NODE}"):
            provider.destroy(sandbox.ref)
        own_cluster.kubectl.run("delete", "node", NODE)
        monkeypatch.setattr(pods, "REMOVAL_TIMEOUT_SECONDS", 120.0)  # the cluster looks for Pods without a node each 20 s
        provider.destroy(sandbox.ref)
        assert not cluster.lists(sandbox.ref)
    finally:
        own_cluster.run("kubelet")
        own_cluster.wait_for_node()


def test_drain_waits_until_the_state_is_stored_and_the_next_node_has_it(own_cluster, cluster, grant, monkeypatch):
    now = timezone.now()
    lease = grant(now=now)
    write(lease, now=now)
    monkeypatch.setattr(end_watch, "WATCH_TIME", timedelta(seconds=10))
    command = [*own_cluster.kubectl.command, "drain", NODE, "--force", "--delete-emptydir-data", "--timeout=90s"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as drain:
        try:
            assert end_watch.watch_ends(now=now).counts == {"put to sleep": 1}
            _, errors = drain.communicate(timeout=90)
            assert drain.returncode == 0, errors
            with pytest.raises(CapacityPending, match="no node has room"):
                read(lease, now=now + MINUTE)
        finally:
            drain.kill()
            own_cluster.kubectl.run("uncordon", NODE)
    assert read(lease, now=now + 2 * MINUTE) == "kept"


def test_sandbox_over_its_disk_limit_is_evicted_and_its_end_is_named(cluster, grant, settings):
    settings.KUBERNETES = replace(settings.KUBERNETES, disk_mib=64)
    now = timezone.now()
    lease = grant(now=now)
    run(lease, "sh", "-c", "head -c 100M /dev/zero >/data/large", now=now)
    sandbox, provider = get_sandbox(lease), providers.get_provider("kubernetes")
    wait_until(lambda: cluster.kubectl.read("pod", sandbox.ref)["status"]["phase"] == "Failed", "the Pod is evicted", within=90)
    with pytest.raises(Missing) as ended:
        provider.inspect(sandbox.ref)
    assert ended.value.cause == FailureCause.EVICTED
    assert "ephemeral" in str(ended.value)
    reconciliation.reconcile(now=now + MINUTE, grace=MINUTE)
    sandbox.refresh_from_db()
    assert sandbox.lost_at
    assert "ephemeral" in sandbox.last_error


def test_full_quota_is_no_capacity_and_a_destroy_frees_it(cluster, grant):
    now = timezone.now()
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "one"}, "spec": {"hard": {"pods": "1"}}}
    cluster.kubectl.create(quota)
    first, second = grant(now=now), grant(agent="did:web:other.example", now=now)
    assert run(first, "true", now=now).exit_code == 0
    with pytest.raises(CapacityExhausted):
        run(second, "true", now=now)
    assert [(quota.used, quota.hard) for quota in cluster.connect().read_quotas() if quota.name == "one"] == [("1", "1")]
    evict(first, now=now + MINUTE)
    assert run(second, "true", now=now + 2 * MINUTE).exit_code == 0


def test_refused_credentials_are_named_and_end_nothing(cluster, grant, monkeypatch):
    monkeypatch.setattr(end_watch, "WATCH_TIME", timedelta(seconds=2))
    now = timezone.now()
    lease = grant(now=now)
    write(lease, now=now)
    provider = providers.get_provider("kubernetes")
    cluster.kubectl.run("delete", "serviceaccount", "leasehold")  # and with it all of its tokens
    wait_until(lambda: _find_refusal(provider, get_sandbox(lease).ref), "the token is refused")
    assert _find_refusal(provider, get_sandbox(lease).ref) == FailureCause.CREDENTIALS_REFUSED
    assert end_watch.watch_ends(now=now).failures
    assert not get_sandbox(lease).lost_at
    assert read(lease, now=now) == "kept"


def _find_refusal(provider, ref):
    try:
        provider.inspect(ref)
    except ProviderError as failed:
        return failed.cause
    return None

"""Sandboxes as objects of agent-sandbox, on an emulator with its controller."""

import pytest

from sandboxes.providers.errors import FailureCause, Missing, Rejected
from sandboxes.providers.kubernetes.configuration import ObjectKind
from tests.emulators.kubernetes.api.resources import PODS, SANDBOXES
from tests.emulators.kubernetes.faults import NOT_STARTED, PodFault
from tests.emulators.registry import serve_kubernetes
from tests.support.cluster import NAMESPACE, Cluster
from tests.support.waiting import wait_until

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def objects(docker_ready, tmp_path_factory):
    with serve_kubernetes(tmp_path_factory.mktemp("agent-sandbox"), has_agent_sandbox=True) as emulator:
        emulator.cluster_faults.pods.append(PodFault("lhp-", NOT_STARTED, times=100))
        cluster = Cluster(emulator)
        emulator.authorizer.is_enforced = False  # the permission on these objects is optional in docs/kubernetes.md
        yield cluster


@pytest.fixture
def provider(objects):
    return objects.connect(object_kind=ObjectKind.SANDBOX)


def test_sandbox_object_has_one_pod_and_is_deleted_with_it(objects, provider, spec):
    assert provider.create(spec) == provider.create(spec) == spec.name
    found = objects.find(SANDBOXES, spec.name)
    assert found["spec"]["shutdownPolicy"] == "Delete"
    assert [each.name for each in provider.list(spec.owner)] == [spec.name]
    provider.destroy(spec.name)
    assert (objects.find(SANDBOXES, spec.name), objects.find(PODS, spec.name)) == (None, None)
    assert provider.list(spec.owner) == []


def test_pod_that_the_controller_has_replaced_silently_is_a_lost_sandbox(objects, provider, spec):
    provider.create(spec)
    first = objects.find(PODS, spec.name)["metadata"]["uid"]
    objects.emulator.disruptions.vanish(NAMESPACE, spec.name)
    wait_until(lambda: (pod := objects.find(PODS, spec.name)) and pod["metadata"]["uid"] != first, "another Pod exists")
    provider.create(spec)  # a repeated create does not accept the other Pod
    with pytest.raises(Missing, match="another Pod") as raised:
        provider.inspect(spec.name)
    assert raised.value.cause == FailureCause.REPLACED
    provider.destroy(spec.name)
    assert (objects.find(SANDBOXES, spec.name), objects.find(PODS, spec.name)) == (None, None)


def test_cluster_without_the_resource_is_named(cluster, spec):
    with pytest.raises(Rejected, match="serves no supported version"):
        cluster.connect(object_kind=ObjectKind.SANDBOX).create(spec)

"""kubectl as an independent witness: it sees what the provider makes, and the provider sees what it deletes."""

import base64
import json
from dataclasses import replace

import pytest

from sandboxes.providers.base import GatewayAccess
from sandboxes.providers.errors import FailureCause, Missing
from sandboxes.providers.kubernetes.permissions import list_rules
from tests.emulators.kubernetes.faults import NOT_STARTED, PodFault
from tests.support.cluster import NAMESPACE
from tests.support.kubernetes import Kubectl

pytestmark = pytest.mark.docker


@pytest.fixture
def kubectl(cluster):
    """kubectl of the cluster's administrator."""
    cluster.emulator.cluster_faults.pods.append(PodFault("lhp-", NOT_STARTED, times=100))
    return Kubectl(cluster.emulator.kubeconfig, NAMESPACE)


@pytest.fixture
def created(provider, spec):
    provider.create(replace(spec, gateway=GatewayAccess("https://10.96.7.7:8443", "bootstrap-token")))
    return spec.name


def list_names(kubectl, spec):
    return kubectl.run("get", "pods,secrets", "-l", f"leasehold.dev/owner={spec.owner}", "-o", "name").stdout.split()


def test_kubectl_lists_and_reads_what_the_provider_creates(provider, kubectl, spec, created):
    assert list_names(kubectl, spec) == [f"pod/{created}", f"secret/{created}"]
    pod, secret = kubectl.read("pod", created), kubectl.read("secret", created)
    assert (pod["metadata"]["uid"], pod["spec"]["serviceAccountName"]) == (provider.records.find_uid(created), "sandbox")
    assert json.loads(base64.b64decode(secret["data"]["gateway.json"]))["token"] == "bootstrap-token"
    assert "bootstrap-token" not in json.dumps(pod)
    provider.destroy(created)
    assert list_names(kubectl, spec) == []


def test_pod_that_kubectl_deletes_is_lost_and_its_secret_is_removed_with_the_sandbox(provider, kubectl, spec, created):
    kubectl.run("delete", "pod", created, "--wait=true")
    with pytest.raises(Missing) as raised:
        provider.inspect(created)
    assert raised.value.cause == FailureCause.REMOVED
    assert provider.list(spec.owner) == []
    provider.destroy(created)
    assert list_names(kubectl, spec) == []


def test_kubectl_agrees_about_the_permissions_of_the_control_plane(cluster):
    kubectl = Kubectl(cluster.kubeconfig, NAMESPACE)

    def may(verb, resource):
        resource, _, subresource = resource.partition("/")
        answer = kubectl.run("auth", "can-i", verb, resource, f"--subresource={subresource}", check=False)
        return answer.stdout.strip() == "yes"

    assert all(may(rule.verbs[-1], rule.resource) for rule in list_rules(cluster.configuration))
    assert not any(may(*refused) for refused in [("get", "secrets"), ("list", "secrets"), ("create", "pods/exec")])

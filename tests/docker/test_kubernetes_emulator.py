"""Fidelity of the Kubernetes emulator. kubectl and the official client, both unmodified, are the witnesses."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import docker
import pytest
import requests
from kubernetes import client

from tests.conftest import DOCKER_IMAGE
from tests.emulators.base import CUT_AFTER, Fault
from tests.emulators.kubernetes.emulator import KubernetesEmulator
from tests.emulators.kubernetes.faults import (
    EXPIRED,
    REORDERED,
    SCALE_UP,
    STUCK_TERMINATING,
    TWICE,
    PodFault,
    WatchFault,
)
from tests.emulators.registry import serve_kubernetes
from tests.support.kubernetes import Kubectl, build_api_client, build_pod
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.docker,
    pytest.mark.matrix("fidelity of the emulator, which changes with its own code alone"),
]
SEALED = {
    "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "sealed"},
    "spec": {
        "podSelector": {}, "policyTypes": ["Ingress", "Egress"],
        "egress": [
            {
                "to": [
                    {
                        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "leasehold"}},
                        "podSelector": {"matchLabels": {"app.kubernetes.io/component": "gateway"}},
                    }
                ],
                "ports": [{"protocol": "TCP", "port": 8443}],
            }
        ],
    },
}  # fmt: skip
PROBE = """
import socket
reached = []
for name, port in (("10.96.7.7", 8443), ("10.96.0.1", 443), ("169.254.169.254", 80), ("10.96.0.10", 53), ("{other}", 9000)):
    try:
        socket.create_connection((name, port), 3).close()
        reached.append(name)
    except OSError:
        pass
print(*reached)
"""
# An emulator that is killed with a Pod. Prints the label of its containers.
CRASH = """
import os, sys, threading
from pathlib import Path
from tests.emulators.kubernetes.api.resources import PODS
from tests.emulators.kubernetes.emulator import KubernetesEmulator
from tests.emulators.kubernetes.node.containers import RUN_LABEL
cluster = KubernetesEmulator(Path(sys.argv[1]))
container = {"name": "sandbox", "image": sys.argv[2], "command": ["sleep", "60"]}
spec = {"restartPolicy": "Never", "automountServiceAccountToken": False, "containers": [container]}
pod = cluster.create(PODS, {"metadata": {"name": "orphan", "namespace": "default"}, "spec": spec})
with cluster.store.changed:
    cluster.store.changed.wait_for(lambda: cluster.store.get(PODS, "default", "orphan")["status"]["phase"] == "Running", 60)
print(f"{RUN_LABEL}={cluster.run}", flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module")
def cluster(docker_ready: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesEmulator]:
    with serve_kubernetes(tmp_path_factory.mktemp("kubernetes"), has_agent_sandbox=True) as served:
        yield served


@pytest.fixture
def namespace(cluster: KubernetesEmulator) -> str:
    """Namespace of this test, with the level restricted."""
    name = f"test-{uuid4().hex[:8]}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    core = client.CoreV1Api(build_api_client(cluster))
    core.create_namespace({"metadata": {"name": name, "labels": labels}})
    return name


@pytest.fixture
def kubectl(cluster: KubernetesEmulator, namespace: str) -> Kubectl:
    return Kubectl(cluster.write_kubeconfig(f"kubeconfig-{namespace}", cluster.token, namespace))


@pytest.fixture
def core(cluster: KubernetesEmulator) -> client.CoreV1Api:
    return client.CoreV1Api(build_api_client(cluster))


def read_status(kubectl: Kubectl, name: str) -> dict[str, Any]:
    status = kubectl.read("pod", name)["status"]
    assert isinstance(status, dict)
    return status


def await_phase(kubectl: Kubectl, name: str, phase: str) -> dict[str, Any]:
    """Return the status of a Pod once it has a phase."""
    kubectl.wait(f"jsonpath={{.status.phase}}={phase}", f"pod/{name}")
    return read_status(kubectl, name)


def watch(cluster: KubernetesEmulator, path: str, **query: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a watch of a namespace's resource."""
    response = requests.get(
        f"{cluster.api_url}/api/v1/namespaces/{path}",
        params={"watch": "true", "timeoutSeconds": "20", **query},
        headers={"Authorization": f"Bearer {cluster.token}"},
        verify=str(cluster.directory / "ca.crt"),
        stream=True,
        timeout=30,
    )
    with response:
        for line in response.iter_lines():
            yield json.loads(line)


def test_kubectl_creates_executes_copies_and_deletes_a_restricted_pod(kubectl: Kubectl, tmp_path: Path) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "p1"}, "stringData": {"gateway.json": "token"}}
    pod = build_pod(
        "p1", DOCKER_IMAGE, "echo started; exec sleep 60",
        hostAliases=[{"ip": "10.96.7.7", "hostnames": ["leasehold-gateway"]}], hostname="sandbox",
        container={
            "resources": {"limits": {"memory": "128Mi", "cpu": "1"}},
            "volumeMounts": [
                {"name": "workspace", "mountPath": "/workspace"},
                {"name": "session", "mountPath": "/run/leasehold"},
            ],
        },
        volumes=[
            {"name": "workspace", "emptyDir": {}},
            {"name": "session", "projected": {"defaultMode": 0o440, "sources": [{"secret": {"name": "p1"}}]}},
        ],
    )  # fmt: skip
    kubectl.create(secret, pod)
    kubectl.wait("condition=Ready", "pod/p1")
    assert kubectl.run("get", "pods").stdout.split()[5:8] == ["p1", "1/1", "Running"]
    script = (
        "id -u; grep -E '^(CapBnd|NoNewPrivs)' /proc/self/status; stat -c '%a %g' /run/leasehold/gateway.json; hostname;"
        "cat /run/leasehold/gateway.json; echo; grep -c leasehold-gateway /etc/hosts; touch /x; echo lost >&2; exit 7"
    )
    done = kubectl.run("exec", "p1", "--", "sh", "-c", script, check=False)
    assert done.stdout.split() == [
        "10001", "CapBnd:", "0000000000000000", "NoNewPrivs:", "1", "440", "10001", "sandbox", "token", "1"
    ]  # fmt: skip
    assert "Read-only file system" in done.stderr and "lost" in done.stderr and done.returncode == 7
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * 4096)
    kubectl.run("cp", str(file), "p1:/workspace/file")
    kubectl.run("cp", "p1:/workspace/file", str(tmp_path / "copy"))
    assert (tmp_path / "copy").read_bytes() == file.read_bytes()
    assert kubectl.run("exec", "-i", "p1", "--", "wc", "-c", content=file.read_bytes()).stdout == f"{1 << 20}\n"
    assert kubectl.run("logs", "p1").stdout == "started\n"
    identifier = read_status(kubectl, "p1")["containerStatuses"][0]["containerID"].removeprefix("docker://")
    limits = docker.from_env().containers.get(identifier).attrs["HostConfig"]
    assert (limits["Memory"], limits["CpuQuota"]) == (128 << 20, 100_000)
    kubectl.run("delete", "pod/p1")
    assert kubectl.read("pods")["items"] == []
    with pytest.raises(docker.errors.NotFound):
        docker.from_env().containers.get(identifier)


def test_lists_have_pages_and_deletions_preconditions(
    cluster: KubernetesEmulator, core: client.CoreV1Api, namespace: str
) -> None:
    for number in range(3):
        core.create_namespaced_secret(namespace, {"metadata": {"name": f"s{number}"}, "stringData": {"key": "value"}})
    first = core.list_namespaced_secret(namespace, limit=2)
    core.delete_namespaced_secret("s2", namespace)
    rest = core.list_namespaced_secret(namespace, limit=2, _continue=first.metadata._continue)
    assert [[one.metadata.name for one in page.items] for page in (first, rest)] == [["s0", "s1"], ["s2"]]  # one snapshot
    cluster.faults.append(Fault(r"GET .*/secrets\?continue", 410))
    token = core.list_namespaced_secret(namespace, limit=1).metadata._continue
    with pytest.raises(client.ApiException, match="410"):
        core.list_namespaced_secret(namespace, limit=1, _continue=token)
    with pytest.raises(client.ApiException) as refused:
        core.delete_namespaced_secret("s0", namespace, body={"preconditions": {"uid": "another"}})
    assert (refused.value.status, json.loads(refused.value.body)["reason"]) == (409, "Conflict")


def test_a_dying_pod_keeps_its_name_until_it_is_gone(
    cluster: KubernetesEmulator, core: client.CoreV1Api, kubectl: Kubectl, namespace: str
) -> None:
    cluster.cluster_faults.pods.append(PodFault("dying", STUCK_TERMINATING))
    cluster.faults.append(Fault("POST .*/pods", CUT_AFTER))
    with pytest.raises(Exception, match=r"(?i)aborted|disconnected|closed"):
        core.create_namespaced_pod(namespace, build_pod("dying", DOCKER_IMAGE, "exec sleep 60"))
    kubectl.wait("condition=Ready", "pod/dying")  # created although its answer was lost
    uid = core.read_namespaced_pod("dying", namespace).metadata.uid
    options = {"gracePeriodSeconds": 1, "preconditions": {"uid": uid}}
    core.delete_namespaced_pod("dying", namespace, body=options)
    with pytest.raises(client.ApiException) as refused:
        core.create_namespaced_pod(namespace, build_pod("dying", DOCKER_IMAGE, "exec sleep 60"))
    assert json.loads(refused.value.body)["reason"] == "AlreadyExists"
    assert kubectl.read("pod", "dying")["metadata"]["deletionTimestamp"]
    cluster.kubelet.release("dying")
    kubectl.wait("delete", "pod/dying")


def test_ends_of_pods_leave_the_evidence_of_a_cluster(cluster: KubernetesEmulator, kubectl: Kubectl, namespace: str) -> None:
    hog = "exec python3 -c 'x = b\"x\" * (1 << 28)'"
    version = str(cluster.store.version)
    kubectl.create(
        build_pod("hog", DOCKER_IMAGE, hog, container={"resources": {"limits": {"memory": "64Mi"}}}),
        build_pod("failed", DOCKER_IMAGE, "exit 3"),
        build_pod("overdue", DOCKER_IMAGE, "exec sleep 60", activeDeadlineSeconds=1),
        build_pod("evicted", DOCKER_IMAGE, "exec sleep 60"),
        build_pod("drained", DOCKER_IMAGE, "exec sleep 60"),
        build_pod("missing", "no-such-image:1", "true"),
    )
    kubectl.wait("condition=Ready", "pod/evicted", "pod/drained")
    cluster.disruptions.evict_for_storage(namespace, "evicted", "workspace", "1Gi")
    evicted = await_phase(kubectl, "evicted", "Failed")
    assert evicted["reason"] == "Evicted" and "workspace" in evicted["message"]
    assert "DisruptionTarget" not in {one["type"] for one in evicted["conditions"]}
    ended = await_phase(kubectl, "hog", "Failed")["containerStatuses"][0]["state"]["terminated"]
    assert (ended["reason"], ended["exitCode"]) == ("OOMKilled", 137)
    assert await_phase(kubectl, "failed", "Failed")["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 3
    assert await_phase(kubectl, "overdue", "Failed")["reason"] == "DeadlineExceeded"
    kubectl.wait("jsonpath={.status.containerStatuses[0].state.waiting.reason}=ImagePullBackOff", "pod/missing")
    cluster.disruptions.drain(namespace)
    last: dict[str, Any] = {}
    for event in watch(cluster, f"{namespace}/pods", fieldSelector="metadata.name=drained", resourceVersion=version):
        last = event["object"]
        if event["type"] == "DELETED":
            break
    assert "EvictionByEvictionAPI" in {one.get("reason") for one in last["status"]["conditions"]}


def test_an_oom_kill_ends_all_processes_of_the_container(kubectl: Kubectl) -> None:
    limit = {"resources": {"limits": {"memory": "64Mi"}, "requests": {"memory": "64Mi"}}}
    kubectl.create(build_pod("oom", DOCKER_IMAGE, "head -c 100M /dev/zero | tail; sleep 300", container=limit))
    kubectl.wait("jsonpath={.status.phase}=Failed", "pod/oom")
    assert kubectl.read("pod", "oom")["status"]["containerStatuses"][0]["state"]["terminated"]["reason"] == "OOMKilled"


def test_an_unschedulable_pod_waits_for_a_node(cluster: KubernetesEmulator, kubectl: Kubectl) -> None:
    cluster.cluster_faults.pods.append(PodFault("pending", SCALE_UP))
    kubectl.create(build_pod("pending", DOCKER_IMAGE, "true"))
    kubectl.wait("condition=PodScheduled=False", "pod/pending")
    wait_until(lambda: "TriggeredScaleUp" in kubectl.run("get", "events").stdout, "the autoscaler decides")
    assert read_status(kubectl, "pending")["phase"] == "Pending"
    cluster.kubelet.schedule("pending")
    await_phase(kubectl, "pending", "Succeeded")


def test_a_quota_refuses_what_exceeds_it(kubectl: Kubectl) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": {"count/secrets": "1"}}}
    kubectl.create(quota)
    secrets = [{"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}} for name in ("first", "second")]
    kubectl.create(secrets[0])
    refused = kubectl.run("create", "-f", "-", content=json.dumps(secrets[1]), check=False)
    assert "exceeded quota: few, requested: count/secrets=1, used: count/secrets=1, limited: count/secrets=1" in refused.stderr


def test_watches_repeat_reorder_and_expire_on_demand(
    cluster: KubernetesEmulator, core: client.CoreV1Api, namespace: str
) -> None:
    version, path = str(cluster.store.version), f"{namespace}/secrets"
    for number in range(4):
        core.create_namespaced_secret(namespace, {"metadata": {"name": f"s{number}"}})
    initial = watch(cluster, path, sendInitialEvents="true", resourceVersionMatch="NotOlderThan")
    found = [next(initial) for _ in range(5)]
    assert [event["type"] for event in found] == ["ADDED"] * 4 + ["BOOKMARK"]
    assert found[-1]["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}
    cluster.cluster_faults.watches += [
        WatchFault("secrets", TWICE), WatchFault("secrets", REORDERED, times=2), WatchFault("secrets", EXPIRED)
    ]  # fmt: skip
    *events, error = watch(cluster, path, resourceVersion=version)
    assert [event["object"]["metadata"]["name"] for event in events] == ["s0", "s0", "s2", "s1"]
    assert (error["type"], error["object"]["code"]) == ("ERROR", 410)
    cluster.store.compact()
    [expired] = watch(cluster, path, resourceVersion=version)
    assert expired["object"]["reason"] == "Expired"
    cluster.store.rewind(2)  # a restored etcd: later objects have earlier versions, which a watch from the former one misses
    core.create_namespaced_secret(namespace, {"metadata": {"name": "missed"}})
    assert list(watch(cluster, path, resourceVersion=str(cluster.store.version + 1), timeoutSeconds="1")) == []


def test_a_network_policy_seals_pods(cluster: KubernetesEmulator, kubectl: Kubectl) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gateway:
        cluster.set_gateway(*gateway.getsockname())
        other = build_pod("other", DOCKER_IMAGE, "exec sleep 60", container={"ports": [{"containerPort": 9000}]})
        kubectl.create(other, build_pod("prober", DOCKER_IMAGE, "exec sleep 60"))
        kubectl.wait("condition=Ready", "pod/other", "pod/prober")
        listening = ["python3", "-c", "import socket; socket.create_server(('', 9000)).accept()"]
        listener = subprocess.Popen([*kubectl.command, "exec", "other", "--", *listening])
        address = read_status(kubectl, "other")["podIP"]
        probe = ("exec", "prober", "--", "python3", "-c", PROBE.format(other=address))
        open_addresses = {"10.96.7.7", "10.96.0.1", "169.254.169.254", "10.96.0.10", address}
        assert {*kubectl.run(*probe).stdout.split()} == open_addresses
        kubectl.create(SEALED)
        wait_until(lambda: kubectl.run(*probe).stdout.split() == ["10.96.7.7"], "the policy is applied")
        listener.kill()
        listener.wait()


def test_an_exec_that_is_cut_has_no_status(cluster: KubernetesEmulator, kubectl: Kubectl) -> None:
    kubectl.create(build_pod("cut", DOCKER_IMAGE, "exec sleep 60"))
    kubectl.wait("condition=Ready", "pod/cut")
    cluster.faults.append(Fault("GET .*/exec", CUT_AFTER))
    done = kubectl.run("exec", "cut", "--", "sh", "-c", "echo out; exit 0", check=False)
    assert (done.stdout, done.returncode) == ("out\n", 1)


def test_a_sandbox_object_replaces_its_deleted_pod(cluster: KubernetesEmulator, kubectl: Kubectl, namespace: str) -> None:
    template = {"spec": build_pod("", DOCKER_IMAGE, "exec sleep 60")["spec"]}
    sandbox = {"apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "metadata": {"name": "wrapped"}}
    kubectl.create({**sandbox, "spec": {"podTemplate": template, "shutdownPolicy": "Delete"}})
    kubectl.wait("condition=Ready", "sandbox/wrapped")
    uid = kubectl.read("pod", "wrapped")["metadata"]["uid"]
    cluster.disruptions.vanish(namespace, "wrapped")
    wait_until(lambda: kubectl.read("pods")["items"], "the controller creates another Pod")
    assert kubectl.read("pod", "wrapped")["metadata"]["uid"] != uid
    kubectl.run("delete", "sandbox/wrapped")
    kubectl.wait("delete", "pod/wrapped")


def test_roles_are_enforced_on_demand(cluster: KubernetesEmulator, core: client.CoreV1Api, namespace: str) -> None:
    api = client.RbacAuthorizationV1Api(core.api_client)
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    api.create_namespaced_role(namespace, {"metadata": {"name": "reader"}, "rules": rules})
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"}
    subjects = [{"kind": "ServiceAccount", "name": "leasehold", "namespace": "leasehold"}]
    api.create_namespaced_role_binding(namespace, {"metadata": {"name": "reader"}, "roleRef": role, "subjects": subjects})
    token = cluster.create_token("leasehold", "leasehold")
    limited = Kubectl(cluster.write_kubeconfig("kubeconfig-limited", token, namespace))
    cluster.authorizer.is_enforced = True
    try:
        assert limited.read("pods")["items"] == []
        refused = limited.run("get", "secrets", check=False)
        assert 'cannot list resource "secrets" in API group "" in the namespace' in refused.stderr
        answers = [limited.run("auth", "can-i", verb, "pods", check=False).stdout for verb in ("list", "delete")]
        assert answers == ["yes\n", "no\n"]
    finally:
        cluster.authorizer.is_enforced = False


def test_a_killed_emulator_leaves_no_containers(docker_ready: None, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path), DOCKER_IMAGE], stdout=subprocess.PIPE, timeout=120)
    label = done.stdout.decode().strip()
    engine = docker.from_env().api
    assert done.returncode == -9 and label
    wait_until(lambda: not engine.containers(all=True, filters={"label": label}), "the containers are removed")

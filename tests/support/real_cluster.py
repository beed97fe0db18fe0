"""A real cluster: a namespace as docs/kubernetes.md describes it, and the gateway that its Pods reach.

The gateway of the tests is a process of this machine, so that the NetworkPolicy permits its address in place of Pods."""

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.kubernetes import pods
from sandboxes.providers.kubernetes.configuration import KubernetesConfiguration
from sandboxes.providers.kubernetes.provider import KubernetesProvider
from tests.support.cluster import GatewayRecords, JoinGateway, read_prerequisites
from tests.support.cluster_access import ClusterAccess
from tests.support.kubernetes import Kubectl

CLUSTER_KINDS = ("PriorityClass",)  # beyond the namespace: not created, and not used by the tests
TOKEN_DURATION = "8h"
# Shorter than the default: a kubelet before 1.22 ends a Pod that is deleted within a second of its start only after the whole
# grace period of its specification, not that of the deletion.
GRACE = timedelta(seconds=10)
# It frees the name of a deleted Pod after 5 to 20 seconds, and now and then only after a minute: a sweep would try again.
REMOVAL_SECONDS = 180.0


class RealCluster:
    """The namespace. `kubectl` has the rights of KUBECONFIG, providers those of the control plane's service account."""

    def __init__(self, access: ClusterAccess, directory: Path, gateway: JoinGateway | None = None) -> None:
        self.access, self.gateway = access, gateway
        self.namespace = f"leasehold-test-{secrets.token_hex(4)}"
        self.kubectl = Kubectl(access.kubeconfig, self.namespace)
        self.kubeconfig = directory / "kubeconfig"
        self.configuration = KubernetesConfiguration(namespace=self.namespace, gateway_address=access.gateway.host, grace=GRACE)

    def prepare(self) -> None:
        """Create the prerequisites, and the kubeconfig of the control plane."""
        for item in read_prerequisites():
            if item["kind"] not in CLUSTER_KINDS:
                self.kubectl.create(self._adapt(item))
            if item["kind"] == "Namespace":
                self.kubectl.run("create", "serviceaccount", "leasehold")
        token = self.kubectl.run("create", "token", "leasehold", f"--duration={TOKEN_DURATION}").stdout.strip()
        config = yaml.safe_load(self.kubectl.run("config", "view", "--minify", "--flatten", "--raw").stdout)
        [context] = config["contexts"]
        config["users"] = [{"name": context["context"]["user"], "user": {"token": token}}]
        self.kubeconfig.touch(mode=0o600)
        self.kubeconfig.write_text(yaml.safe_dump(config))

    def _adapt(self, item: dict[str, Any]) -> dict[str, Any]:
        """Move an object of the deployment to this namespace, and let the policy permit the gateway's address."""
        name = self.namespace if item["kind"] == "Namespace" else item["metadata"]["name"]
        place = {} if item["kind"] == "Namespace" else {"namespace": self.namespace}
        adapted = {**item, "metadata": {**item["metadata"], "name": name, **place}}
        if item["kind"] == "RoleBinding":
            adapted["subjects"] = [{**subject, "namespace": self.namespace} for subject in item["subjects"]]
        if item["kind"] == "NetworkPolicy":
            address = self.access.gateway
            block = {"cidr": f"{address.host}/{128 if ':' in address.host else 32}"}
            rule = {"to": [{"ipBlock": block}], "ports": [{"protocol": "TCP", "port": address.port}]}
            adapted["spec"] = {**item["spec"], "egress": [rule]}
        return adapted

    def remove(self) -> None:
        self.kubectl.run("delete", "namespace", self.namespace, "--wait=false")

    def connect(self, **changes: Any) -> KubernetesProvider:
        """Return a provider of its own, as of another process. `changes` are those of its configuration."""
        provider = KubernetesProvider(replace(self.configuration, **changes), GatewayRecords(self.gateway))
        with patch.dict("os.environ", {"KUBECONFIG": str(self.kubeconfig)}):
            assert provider.pods.api  # reads the kubeconfig
        return provider

    def admit(self, spec: SandboxSpec) -> SandboxSpec:
        """Return the spec with access to the gateway."""
        return replace(spec, gateway=self.gateway.admit(spec.name) if self.gateway else None)

    @cached_property
    def version(self) -> tuple[int, int]:
        """Major and minor version of the API server."""
        found = json.loads(self.kubectl.run("get", "--raw", "/version").stdout)["gitVersion"]
        major, minor = found.removeprefix("v").split(".")[:2]
        return int(major), int(minor)

    def evict(self, name: str) -> None:
        """Let the API server evict a Pod, as a drain of its node does."""
        version = "policy/v1" if self.version >= (1, 22) else "policy/v1beta1"
        eviction = {"apiVersion": version, "kind": "Eviction", "metadata": {"name": name, "namespace": self.namespace}}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/eviction"
        self.kubectl.run("create", "--raw", path, "-f", "-", content=json.dumps(eviction))

    def lists(self, name: str) -> bool:
        """Return whether a Pod or Secret has this name."""
        return bool(self.kubectl.run("get", f"pod/{name}", f"secret/{name}", "--ignore-not-found", "-o", "name").stdout)


@contextmanager
def prepared_cluster(access: ClusterAccess, directory: Path, gateway: JoinGateway | None = None) -> Iterator[RealCluster]:
    """Yield the cluster with a namespace, which is removed afterwards."""
    cluster = RealCluster(access, directory, gateway)
    with patch.object(pods, "REMOVAL_TIMEOUT_SECONDS", REMOVAL_SECONDS):
        try:
            cluster.prepare()
            yield cluster
        finally:
            cluster.remove()


@contextmanager
def reachable_gateway(access: ClusterAccess) -> Iterator[JoinGateway]:
    """A gateway at the address by which Pods reach this machine."""
    gateway = JoinGateway(access.listen.host, access.listen.port, visible_port=access.gateway.port)
    try:
        yield gateway
    finally:
        gateway.close()

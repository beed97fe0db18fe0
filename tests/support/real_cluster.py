"""A cluster of KUBECONFIG in place of the emulator, for `make kind-test`: a namespace as docs/kubernetes.md describes it.

The gateway of the tests is a process of this machine, so that the NetworkPolicy permits its address in place of Pods."""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.kubernetes.configuration import KubernetesConfiguration
from sandboxes.providers.kubernetes.provider import KubernetesProvider
from tests.support.cluster import GatewayRecords, JoinGateway, read_prerequisites
from tests.support.kubernetes import Kubectl

GATEWAY_VARIABLE = "TEST_CLUSTER_GATEWAY"  # HOST:PORT by which Pods reach the gateway; set by .ci/kind-test
LISTEN_VARIABLE = "TEST_CLUSTER_LISTEN"  # HOST:PORT at which the gateway listens on this machine
IS_SELECTED = GATEWAY_VARIABLE in os.environ
CLUSTER_KINDS = ("PriorityClass",)  # beyond the namespace: not created, and not used by the tests
TOKEN_DURATION = "8h"


@dataclass(frozen=True)
class Address:
    host: str
    port: int


def read_address(variable: str) -> Address:
    host, _, port = os.environ[variable].rpartition(":")
    return Address(host, int(port))


class RealCluster:
    """The namespace. `kubectl` has the rights of KUBECONFIG, providers those of the control plane's service account."""

    def __init__(self, directory: Path, gateway: JoinGateway | None = None) -> None:
        self.namespace, self.gateway = f"leasehold-test-{secrets.token_hex(4)}", gateway
        self.kubectl = Kubectl(Path(os.environ["KUBECONFIG"]), self.namespace)
        self.kubeconfig = directory / "kubeconfig"
        address = read_address(GATEWAY_VARIABLE)
        self.configuration = KubernetesConfiguration(namespace=self.namespace, gateway_address=address.host)

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
            address = read_address(GATEWAY_VARIABLE)
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

    def evict(self, name: str) -> None:
        """Let the API server evict a Pod, as a drain of its node does."""
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": self.namespace}}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/eviction"
        self.kubectl.run("create", "--raw", path, "-f", "-", content=json.dumps(eviction))

    def lists(self, name: str) -> bool:
        """Return whether a Pod or Secret has this name."""
        return bool(self.kubectl.run("get", f"pod/{name}", f"secret/{name}", "--ignore-not-found", "-o", "name").stdout)


@contextmanager
def prepared_cluster(directory: Path, gateway: JoinGateway | None = None) -> Iterator[RealCluster]:
    """Yield the cluster with a namespace, which is removed afterwards."""
    cluster = RealCluster(directory, gateway)
    try:
        cluster.prepare()
        yield cluster
    finally:
        cluster.remove()


@contextmanager
def reachable_gateway() -> Iterator[JoinGateway]:
    """A gateway at the address by which Pods reach this machine."""
    listen, address = read_address(LISTEN_VARIABLE), read_address(GATEWAY_VARIABLE)
    gateway = JoinGateway(listen.host, listen.port, visible_port=address.port)
    try:
        yield gateway
    finally:
        gateway.close()

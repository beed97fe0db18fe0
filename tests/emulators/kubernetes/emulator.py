"""Kubernetes emulator: the API server, one node, and its kubeconfig."""

import os
import secrets
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.emulators.base import FaultInjection
from tests.emulators.kubernetes.agent_sandbox import SandboxController
from tests.emulators.kubernetes.api import resources
from tests.emulators.kubernetes.api.admission import Admission
from tests.emulators.kubernetes.api.authorization import ADMINISTRATOR, Authorizer
from tests.emulators.kubernetes.api.deletion import Deletion
from tests.emulators.kubernetes.api.resources import Resource
from tests.emulators.kubernetes.api.routes import Api
from tests.emulators.kubernetes.api.server import ApiServer
from tests.emulators.kubernetes.api.store import Object, Store
from tests.emulators.kubernetes.api.verbs import Verbs
from tests.emulators.kubernetes.certificates import create_server_certificate
from tests.emulators.kubernetes.faults import ClusterFaults
from tests.emulators.kubernetes.node.connections import Connections
from tests.emulators.kubernetes.node.containers import RUN_LABEL
from tests.emulators.kubernetes.node.disruptions import Disruptions
from tests.emulators.kubernetes.node.kubelet import Kubelet
from tests.emulators.kubernetes.node.network import API_ADDRESS, PodNetwork
from tests.emulators.kubernetes.node.scheduler import NODE_NAME
from tests.emulators.kubernetes.node.timers import Loop
from tests.emulators.kubernetes.node.volumes import Credentials

VERSION = "1.33"
GATEWAY, GATEWAY_NAMESPACE, GATEWAY_ADDRESS, GATEWAY_PORT = "leasehold-gateway", "leasehold", "10.96.7.7", 8443
PAUSE_IMAGE = "leasehold-sandbox"  # any local image with `sleep`
# Removal of the run's containers once the pipe from this process is closed, which a crash does too.
REAPER = 'cat >/dev/null; docker ps --all --quiet --filter "label=$LABEL" | xargs --no-run-if-empty docker rm --force --volumes'


class KubernetesEmulator(FaultInjection):
    """Cluster with one node. `faults` are those of requests, `cluster_faults` those of Pods and watches."""

    def __init__(
        self,
        directory: Path,
        port: int = 0,
        *,
        pause_image: str = PAUSE_IMAGE,
        gateway: tuple[str, int] | None = None,
        has_agent_sandbox: bool = False,
    ) -> None:
        super().__init__()
        self.directory, self.run = directory, f"lh-k8s-{secrets.token_hex(6)}"
        self.token = secrets.token_urlsafe(24)
        self.cluster_faults = ClusterFaults()
        self.store = Store()
        self.authorizer = Authorizer(self.store, users={self.token: ADMINISTRATOR})
        self.loop = Loop()
        self._reaper = subprocess.Popen(
            ["sh", "-c", REAPER], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, env={**os.environ, "LABEL": f"{RUN_LABEL}={self.run}"},
        )  # fmt: skip
        self.certificate = create_server_certificate(directory, ("127.0.0.1", API_ADDRESS))
        self.network = PodNetwork(self.store, self.loop)
        self.kubelet = Kubelet(
            self.run,
            self.store,
            self.cluster_faults,
            directory / "pods",
            self.network,
            self.loop,
            pause_image,
            self.create_credentials,
        )
        served = (*resources.BUILT_IN, *([resources.SANDBOXES] if has_agent_sandbox else ()))
        admission = Admission(self.store, self.authorizer.users.__setitem__)
        self.deletion = self.kubelet.deletion = Deletion(self.store, self.kubelet, admission, served)
        self.disruptions = Disruptions(self.store, self.kubelet, self.deletion)
        self.verbs = Verbs(self.store, admission, self.deletion, self.kubelet, self.cluster_faults)
        self.api = Api(self, self.verbs, self.authorizer, Connections(self.kubelet), VERSION, served)
        self.sandbox_controller = SandboxController(self.store, self.verbs, self.deletion) if has_agent_sandbox else None
        self.server = ApiServer(port, self.certificate.context, self.api.respond)
        self.network.api_port = self.server.port
        self._create_initial_objects()
        if gateway:
            self.set_gateway(*gateway)
        self.kubeconfig = self.write_kubeconfig("kubeconfig", self.token)

    @property
    def api_url(self) -> str:
        return f"https://127.0.0.1:{self.server.port}"

    def serve_forever(self) -> None:
        """Serve until `close` is called in another thread."""
        self.server.serve_forever(poll_interval=0.05)

    def close(self) -> None:
        """Stop the server, and remove every container."""
        self.store.close()
        if self.sandbox_controller:
            self.sandbox_controller.close()
        self.server.shutdown()
        self.server.server_close()
        self.network.close()
        self.kubelet.close()
        self.loop.close()
        self._reaper.communicate()

    def write_kubeconfig(self, name: str, token: str, namespace: str = "default") -> Path:
        """Write a kubeconfig for the user of a token, and return its path."""
        path, authority = self.directory / name, self.directory / "ca.crt"
        authority.write_bytes(self.certificate.authority_pem)
        content = {
            "apiVersion": "v1", "kind": "Config", "current-context": "emulator", "preferences": {},
            "clusters": [{"name": "emulator", "cluster": {"server": self.api_url, "certificate-authority": str(authority)}}],
            "users": [{"name": "user", "user": {"token": token}}],
            "contexts": [{"name": "emulator", "context": {"cluster": "emulator", "user": "user", "namespace": namespace}}],
        }  # fmt: skip
        path.write_text(yaml.safe_dump(content))
        path.chmod(0o600)
        return path

    def create_token(self, namespace: str, service_account: str) -> str:
        """Return a token of a service account, which need not exist."""
        token = f"sa-{secrets.token_urlsafe(24)}"
        self.authorizer.users[token] = f"system:serviceaccount:{namespace}:{service_account}"
        return token

    def create_credentials(self, namespace: str, service_account: str) -> Credentials:
        return Credentials(self.create_token(namespace, service_account), self.certificate.authority_pem)

    def create(self, resource: Resource, item: Object) -> Object:
        """Create an object without a request."""
        return self.verbs.create(resource, item["metadata"].get("namespace", ""), item)

    def set_gateway(self, host: str, port: int) -> str:
        """Let a server of this machine be the Service `leasehold-gateway` in the namespace `leasehold`. Return its address."""
        metadata = {"name": GATEWAY, "namespace": GATEWAY_NAMESPACE}
        if not self.store.find(resources.NAMESPACES, "", GATEWAY_NAMESPACE):
            self.create(resources.NAMESPACES, {"metadata": {"name": GATEWAY_NAMESPACE}})
            self.create(resources.SERVICE_ACCOUNTS, {"metadata": {"name": "leasehold", "namespace": GATEWAY_NAMESPACE}})
            ports = [{"port": GATEWAY_PORT, "targetPort": GATEWAY_PORT}]
            spec = {"clusterIP": GATEWAY_ADDRESS, "selector": {"app.kubernetes.io/component": "gateway"}, "ports": ports}
            self.create(resources.SERVICES, {"metadata": metadata, "spec": spec})
        subsets = [{"addresses": [{"ip": host}], "ports": [{"port": port}]}]
        if self.store.find(resources.ENDPOINTS, GATEWAY_NAMESPACE, GATEWAY):
            self.store.remove(resources.ENDPOINTS, GATEWAY_NAMESPACE, GATEWAY)
        self.store.create(
            resources.ENDPOINTS, {"apiVersion": "v1", "kind": "Endpoints", "metadata": metadata, "subsets": subsets}
        )
        self.network.refresh()
        return f"{GATEWAY_ADDRESS}:{GATEWAY_PORT}"

    def _create_initial_objects(self) -> None:
        for name in ("default", "kube-system"):
            self.create(resources.NAMESPACES, {"metadata": {"name": name}})
        ready: dict[str, Any] = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        capacity = {"cpu": "64", "memory": "256Gi", "pods": "250", "ephemeral-storage": "1Ti"}
        self.store.create(
            resources.NODES,
            {
                "apiVersion": "v1", "kind": "Node",
                "metadata": {"name": NODE_NAME, "labels": {"kubernetes.io/hostname": NODE_NAME}},
                "spec": {}, "status": {"conditions": [ready], "capacity": capacity, "allocatable": capacity},
            },
        )  # fmt: skip

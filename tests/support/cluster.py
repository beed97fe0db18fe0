"""A namespace for sandboxes on the emulator, as the manifests of the deployment describe it, and providers that reach it."""

import hashlib
import os
import shutil
import ssl
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml
from aiohttp import web

from sandboxes import providers
from sandboxes.agent.gateway import AgentGateway
from sandboxes.agent.runs import AgentClient
from sandboxes.egress.agent_sessions.server import AgentSessionServer
from sandboxes.egress.gateway_tokens import AgentIdentity
from sandboxes.providers.base import GatewayAccess, SandboxSpec
from sandboxes.providers.kubernetes.configuration import KubernetesConfiguration
from sandboxes.providers.kubernetes.provider import KubernetesProvider
from sandboxes.providers.kubernetes.records import MemoryRecords, PodRecords
from tests.emulators.kubernetes.api import resources
from tests.emulators.kubernetes.emulator import GATEWAY, KubernetesEmulator
from tests.support.servers.egress import EventLoopThread
from tests.support.servers.tls import create_certificates

MANIFESTS = Path(__file__).resolve().parents[2] / "controlplane/deployment/kubernetes/base/sandboxes.yaml"
NAMESPACE = "leasehold-sandboxes"
RESOURCES = {resource.kind: resource for resource in vars(resources).values() if isinstance(resource, resources.Resource)}


@contextmanager
def configured_cluster(cluster: "Cluster", gateway_url: str, settings: Any) -> Iterator[None]:
    """Let the provider `kubernetes` of this process use a cluster, whose sandboxes join the gateway at this URL."""
    settings.KUBERNETES, settings.GATEWAY_URL = cluster.configuration, gateway_url
    with patch.dict(os.environ, KUBECONFIG=str(cluster.kubeconfig)):
        providers._create_provider.cache_clear()
        try:
            yield
        finally:
            providers._create_provider.cache_clear()


def read_prerequisites() -> list[dict[str, Any]]:
    """Return the objects that docs/kubernetes.md tells an administrator to apply."""
    return list(yaml.safe_load_all(MANIFESTS.read_text()))


class SessionRecords:
    """Records of the gateway's sessions in memory, in place of the database. Tokens may be used again: tests reuse names."""

    def __init__(self) -> None:
        self.refs_by_token: dict[str, str] = {}
        self._agents: dict[str, AgentIdentity] = {}  # by hash of the session secret

    async def run(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, f"_{call.__name__}")(*args, **kwargs)

    def _join(self, token: str, digest: str, *, now: datetime) -> bool:
        if digest not in self._agents and (ref := self.refs_by_token.get(token)):
            self._agents[digest] = AgentIdentity(uuid.uuid4(), ref, digest)
        return digest in self._agents

    def _find_agent(self, secret: str) -> AgentIdentity | None:
        return self._agents.get(hashlib.sha256(secret.encode()).hexdigest())

    def _record(self, agent: AgentIdentity, address: str, *, now: datetime) -> int:
        return 0  # clients of the unix socket name no number

    def _clear(self, sandbox: uuid.UUID, number: int, refused_version: int | None) -> None:
        return

    def _find_valid(self, connections: Any, address: str, *, now: datetime) -> set[uuid.UUID]:
        return {*connections}


class JoinGateway:
    """Gateway that agents join over TLS, without a database. Clients reach the agents by a unix socket."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, visible_port: int = 8443) -> None:
        """Listen at an address. `visible_port` is the port in the URL for agents."""
        self._listen, self._visible_port = (host, port), visible_port
        self.directory = Path(tempfile.mkdtemp(dir="/tmp"))
        self.client_path = self.directory / "gateway.sock"
        self.files = create_certificates(self.directory, GATEWAY, "127.0.0.1")
        self.records, self.loop = SessionRecords(), EventLoopThread()
        self._context = self.loop.run_context(self._listening())
        self.port = self._context.__enter__()

    @asynccontextmanager
    async def _listening(self) -> Any:
        gateway = AgentGateway()
        server = AgentSessionServer(gateway, self.records, lambda: datetime.now(UTC), lambda request: None)  # type: ignore[arg-type]
        app = web.Application()
        app.add_routes(server.build_routes())
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.files.certificate, self.files.key)
        async with gateway.listening([], self.client_path), server.serving(""):
            await web.TCPSite(runner, *self._listen, ssl_context=context).start()
            try:
                yield runner.addresses[0][1]
            finally:
                await runner.cleanup()

    def admit(self, ref: str) -> GatewayAccess:
        """Return the access of a new agent."""
        token = uuid.uuid4().hex
        self.records.refs_by_token[token] = ref
        return GatewayAccess(f"https://{GATEWAY}:{self._visible_port}", token, self.files.authority.read_text())

    def close(self) -> None:
        self._context.__exit__(None, None, None)
        self.loop.close()
        shutil.rmtree(self.directory)


class GatewayRecords(MemoryRecords):
    """Records of a provider whose agents join a JoinGateway."""

    def __init__(self, gateway: JoinGateway | None = None) -> None:
        super().__init__()
        self._gateway = gateway

    def find_agent(self, ref: str) -> AgentClient | None:
        return AgentClient(self._gateway.client_path, ref) if self._gateway else None

    def is_sealed(self, engine_id: str) -> bool:
        return True


@dataclass
class Cluster:
    """The emulator with the prerequisites. Requests are made by the control plane's service account, with its permissions."""

    emulator: KubernetesEmulator
    gateway: JoinGateway | None = None
    configuration: KubernetesConfiguration = field(default_factory=lambda: KubernetesConfiguration(gateway_address="10.96.7.7"))

    def __post_init__(self) -> None:
        address = self.emulator.set_gateway("127.0.0.1", self.gateway.port if self.gateway else 9)
        self.configuration = replace(self.configuration, gateway_address=address.partition(":")[0])
        for item in read_prerequisites():
            self.emulator.create(RESOURCES[item["kind"]], item)
        self.emulator.authorizer.is_enforced = True
        self.kubeconfig = self.emulator.write_kubeconfig("leasehold", self.emulator.create_token("leasehold", "leasehold"))

    def connect(
        self, *, kubeconfig: Path | None = None, records: PodRecords | None = None, **changes: Any
    ) -> KubernetesProvider:
        """Return a provider of its own, as of another process. `changes` are those of its configuration."""
        provider = KubernetesProvider(replace(self.configuration, **changes), records or GatewayRecords(self.gateway))
        with patch.dict("os.environ", {"KUBECONFIG": str(kubeconfig or self.kubeconfig)}):
            assert provider.pods.api  # reads the kubeconfig
        return provider

    def admit(self, spec: SandboxSpec) -> SandboxSpec:
        """Return the spec with access to the gateway."""
        return replace(spec, gateway=self.gateway.admit(spec.name) if self.gateway else None)

    def admit_nobody(self, spec: SandboxSpec) -> SandboxSpec:
        """Return the spec with access to a gateway that does not answer."""
        return replace(spec, gateway=GatewayAccess("https://127.0.0.1:1", "none"))

    def find(self, resource: resources.Resource, name: str) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self.emulator.store.find(resource, NAMESPACE, name)
        return found


@contextmanager
def running_gateway() -> Iterator[JoinGateway]:
    gateway = JoinGateway()
    try:
        yield gateway
    finally:
        gateway.close()

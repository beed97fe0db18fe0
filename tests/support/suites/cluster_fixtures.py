"""Fixtures that put a suite of the memory provider on Kubernetes: sandboxes are Pods, whose agents join a gateway over TLS.

The gateway reads the rows of the test in threads of its own, so each test has real transactions (tests/races/conftest.py)."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from sandboxes import providers
from sandboxes.models import Pool
from tests.conftest import DOCKER_IMAGE
from tests.emulators.kubernetes.emulator import GATEWAY
from tests.emulators.registry import serve_kubernetes
from tests.support.cluster import Cluster
from tests.support.remote_agent import serving_gateway
from tests.support.servers import ports
from tests.support.servers.egress import EventLoopThread
from tests.support.servers.tls import TlsFiles, create_certificates
from tests.support.suites.cluster_provider import KIND, connect


@dataclass
class SuiteCluster:
    """Cluster of all tests, and the address of their gateways, which run one after the other."""

    cluster: Cluster
    files: TlsFiles
    port: int
    loop: EventLoopThread
    provider: Any = None
    _gateway: ExitStack = field(default_factory=ExitStack)

    def start_gateway(self) -> None:
        self._gateway.enter_context(serving_gateway(self.loop, self.port, self.files))

    def stop_gateway(self) -> None:
        self._gateway.close()

    def restart_gateway(self) -> None:
        """End the gateway, and start another one with another address for the control plane."""
        self.stop_gateway()
        self.start_gateway()


@pytest.fixture(scope="session")
def suite_cluster(docker_ready: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SuiteCluster]:
    files, loop = create_certificates(tmp_path_factory.mktemp("tls"), GATEWAY), EventLoopThread()
    [port] = ports.find_free_ports()
    with serve_kubernetes(tmp_path_factory.mktemp("kubernetes")) as emulator:
        cluster = SuiteCluster(Cluster(emulator, SimpleNamespace(port=port)), files, port, loop)  # type: ignore[arg-type]
        yield cluster
        if cluster.provider:
            cluster.provider.server.close()
    loop.close()


@pytest.fixture
def memory(
    transactional_db: None, suite_cluster: SuiteCluster, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """KubernetesProvider with the hooks and switches of the memory provider, and a running gateway."""
    monkeypatch.setenv("KUBECONFIG", str(suite_cluster.cluster.kubeconfig))
    settings.KUBERNETES, settings.SANDBOX_IMAGE = suite_cluster.cluster.configuration, DOCKER_IMAGE
    settings.GATEWAY_URL, settings.GATEWAY_AUTHORITY = f"https://{GATEWAY}:8443", str(suite_cluster.files.authority)
    settings.SANDBOX_PROVIDER = KIND
    provider = suite_cluster.provider = suite_cluster.provider or connect(suite_cluster.cluster)
    create = providers._create_provider
    monkeypatch.setattr(providers, "_create_provider", lambda name: provider if name == KIND else create(name))
    suite_cluster.start_gateway()
    yield provider
    provider.reset()
    suite_cluster.stop_gateway()


@pytest.fixture
def pool(memory: Any) -> Pool:
    """Pool of this test on the cluster."""
    return Pool.objects.create(name=f"pool-{uuid4().hex[:12]}", provider=KIND, capacity=100, memory_mib=128)


__all__ = ["memory", "pool", "suite_cluster"]

"""Fixtures of the tests of the Kubernetes provider: a cluster with the prerequisites of docs/kubernetes.md."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.kubernetes.provider import KubernetesProvider
from tests.conftest import DOCKER_IMAGE
from tests.emulators.kubernetes.api.resources import PODS
from tests.emulators.registry import serve_kubernetes
from tests.support.cluster import NAMESPACE, Cluster, configured_cluster


@pytest.fixture(scope="package")
def shared_cluster(docker_ready: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with serve_kubernetes(tmp_path_factory.mktemp("kubernetes")) as emulator:
        yield Cluster(emulator)


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, which has neither Pods nor faults after a test."""
    yield shared_cluster
    emulator = shared_cluster.emulator
    emulator.faults.clear()
    emulator.foreign_answer = None
    emulator.cluster_faults.pods.clear()
    for pod in emulator.store.list(PODS, NAMESPACE):
        emulator.disruptions.vanish(NAMESPACE, pod["metadata"]["name"])


@pytest.fixture
def provider(cluster: Cluster) -> KubernetesProvider:
    return cluster.connect()


@pytest.fixture
def default_provider(cluster: Cluster, settings: Any) -> Iterator[None]:
    """The cluster as the default provider's."""
    settings.SANDBOX_PROVIDER = "kubernetes"
    with configured_cluster(cluster, "https://leasehold-gateway:8443", settings):
        yield


@pytest.fixture
def spec() -> SandboxSpec:
    return SandboxSpec(name=f"lhp-{uuid4().hex[:12]}", owner=f"owner-{uuid4().hex[:8]}", image=DOCKER_IMAGE, memory_mib=64)

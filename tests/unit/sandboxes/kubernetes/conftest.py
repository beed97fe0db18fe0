"""Fixtures of the tests of the Kubernetes provider: a cluster, its namespace, and a provider without a database."""

from collections.abc import Iterator
from dataclasses import replace
from uuid import uuid4

import pytest

from sandboxes.providers.base import SandboxSpec
from tests.conftest import DOCKER_IMAGE
from tests.emulators.kubernetes.emulator import KubernetesEmulator
from tests.emulators.registry import serve_kubernetes
from tests.support.kubernetes import Cluster


@pytest.fixture(scope="package")
def emulator(docker_ready: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesEmulator]:
    with serve_kubernetes(tmp_path_factory.mktemp("kubernetes")) as emulator:
        yield emulator


@pytest.fixture
def cluster(emulator: KubernetesEmulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A namespace of this test."""
    cluster = Cluster(emulator, f"test-{uuid4().hex[:8]}")
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    yield cluster
    cluster.clean()


@pytest.fixture
def spec() -> SandboxSpec:
    return replace(SandboxSpec(name=f"lhp-{uuid4().hex[:12]}", owner=f"owner-{uuid4().hex[:8]}"), image=DOCKER_IMAGE)

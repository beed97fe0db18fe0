"""Parked network namespaces: each is used by one sandbox at most, survives in it alone, and is swept after a crash."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.test import override_settings

from sandboxes.models import Pool
from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.docker import parked_networks
from sandboxes.providers.docker.engine import Engine
from sandboxes.providers.docker.provider import DockerProvider
from sandboxes.sweeps import passes
from tests.conftest import DOCKER_IMAGE, MINUTE, NOW, run_in_threads
from tests.docker.test_provider import Box, docker, owner  # noqa: F401 - fixtures

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("docker_ready")]
ECHO = (
    "import socket; s = socket.create_server(('127.0.0.1', 4999)); socket.create_connection(('127.0.0.1', 4999)); print('ok')"
)


class Died(BaseException):
    """Death of the process."""


@pytest.fixture
def engine(settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Engine of an installation of its own, with one parked container. What a start leaves to a thread is not done."""
    settings.RUNTIME_DIR, settings.PARKED_NETWORKS, settings.SANDBOX_IMAGE = tmp_path / uuid4().hex, 1, DOCKER_IMAGE
    settings.RUNTIME_DIR.mkdir()
    monkeypatch.setattr(parked_networks, "replace_later", lambda engine, container: None)
    engine = Engine()
    assert parked_networks.park(engine) == 1
    yield engine
    for name in names():
        docker("rm", "-f", name)


def names() -> list[str]:
    """List the parked and claimed containers of this installation."""
    return docker("ps", "-a", "--filter", f"name={parked_networks._get_prefix()}", "--format", "{{.Names}}").split()


def create(owner: str, **fields: Any) -> Box:  # noqa: F811
    provider = DockerProvider()
    box = Box(provider, provider.create(SandboxSpec(owner, owner, memory_mib=128, pids=64, **fields)), owner=owner)
    provider.wait_ready(box.ref, timeout=MINUTE)
    return box


def get_mode(box: Box) -> str:
    return docker("inspect", "-f", "{{.HostConfig.NetworkMode}}", box.ref).strip()


def get_namespace(name: str) -> str:
    return os.readlink(f"/proc/{docker('inspect', '-f', '{{.State.Pid}}', name).strip()}/ns/net")


def test_sandbox_starts_in_a_parked_namespace_and_keeps_it_alone(engine: Engine, owner: str) -> None:  # noqa: F811
    [parked] = names()
    namespace = get_namespace(parked)
    box = create(owner)
    [used] = names()
    assert used.endswith("-used")
    parked_networks.sweep(engine, keep=1)
    assert (names(), get_namespace(box.ref)) == ([], namespace)
    assert box.run("python3", "-c", ECHO).stdout == b"ok\n"  # the loopback interface is up
    assert box.run("sh", "-c", "hostname; ls /sys/class/net").stdout == b"sandbox\nlo\n"
    assert parked_networks.park(engine) == 1
    [parked] = names()
    assert get_namespace(parked) != namespace


def test_concurrent_starts_never_share_a_namespace(engine: Engine, settings: Any) -> None:
    settings.PARKED_NETWORKS = 2
    parked_networks.park(engine)
    with run_in_threads(8) as run:
        claimed = [each for each in run(lambda index: parked_networks.claim(engine)) if each]
    assert len(claimed) == len({*claimed}) == len(names()) == 2
    assert parked_networks.claim(engine) is None


def test_sandbox_without_a_parked_namespace_has_one_of_its_own(engine: Engine, owner: str, settings: Any) -> None:  # noqa: F811
    box = create(owner, writable_root=True)  # its files would be lost with the parked container
    assert (get_mode(box), len(names())) == ("none", 1)
    box.provider.destroy(box.ref)
    settings.DOCKER_RUNTIME = "runc"
    box = create(owner)
    assert (get_mode(box), len(names())) == ("none", 1)
    box.provider.destroy(box.ref)
    settings.DOCKER_RUNTIME = ""
    assert parked_networks.claim(engine)
    assert get_mode(create(owner)) == "none"


def test_sandbox_that_starts_again_has_a_namespace_of_its_own_and_its_files(
    engine: Engine, owner: str  # noqa: F811
) -> None:  # fmt: skip
    box = create(owner)
    parked_networks.sweep(engine, keep=1)
    assert get_mode(box).startswith("container:")
    box.run("sh", "-c", "echo kept >/workspace/file; echo kept >/data/file")
    docker("kill", box.ref)
    assert box.run("cat", "/workspace/file", "/data/file").stdout == b"kept\nkept\n"
    assert (get_mode(box), box.run("hostname").stdout) == ("none", b"sandbox\n")
    docker("kill", box.ref)
    assert box.run("cat", "/workspace/file").stdout == b"kept\n"


@pytest.mark.parametrize("step", ["_create_container", "_start"])
def test_crash_during_a_start_leaves_nothing_to_the_next_one(
    step: str, engine: Engine, owner: str, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    def die(*args: object) -> None:
        raise Died

    with monkeypatch.context() as crash:
        crash.setattr(DockerProvider, step, die)
        with pytest.raises(Died):
            create(owner)
    assert len(names()) == 1
    assert parked_networks.sweep(engine, keep=1) == (step == "_create_container")  # otherwise a sandbox waits for its start
    parked_networks.park(engine)
    assert get_mode(create(owner)).startswith("container:")
    for name in names():
        docker("rm", "-f", name)
    assert parked_networks.sweep(engine, keep=1) == 0


def test_start_whose_parked_container_stopped_has_a_namespace_of_its_own(
    engine: Engine, owner: str, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    claim = parked_networks.claim

    def claim_and_stop(engine: Engine) -> str | None:
        parked = claim(engine)
        docker("kill", str(parked))
        return parked

    monkeypatch.setattr(parked_networks, "claim", claim_and_stop)
    assert get_mode(create(owner)) == "none"


@pytest.mark.django_db
def test_sweep_keeps_as_many_as_the_setting_and_removes_the_rest(engine: Engine, settings: Any, tmp_path: Path) -> None:
    Pool.objects.all().delete()
    Pool.objects.create(name="parked", provider="docker")
    settings.PARKED_NETWORKS = 2
    assert count_parked() == 1
    assert count_parked() == 0
    docker("kill", names()[0])  # as by a restart of the engine
    assert count_parked() == 1
    settings.PARKED_NETWORKS = 0
    assert count_parked() == 0 and names() == []
    settings.PARKED_NETWORKS = 1
    assert count_parked() == 1
    DockerProvider().discard_prepared()
    assert names() == []


def count_parked() -> int:
    """Run the sweep, and return how many networks it parked."""
    return passes.warm_pools(now=NOW).counts.get("networks parked", 0)


def test_containers_of_another_installation_are_kept_whatever_is_seen_of_its_directory(
    engine: Engine, settings: Any, tmp_path: Path
) -> None:
    [others] = names()
    settings.RUNTIME_DIR.rmdir()
    with override_settings(RUNTIME_DIR=tmp_path / "own"):
        assert parked_networks.sweep(engine, keep=0) == 0
    assert names() == [others]

"""An engine that is killed while it starts a container, and the replacement of that container."""

import os
import shlex
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.utils import timezone

from leases import execution, sweeps
from leases.models import Lease
from sandboxes import providers
from sandboxes.errors import ProviderCallFailed
from sandboxes.models import Pool, Run
from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.command_results import ExecResult
from sandboxes.providers.docker import replacement
from sandboxes.providers.docker.engine import Conflict
from sandboxes.providers.docker.provider import DockerProvider
from sandboxes.providers.errors import Missing
from sandboxes.runs.operations import Command
from tests.conftest import DOCKER_IMAGE, MINUTE, SimulatedCrash, die
from tests.support.leases import get_sandbox, read, write
from tests.support.servers.engines import PrivateEngine, private_engine
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("docker_ready")]
# Container runtime of the engine. While the file `armed` contains the runtime's command, that command waits.
RUNTIME = """#!/bin/sh
cd {directory}
if [ -e armed ]; then
    case " $* " in *" $(cat armed) "*) touch reached; while [ -e armed ]; do sleep 0.05; done ;; esac
fi
exec {runtime} "$@"
"""


@pytest.fixture(scope="module")
def stoppable_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateEngine]:
    """Engine whose container runtime can be held. Its directory contains `bin`, beside its data."""
    directory = tmp_path_factory.mktemp("engine")
    program = directory / "bin/runc"
    program.parent.mkdir()
    program.write_text(RUNTIME.format(directory=shlex.quote(str(directory)), runtime=shutil.which("runc")))
    program.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        with private_engine(directory / "data", live_restore=True, images=(DOCKER_IMAGE,)) as engine:
            yield engine


@pytest.fixture
def pool_on_engine(stoppable_engine: PrivateEngine, request: pytest.FixtureRequest) -> Iterator[Pool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", stoppable_engine.url)
        providers._create_provider.cache_clear()
        yield request.getfixturevalue("docker_pool")
    providers._create_provider.cache_clear()


def kill_during_start(engine: PrivateEngine, ref: str, command: str) -> None:
    """Stop the container, and kill the engine when the runtime executes this command of its next start."""
    directory = engine.directory.parent
    armed, reached = directory / "armed", directory / "reached"
    subprocess.run(["docker", f"--host={engine.url}", "kill", ref], check=True, stdout=subprocess.DEVNULL)
    armed.write_text(command)
    with subprocess.Popen(["docker", f"--host={engine.url}", "start", ref], stderr=subprocess.DEVNULL):
        wait_until(reached.exists, f"the runtime executes {command}")
        engine.kill()
    reached.unlink()
    armed.unlink()
    engine.start()


def list_container_processes(container: str) -> list[str]:
    """List the processes in the container's cgroup."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if container in (process / "cgroup").read_text():
                found.append(process.name)
        except OSError:  # has ended
            continue
    return found


@pytest.mark.matrix("restarts of an engine; test_crashes.py has each step of a start")
@pytest.mark.django_db
@pytest.mark.parametrize(("command", "message"), [("create", "already exists"), ("start", "id already in use")])
def test_lease_goes_on_after_its_engine_was_killed_during_a_start(
    command: str, message: str, grant: Any, pool_on_engine: Pool, stoppable_engine: PrivateEngine, settings: Any
) -> None:
    settings.SANDBOX_PROVIDER = "docker"
    lease: Lease = grant(pool=pool_on_engine.name, now=timezone.now())
    write(lease, "kept", now=timezone.now())
    ref = get_sandbox(lease).ref
    kill_during_start(stoppable_engine, ref, command)
    client = DockerProvider()._engine.client
    container = client.inspect_container(ref)["Id"]
    with pytest.raises(Exception, match=message):  # the engine does not recover by itself
        client.start(ref)
    assert read(lease, now=timezone.now()) == "kept"
    assert get_sandbox(lease).ref == ref
    assert client.inspect_container(ref)["Id"] != container
    wait_until(lambda: not list_container_processes(container), "the processes of the replaced container have ended")


@pytest.mark.django_db
def test_destroy_kills_the_processes_that_the_killed_engine_started(
    grant: Any, pool_on_engine: Pool, stoppable_engine: PrivateEngine
) -> None:
    provider = providers.get_provider("docker")
    ref = provider.create(SandboxSpec(f"lhd-{uuid4().hex[:16]}", owner=str(pool_on_engine.owner)))
    kill_during_start(stoppable_engine, ref, "start")
    container = DockerProvider()._engine.client.inspect_container(ref)["Id"]
    wait_until(lambda: list_container_processes(container), "process 1 runs")
    provider.destroy(ref)
    wait_until(lambda: not list_container_processes(container), "process 1 has ended")


@pytest.mark.django_db
def test_command_that_survives_its_engine_keeps_the_sandbox_running_until_it_is_killed(
    grant: Any, pool_on_engine: Pool, stoppable_engine: PrivateEngine, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.SANDBOX_PROVIDER = "docker"
    monkeypatch.setattr(DockerProvider, "_kill_by_mark_on_host", lambda *arguments: False)  # as without root
    now = timezone.now()
    lease: Lease = grant(pool=pool_on_engine.name, now=now)
    ref = execution.ensure_sandbox_ready(lease.pk, now=now).ref
    container = DockerProvider()._engine.client.inspect_container(ref)["Id"]
    is_sleeping = partial(_runs_program, container, "sleep")

    def kill_engine() -> None:
        wait_until(is_sleeping, "the command runs")
        stoppable_engine.kill()

    killer = threading.Thread(target=kill_engine)
    killer.start()
    with pytest.raises(ProviderCallFailed):
        execution.exec_command(lease.pk, Command(["sleep", "300"], MINUTE), now=now)
    killer.join()
    assert is_sleeping()
    assert (get_sandbox(lease).state, Run.objects.get().ended_at) == ("running", None)
    stoppable_engine.start()
    assert sweeps.recover_stalled(now=now + MINUTE / 2).counts["runs closed"] == 1
    assert not is_sleeping()
    assert (get_sandbox(lease).state, Run.objects.get().outcome) == ("waiting", "lost")
    assert "The provider stopped responding" in Run.objects.get().note


def _runs_program(container: str, program: str) -> bool:
    for pid in list_container_processes(container):
        try:
            if Path(f"/proc/{pid}/comm").read_text().strip() == program:
                return True
        except OSError:  # has ended since it was listed
            continue
    return False


@contextmanager
def make_stopped_box() -> Iterator[tuple[DockerProvider, str, str]]:
    """Yield a provider, the ref and the id of a stopped container with the file /workspace/f."""
    provider, name = DockerProvider(), f"lhd-{uuid4().hex[:16]}"
    try:
        ref = provider.create(SandboxSpec(name, name, memory_mib=128, pids=64, labels={"agent": "did:plc:ada"}))
        execute(provider, ref, "sh", "-c", "echo kept >f")
        provider._engine.client.kill(ref)
        yield provider, ref, provider._engine.client.inspect_container(ref)["Id"]
    finally:
        provider.destroy(name)


def execute(provider: DockerProvider, ref: str, *argv: str) -> ExecResult:
    return provider.exec(ref, argv, env={}, timeout=MINUTE, mark=uuid4().hex)


@pytest.mark.parametrize("completed_calls", [2, 3])
@pytest.mark.parametrize("next_call", ["exec", "inspect", "create", "replace", "destroy"])
def test_replacement_interrupted_by_a_crash_is_completed_by_the_next_call(
    completed_calls: int, next_call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_stopped_box() as (provider, ref, container):
        engine, remaining = provider._engine, completed_calls
        call = engine.call

        def call_until_crash(*arguments: Any) -> Any:
            nonlocal remaining
            remaining -= 1
            return call(*arguments) if remaining >= 0 else die()

        with monkeypatch.context() as crash:
            crash.setattr(engine, "call", call_until_crash)
            with pytest.raises(SimulatedCrash):
                replacement.replace_container(engine, ref, container, reason="stale task")
        match next_call:
            case "inspect":
                assert provider.inspect(ref).name == ref
            case "create":
                provider.create(SandboxSpec(ref, ref, memory_mib=128))
            case "replace":
                replacement.replace_container(engine, ref, container, reason="stale task")
            case "destroy":
                provider.destroy(ref)
                assert provider.list(ref) == []
                with pytest.raises(Missing):
                    provider.inspect(ref)
                return
        assert execute(provider, ref, "cat", "f").stdout == b"kept\n"


def test_replacement_has_the_same_settings_and_other_processes_find_its_cgroup() -> None:
    with make_stopped_box() as (provider, ref, container):
        client, other = provider._engine.client, DockerProvider()
        execute(other, ref, "true")
        assert other.stats(ref)
        before = client.inspect_container(ref)
        client.kill(ref)
        replacement.replace_container(provider._engine, ref, container, reason="stale task")
        execute(provider, ref, "true")
        after = client.inspect_container(ref)
        assert after["Id"] != container
        assert after["HostConfig"] == before["HostConfig"]
        assert {**after["Config"], "Image": ""} == {**before["Config"], "Image": ""}
        assert after["Image"] == before["Image"]
        cgroup = other._engine.cgroup(ref)
        assert cgroup is None or after["Id"] in str(cgroup.processes)


def test_late_replacement_touches_no_newer_and_no_running_container() -> None:
    with make_stopped_box() as (provider, ref, container):
        engine = provider._engine
        replacement.replace_container(engine, ref, container, reason="stale task")
        execute(provider, ref, "true")
        newer = engine.client.inspect_container(ref)["Id"]
        replacement.replace_container(engine, ref, container, reason="stale task")
        with pytest.raises(Conflict):
            replacement.replace_container(engine, ref, newer, reason="stale task")
        assert engine.client.inspect_container(ref)["State"]["Running"]
        assert engine.client.inspect_container(ref)["Id"] == newer
        assert provider.inspect(ref).created_at > timezone.now() - timedelta(hours=1)

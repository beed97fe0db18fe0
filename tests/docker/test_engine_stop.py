"""An engine that is stopped gracefully during a command, as by each upgrade of its package, and is started again."""

import threading
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from django.utils import timezone

from leases import execution, sweeps
from leases.models import Lease
from sandboxes.errors import ProviderCallFailed
from sandboxes.models import Pool, Run
from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.command_results import ExecResult
from sandboxes.providers.docker.provider import DockerProvider
from sandboxes.providers.errors import Unavailable
from sandboxes.runs.operations import Command
from tests.conftest import DOCKER_IMAGE, MINUTE
from tests.support.leases import get_sandbox, read, write
from tests.support.sandbox_agent import Gateway
from tests.support.servers.engines import PrivateEngine
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.django_db, pytest.mark.matrix("a private engine, which stops its containers")]


def test_command_during_a_graceful_stop_of_the_engine_is_unknown_and_its_lease_goes_on(
    engine: PrivateEngine, docker_pool: Pool, grant: Callable[..., Lease]
) -> None:
    lease = grant(pool=docker_pool.name, now=timezone.now())
    write(lease, "precious", now=timezone.now())
    ref = get_sandbox(lease).ref

    def stop_engine() -> None:
        client = DockerProvider()._engine.client
        wait_until(lambda: "sleep 300" in str(client.top(ref)), "the command runs")
        engine.shut_down()

    stop = threading.Thread(target=stop_engine)
    stop.start()
    with pytest.raises(ProviderCallFailed):
        execution.exec_command(lease.pk, Command(["sleep", "300"], 5 * MINUTE), now=timezone.now())
    stop.join()
    engine.start()
    sweeps.recover_stalled(now=timezone.now())
    run = Run.objects.latest("started_at")
    # The engine may respond no more when the end of the command is noticed: then the sweep closes the run.
    assert run.outcome in ("error", "lost")
    assert get_sandbox(lease).lost_at is None
    assert read(lease, now=timezone.now()) == "precious"
    assert "restarted" in Run.objects.latest("started_at").note


def test_command_of_an_agent_during_a_graceful_stop_of_the_engine_is_no_loss(
    engine: PrivateEngine, agent_gateway: Gateway, settings: Any
) -> None:
    """The engine still answers over open connections when it has stopped its containers."""
    settings.AGENT_GATEWAY = agent_gateway.client_path
    provider, name = DockerProvider(), f"lhd-{uuid4().hex[:16]}"
    ref = provider.create(SandboxSpec(name, name, image=DOCKER_IMAGE, memory_mib=128, agent=agent_gateway.mount))
    provider.wait_ready(ref, timeout=MINUTE)
    execute(provider, ref, "sh", "-c", "echo precious >f")

    def stop_engine() -> None:
        wait_until(lambda: "sleep 300" in str(DockerProvider()._engine.client.top(ref)), "the command runs")
        engine.shut_down()

    stop = threading.Thread(target=stop_engine)
    stop.start()
    with pytest.raises(Unavailable):
        execute(provider, ref, "sleep", "300")
    stop.join()
    engine.start()
    assert execute(provider, ref, "cat", "f").stdout == b"precious\n"
    provider.destroy(ref)


def execute(provider: DockerProvider, ref: str, *argv: str) -> ExecResult:
    return provider.exec(ref, argv, env={}, timeout=5 * MINUTE, mark=uuid4().hex)

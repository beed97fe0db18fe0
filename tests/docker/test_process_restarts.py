"""Restarts of background processes in containers, by the agent and by the engine, and waits for a pattern in their output."""

import signal
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from leases import execution, leasing
from leases.models import Lease
from sandboxes import process_restarts, processes
from sandboxes.models import Pool, Process, RestartPolicy
from sandboxes.output_search import PatternSearch
from sandboxes.processes import OutputWait, ProcessSpec
from tests.conftest import MINUTE
from tests.support.leases import evict, run
from tests.support.sandbox_agent import Gateway

pytestmark = [pytest.mark.docker, pytest.mark.django_db(transaction=True)]
SERVER = "echo $TOKEN >> starts; echo listening on port $(wc -l < starts); exec sleep 300"


@pytest.fixture(params=["agent", "engine"])
def lease(
    request: pytest.FixtureRequest, docker_pool: Pool, agent_gateway: Gateway, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> Lease:
    """Lease whose processes are started by the agent in its container, or by launch.py where there is no gateway."""
    monkeypatch.setattr("sandboxes.egress.slots.ensure_agent_directory", lambda slot: agent_gateway.mount)
    if request.param == "agent":
        settings.AGENT_GATEWAY = agent_gateway.client_path
    wanted = leasing.LeaseRequest("did:plc:ada", "game-1", "catan", pool=docker_pool.name)
    return leasing.acquire(wanted, now=timezone.now())[0]


def start(lease: Lease, *argv: str, **fields: Any) -> Process:
    with execution.use_lease(lease.pk, now=timezone.now()) as request:
        spec = ProcessSpec(argv, {"TOKEN": "s3cret"}, **fields)
        return processes.start_process(request, spec, now=timezone.now())


def wait_for(process: Process, pattern: str, *, seconds: float = 30) -> OutputWait:
    process.refresh_from_db()
    within = timedelta(seconds=seconds)
    return processes.wait_for_pattern(process, PatternSearch(pattern), within=within, now=timezone.now())


def test_a_process_is_restarted_after_an_exit_and_after_a_wake_until_it_is_killed(lease: Lease) -> None:
    process = start(lease, "sh", "-c", SERVER, restart=RestartPolicy.ON_FAILURE, restart_after_wake=True)
    assert wait_for(process, "port ([0-9]+)\n").match
    processes.send_signal(process, signal.SIGKILL, now=timezone.now())
    assert wait_for(process, "never").ended
    process.refresh_from_db()
    assert (process.state, process.exit_code, process.restart_at is not None) == ("exited", 137, True)

    assert process_restarts.restart_due(now=timezone.now() + MINUTE).counts == {"processes restarted": 1}
    matched = wait_for(process, "(?m)^listening on port 2$").match
    assert matched
    assert (matched.start, matched.content) == (0, b"listening on port 2")
    assert run(lease, "cat", "starts", now=timezone.now()).stdout == b"s3cret\n" * 2

    evict(lease, now=timezone.now())
    process.refresh_from_db()
    assert (process.state, process.wake_pending) == ("gone", True)
    run(lease, now=timezone.now())
    assert wait_for(process, "port 3\n").match
    process.refresh_from_db()
    assert (process.state, process.restarts) == ("running", 2)

    assert processes.kill_process(process, now=timezone.now()).state == "killed"
    assert process_restarts.restart_due(now=timezone.now() + 60 * MINUTE).counts == {}
    evict(lease, now=timezone.now())
    run(lease, now=timezone.now())
    assert run(lease, "sh", "-c", "wc -l < starts", now=timezone.now()).stdout == b"3\n"


def test_a_wait_for_a_pattern_ends_with_the_time_or_the_process(lease: Lease) -> None:
    printer = "for i in 1 2 3; do printf 'par'; sleep 0.1; printf 'ts %s\\n' $i; done; exec sleep 300"
    process = start(lease, "sh", "-c", printer)
    matched = wait_for(process, "parts 3\n").match
    assert matched
    assert (matched.content, matched.start, matched.end) == (b"parts 3\n", 16, 24)
    assert wait_for(process, "parts 4", seconds=0.1) == OutputWait(None, ended=False)
    processes.send_signal(process, signal.SIGTERM, now=timezone.now())
    assert wait_for(process, "parts 4") == OutputWait(None, ended=True)

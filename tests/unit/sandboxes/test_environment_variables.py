"""Environment variables of commands, background processes and their restarts, and one-shot runs."""

import pytest

from leases import execution
from leases.models import Lease
from leases.one_shot import OneShotRequest, run_once
from sandboxes import process_ends, process_restarts, processes
from sandboxes.models import Pool
from sandboxes.processes import ProcessSpec, RestartPolicy
from sandboxes.providers.memory import MemoryProvider, ProgramCall, ProgramResult
from tests.conftest import MINUTE, NOW
from tests.support.leases import run

pytestmark = pytest.mark.django_db


@pytest.fixture
def seen(memory: MemoryProvider) -> list[tuple[str, str]]:
    """Agent and environment that each execution of `show` has been given."""
    calls: list[tuple[str, str]] = []

    def show(call: ProgramCall) -> ProgramResult:
        calls.append((call.env["AGENT_DID"], call.env["ENVIRONMENT_ID"]))
        return ProgramResult(1)

    memory.programs["show"] = show
    return calls


def test_a_command_knows_its_agent_and_environment_and_a_caller_may_override_both(lease: Lease, seen) -> None:
    run(lease, "show")
    run(lease, "show", env={"AGENT_DID": "did:web:other"})
    assert seen == [(lease.agent_did, lease.environment_id), ("did:web:other", lease.environment_id)]


def test_a_process_and_its_restart_know_their_agent_and_environment(lease: Lease, seen) -> None:
    with execution.use_lease(lease.pk, now=NOW) as request:
        processes.start_process(request, ProcessSpec(["show"], {}, restart=RestartPolicy.ALWAYS), now=NOW)
    process_ends.close_ended(now=NOW)
    process_restarts.restart_due(now=NOW + MINUTE)
    assert seen == [(lease.agent_did, lease.environment_id)] * 2


def test_a_one_shot_run_knows_its_agent(pool: Pool, seen) -> None:
    run_once(OneShotRequest("did:plc:ada", ("show",), timeout=MINUTE, pool=pool.name), now=NOW)
    assert [agent for agent, _ in seen] == ["did:plc:ada"]

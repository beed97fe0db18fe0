"""Suspension of a lease's sandbox on the Docker Engine: processes survive, and the state of a frozen container is stored."""

from datetime import timedelta

import pytest
from django.utils import timezone

from leases import execution, leasing, sweeps
from leases.models import EnvironmentType, Lease
from sandboxes import eviction, processes
from sandboxes.models import Pool, Sandbox
from sandboxes.processes import ProcessSpec
from sandboxes.providers import get_provider
from sandboxes.sweeps import passes
from tests.conftest import MINUTE
from tests.support.leases import get_sandbox, read, run, write

pytestmark = [pytest.mark.docker, pytest.mark.django_db(transaction=True)]
PRINT_ON_SIGNAL = ["sh", "-c", "trap 'echo signalled' USR1; echo ready; while :; do sleep 0.05; done"]


@pytest.fixture
def suspended(docker_pool: Pool) -> Lease:
    EnvironmentType.objects.update(suspend_after=timedelta(seconds=1))
    now = timezone.now()
    lease = leasing.acquire(leasing.LeaseRequest("did:plc:ada", "game-1", "catan", pool=docker_pool.name), now=now)[0]
    write(lease, now=now)
    suspend(lease)
    return lease


def suspend(lease: Lease) -> Sandbox:
    sandbox = get_sandbox(lease)
    assert passes.suspend_waiting(now=timezone.now() + MINUTE).counts == {"suspended": 1}
    assert get_provider("docker").inspect(sandbox.ref).suspended
    return sandbox


def test_background_process_survives_a_suspension(suspended: Lease) -> None:
    with execution.use_lease(suspended.pk, now=timezone.now()) as request:
        process = processes.start_process(request, ProcessSpec(PRINT_ON_SIGNAL), now=timezone.now())
    assert processes.wait_for_log(process, "ready", within=MINUTE, now=timezone.now())
    sandbox = suspend(suspended)
    run(suspended, "pkill", "-USR1", "-f", "echo signalled", now=timezone.now())
    assert processes.wait_for_log(process, "signalled", within=MINUTE, now=timezone.now())
    assert processes.find_by_holder(suspended.pk).get().state == "running"
    suspend(suspended)
    assert processes.kill_process(process, now=timezone.now()).state == "killed"
    assert not get_provider("docker").inspect(sandbox.ref).suspended


def test_state_of_a_suspended_sandbox_is_stored_by_its_eviction(suspended: Lease) -> None:
    assert eviction.evict(get_sandbox(suspended).pk, now=timezone.now(), reason="test")
    assert read(suspended, now=timezone.now()) == "kept"


def test_state_of_a_suspended_sandbox_is_stored_when_its_lease_ends(suspended: Lease) -> None:
    sandbox = get_sandbox(suspended)
    leasing.release(suspended.pk, now=timezone.now())
    assert sweeps.reclaim(now=timezone.now()).failures == []
    sandbox.refresh_from_db()
    assert (sandbox.state, sandbox.snapshots.count()) == ("destroyed", 1)

"""Suspension of a lease's sandbox on the Docker Engine: processes survive, and the state of a frozen container is stored.

Each test runs with containers frozen in the kernel, and with containers paused by the engine."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.utils import timezone

from leases import execution, leasing, sweeps
from leases.models import EnvironmentType, Lease
from sandboxes import eviction, processes
from sandboxes.models import Pool, Sandbox
from sandboxes.processes import ProcessSpec
from sandboxes.providers import get_provider
from sandboxes.providers.docker.freezer import Freezer
from sandboxes.providers.docker.provider import DockerProvider
from sandboxes.sweeps import passes
from tests.conftest import MINUTE
from tests.support.leases import get_sandbox, read, run, write

pytestmark = [pytest.mark.docker, pytest.mark.django_db(transaction=True)]
PRINT_ON_SIGNAL = ["sh", "-c", "trap 'echo signalled' USR1; echo ready; while :; do sleep 0.05; done"]


@pytest.fixture(params=["kernel", "engine"], autouse=True)
def freezing_by(request: pytest.FixtureRequest, docker_ready: None, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "engine":
        monkeypatch.setattr(Freezer, "is_writable", lambda self: False)
    return str(request.param)


@pytest.fixture
def waiting(docker_pool: Pool) -> Lease:
    EnvironmentType.objects.update(suspend_after=timedelta(seconds=1))
    now = timezone.now()
    lease = leasing.acquire(leasing.LeaseRequest("did:plc:ada", "game-1", "catan", pool=docker_pool.name), now=now)[0]
    write(lease, now=now)
    return lease


@pytest.fixture
def suspended(waiting: Lease) -> Lease:
    suspend(waiting)
    return waiting


def is_frozen(sandbox: Sandbox) -> bool:
    """Return what a process that starts now finds."""
    return DockerProvider().inspect(sandbox.ref).suspended


def suspend(lease: Lease) -> Sandbox:
    sandbox = get_sandbox(lease)
    assert passes.suspend_waiting(now=timezone.now() + MINUTE).counts == {"suspended": 1}
    assert is_frozen(sandbox)
    return sandbox


def test_suspension_in_the_kernel_is_unknown_to_the_engine(suspended: Lease, freezing_by: str) -> None:
    sandbox = get_sandbox(suspended)
    state = DockerProvider()._engine.call("GET", f"/containers/{sandbox.ref}/json")["State"]["Status"]
    assert state == {"kernel": "running", "engine": "paused"}[freezing_by]
    [listed] = [each for each in DockerProvider().list(str(sandbox.pool.owner)) if each.ref == sandbox.ref]
    assert (listed.running, listed.suspended) == (False, True)
    assert read(suspended, now=timezone.now()) == "kept"
    sandbox.refresh_from_db()
    assert (sandbox.state, sandbox.frozen, is_frozen(sandbox)) == ("waiting", False, False)


@pytest.mark.matrix("tests/unit/sandboxes/test_suspension.py has the same steps on the memory provider")
@pytest.mark.parametrize("step", ["suspension claimed", "frozen"])
def test_crash_at_any_step_of_a_suspension_is_continued_by_the_sweep(step: str, waiting: Lease, crash_at: Callable) -> None:
    with crash_at(step):
        passes.suspend_waiting(now=timezone.now() + MINUTE)
    assert sweeps.recover_stalled(now=timezone.now() + 3 * MINUTE).counts["suspensions finished"] == 1
    sandbox = get_sandbox(waiting)
    assert (sandbox.state, is_frozen(sandbox)) == ("suspended", True)
    assert read(waiting, now=timezone.now()) == "kept"


@pytest.mark.matrix("tests/unit/sandboxes/test_suspension.py has the same steps on the memory provider")
@pytest.mark.parametrize("step", ["run opened", "thawed"])
def test_crash_at_any_step_of_a_resume_leaves_a_usable_sandbox(step: str, suspended: Lease, crash_at: Callable) -> None:
    with crash_at(step):
        run(suspended, now=timezone.now())
    assert get_sandbox(suspended).frozen
    assert sweeps.recover_stalled(now=timezone.now() + 20 * MINUTE).counts["runs closed"] == 1
    sandbox = get_sandbox(suspended)
    assert (sandbox.state, sandbox.frozen, is_frozen(sandbox)) == ("waiting", False, False)
    assert read(suspended, now=timezone.now()) == "kept"


def test_container_whose_row_says_otherwise_is_resumed_or_frozen_again(suspended: Lease) -> None:
    sandbox, soon = get_sandbox(suspended), timezone.now() + MINUTE
    get_provider("docker").resume(sandbox.ref)
    assert sweeps.reconcile(now=soon, grace=MINUTE).counts["suspended sandboxes frozen"] == 1
    assert is_frozen(sandbox)
    Sandbox.objects.filter(pk=sandbox.pk).update(state="waiting", frozen=False)
    assert sweeps.reconcile(now=soon, grace=MINUTE).counts["frozen sandboxes resumed"] == 1
    assert not is_frozen(sandbox)


def test_restarted_container_is_frozen_again_and_keeps_its_files(suspended: Lease) -> None:
    sandbox = get_sandbox(suspended)
    get_provider("docker")._engine.client.restart(sandbox.ref, timeout=0)
    assert not is_frozen(sandbox)
    assert sweeps.reconcile(now=timezone.now() + MINUTE, grace=MINUTE).counts["suspended sandboxes frozen"] == 1
    assert is_frozen(sandbox)
    assert read(suspended, now=timezone.now()) == "kept"


def test_frozen_sandbox_whose_state_is_discarded_is_destroyed(suspended: Lease) -> None:
    sandbox = get_sandbox(suspended)
    leasing.discard(suspended.pk, now=timezone.now())
    assert sweeps.reclaim(now=timezone.now()).failures == []
    sandbox.refresh_from_db()
    assert sandbox.state == "destroyed"
    assert DockerProvider().list(str(sandbox.pool.owner)) == []


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

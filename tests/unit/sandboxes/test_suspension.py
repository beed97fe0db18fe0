"""Suspension of waiting sandboxes: when it happens, what ends it, and which crashes and races it survives."""

import uuid
from datetime import timedelta

import pytest
from django.db.models import F

from leases import execution, leasing, sweeps
from leases.models import EnvironmentType, Lease
from sandboxes import eviction, processes, suspension
from sandboxes.models import Attachment, Run, Sandbox, Transition
from sandboxes.processes import ProcessSpec
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider
from sandboxes.sweeps import measurements, passes
from tests.conftest import MINUTE, NOW
from tests.support.leases import get_sandbox, read, run, write

pytestmark = pytest.mark.django_db
DUE, LATER = NOW + MINUTE, NOW + 3 * MINUTE  # the sandbox is due for suspension; every claim has ended, but not the idle time
TIMES = {"suspend_after": timedelta(seconds=30)}


@pytest.fixture(autouse=True)
def suspending_type(db: None) -> None:
    EnvironmentType.objects.update(**TIMES)


@pytest.fixture
def sandbox(lease: Lease) -> Sandbox:
    return write(lease)


@pytest.fixture
def suspended(sandbox: Sandbox, memory: MemoryProvider) -> Sandbox:
    assert passes.suspend_waiting(now=DUE).counts == {"suspended": 1}
    sandbox.refresh_from_db()
    assert (sandbox.state, sandbox.frozen, sandbox.claim, sandbox.deadline_at) == ("suspended", True, None, None)
    assert memory.inspect(sandbox.ref).suspended
    return sandbox


def assert_awake(sandbox: Sandbox, memory: MemoryProvider, state: str = "waiting") -> None:
    sandbox.refresh_from_db()
    assert (sandbox.state, sandbox.frozen, memory.inspect(sandbox.ref).suspended) == (state, False, False)


def start(lease: Lease, *, keep_awake: bool = False) -> processes.Process:
    spec = ProcessSpec(["sh", "-c", "echo started; sleep 300"], keep_awake=keep_awake)
    with execution.use_lease(lease.pk, now=NOW) as request:
        return processes.start_process(request, spec, now=NOW)


def test_waiting_sandbox_is_suspended_after_its_time_and_resumed_by_the_next_exec(lease, sandbox, memory) -> None:
    assert passes.suspend_waiting(now=NOW + timedelta(seconds=29)).counts == {}
    assert passes.suspend_waiting(now=DUE).counts == {"suspended": 1}
    assert memory.inspect(sandbox.ref).suspended
    assert read(lease, now=DUE) == "kept"
    assert_awake(sandbox, memory)
    moves = Transition.objects.filter(sandbox=sandbox).order_by("-pk").values_list("was", "to", "code")[:3]
    assert [*moves] == [
        ("running", "waiting", "run_ended"), ("suspended", "running", "run_started"), ("waiting", "suspended", "idle")
    ]  # fmt: skip


def test_sandbox_of_a_type_without_the_setting_or_of_a_provider_that_cannot_is_not_suspended(
    grant, memory, monkeypatch
) -> None:
    monkeypatch.setattr(MemoryProvider, "can_suspend", False)
    assert write(grant()).suspend_after is None
    monkeypatch.undo()
    EnvironmentType.objects.update(suspend_after=None)
    assert write(grant(environment="game-2")).suspend_after is None
    assert passes.suspend_waiting(now=LATER).counts == {}


def test_process_that_asked_for_it_keeps_its_sandbox_awake(lease, sandbox, memory) -> None:
    watcher, other = start(lease, keep_awake=True), start(lease)
    assert passes.suspend_waiting(now=DUE).counts == {}
    processes.kill_process(watcher, now=DUE)
    assert passes.suspend_waiting(now=DUE).counts == {"suspended": 1}
    other.refresh_from_db()
    assert other.state == "running"


def test_process_keeps_its_sandbox_awake_up_to_a_limit(lease, sandbox, settings) -> None:
    settings.KEEP_AWAKE_LIMIT = timedelta(hours=1)
    start(lease, keep_awake=True)
    assert passes.suspend_waiting(now=NOW + timedelta(minutes=59)).counts == {}
    assert passes.suspend_waiting(now=NOW + timedelta(minutes=61)).counts == {"suspended": 1}


def test_sweeps_leave_a_suspended_sandbox_frozen(lease, memory) -> None:
    start(lease)
    sandbox = get_sandbox(lease)
    assert passes.suspend_waiting(now=DUE).counts == {"suspended": 1}
    before = len(memory.calls)
    processes.refresh_by_holder(lease.pk, now=DUE)
    assert sweeps.recover_stalled(now=LATER).failures == []
    assert measurements.measure_workspaces(now=LATER).failures == []
    assert measurements.record_readings(now=LATER).counts == {}
    assert sweeps.reconcile(now=LATER, grace=timedelta(0)).failures == []
    assert {method for method, _ in memory.calls[before:]} == {"list"}
    assert memory.inspect(sandbox.ref).suspended


def test_reading_a_log_and_killing_a_process_resume_the_sandbox(lease, memory) -> None:
    process = start(lease)
    sandbox = get_sandbox(lease)
    for act in (
        lambda: processes.read_log(process, start=0, length=100, now=DUE).content == b"started\n",
        lambda: processes.kill_process(process, now=DUE + MINUTE).state == "killed",
    ):
        assert passes.suspend_waiting(now=DUE + MINUTE).counts == {"suspended": 1}
        assert act()
        assert_awake(sandbox, memory)


def test_idle_suspended_sandbox_is_evicted_with_its_state(lease, suspended, memory) -> None:
    assert passes.evict_idle(now=NOW + 10 * MINUTE).counts == {"put to sleep": 1}
    assert read(lease, now=NOW + 11 * MINUTE) == "kept"


def test_suspended_sandbox_makes_room_for_another(grant, suspended, pool) -> None:
    type(pool).objects.update(capacity=1)
    assert run(grant(environment="game-2"), now=LATER).exit_code == 0
    suspended.refresh_from_db()
    assert suspended.state == "destroyed"
    assert type(pool).objects.get(pk=pool.pk).evicted_waiting == 1


def test_last_state_of_a_suspended_sandbox_is_stored_when_its_lease_ends(lease, suspended, memory) -> None:
    leasing.release(lease.pk, now=LATER)
    assert sweeps.reclaim(now=LATER).failures == []
    suspended.refresh_from_db()
    assert (suspended.state, memory.list(str(suspended.pool.owner))) == ("destroyed", [])
    assert suspended.snapshots.count() == 1


@pytest.mark.parametrize("step", ["suspension claimed", "frozen"])
def test_crash_at_any_step_of_a_suspension_is_continued_by_the_sweep(step, lease, sandbox, memory, crash_at) -> None:
    with crash_at(step):
        passes.suspend_waiting(now=DUE)
    assert sweeps.recover_stalled(now=LATER).counts["suspensions finished"] == 1
    assert memory.inspect(sandbox.ref).suspended
    assert read(lease, now=LATER) == "kept"
    assert_awake(sandbox, memory)


@pytest.mark.parametrize("step", ["suspension claimed", "frozen"])
def test_exec_takes_over_a_suspension_whose_worker_died(step, lease, sandbox, memory, crash_at) -> None:
    with crash_at(step):
        passes.suspend_waiting(now=DUE)
    assert read(lease, now=LATER) == "kept"
    assert_awake(sandbox, memory)


@pytest.mark.parametrize("step", ["run opened", "thawed"])
def test_crash_at_any_step_of_a_resume_leaves_a_usable_sandbox(step, lease, suspended, memory, crash_at) -> None:
    with crash_at(step):
        run(lease, now=DUE)
    assert sweeps.recover_stalled(now=NOW + 20 * MINUTE).counts["runs closed"] == 1
    assert read(lease, now=NOW + 20 * MINUTE) == "kept"
    assert_awake(suspended, memory)


def test_failed_suspension_leaves_the_sandbox_waiting_and_usable(lease, sandbox, memory) -> None:
    with memory.fail("suspend", Unavailable("engine down")):
        assert len(passes.suspend_waiting(now=DUE).failures) == 1
    sandbox.refresh_from_db()
    assert (sandbox.state, sandbox.frozen) == ("waiting", True)  # whether the engine has frozen it is unknown
    assert read(lease, now=DUE) == "kept"
    assert_awake(sandbox, memory)


def test_failed_resume_runs_nothing_and_is_repeated_by_the_next_exec(lease, suspended, memory) -> None:
    with memory.fail("resume", Unavailable("engine down")), pytest.raises(execution.SandboxError):
        run(lease, now=DUE)
    assert Run.objects.order_by("-started_at").values_list("outcome", flat=True)[0] == "failed"
    assert read(lease, now=LATER) == "kept"
    assert_awake(suspended, memory)


def test_exec_waits_for_the_worker_that_suspends_its_sandbox(lease, sandbox, memory, at_checkpoint, monkeypatch) -> None:
    waits: list[float] = []

    def confirm(seconds: float) -> None:
        waits.append(seconds)
        Sandbox.objects.update(claim=None, deadline_at=None)

    monkeypatch.setattr("sandboxes.pool.allocation.time.sleep", confirm)
    at_checkpoint("frozen", lambda: run(lease, now=DUE))
    assert passes.suspend_waiting(now=DUE).counts == {"lost race": 1}
    assert len(waits) == 1
    assert_awake(sandbox, memory)


@pytest.mark.parametrize("act", ["exec", "evict"])
def test_worker_that_outlasts_its_claim_leaves_nothing_frozen(act, lease, sandbox, memory) -> None:
    def use(ref: str) -> None:
        Sandbox.objects.update(deadline_at=F("deadline_at") - MINUTE)
        assert read(lease, now=DUE) == "kept" if act == "exec" else eviction.evict(sandbox.pk, now=DUE)

    with memory.before("suspend", use):
        passes.suspend_waiting(now=DUE)
    if act == "exec":
        assert_awake(sandbox, memory)
    assert read(lease, now=LATER) == "kept"


@pytest.mark.parametrize("error", [None, Unavailable("engine down")])
def test_worker_that_outlasts_its_claim_does_not_end_that_of_its_successor(error, lease, sandbox, memory, crash_at) -> None:
    def be_taken_over(ref: str) -> None:
        removal.close()
        with crash_at("frozen"):
            sweeps.recover_stalled(now=LATER)
        Sandbox.objects.filter(pk=sandbox.pk).update(claimed_by="successor")
        if error:
            raise error

    removal = memory.before("suspend", be_taken_over)
    result = passes.suspend_waiting(now=DUE)
    assert (result.counts, len(result.failures)) == (({}, 1) if error else ({"lost race": 1}, 0))
    sandbox.refresh_from_db()
    assert (sandbox.state, sandbox.claimed_by, sandbox.frozen) == ("suspended", "successor", True)


def test_suspension_with_a_living_worker_is_not_continued(lease, sandbox, memory, at_checkpoint) -> None:
    continued: list[bool] = []
    at_checkpoint("frozen", lambda: continued.append(suspension.continue_suspension(get_sandbox(lease), now=DUE)))
    assert passes.suspend_waiting(now=DUE).counts == {"suspended": 1}
    assert continued == [False]


def test_suspension_of_a_sandbox_that_was_used_and_suspended_since_is_not_continued(lease, suspended, memory) -> None:
    run(lease, now=DUE)
    assert passes.suspend_waiting(now=LATER).counts == {"suspended": 1}
    before = len(memory.calls)
    assert not suspension.continue_suspension(suspended, now=LATER)
    assert memory.calls[before:] == []


def test_late_resume_of_a_sandbox_that_was_suspended_again_leaves_it_frozen(lease, suspended, memory, at_checkpoint) -> None:
    def suspend_and_die_while_resuming() -> None:
        assert passes.suspend_waiting(now=LATER).counts == {"suspended": 1}
        with memory.fail("resume", Unavailable("engine down")), pytest.raises(Unavailable):
            suspension.ensure_awake(suspended, memory, now=LATER)

    at_checkpoint("thawed", suspend_and_die_while_resuming)
    suspension.ensure_awake(suspended, memory, now=DUE)
    assert get_sandbox(lease).frozen
    assert read(lease, now=LATER) == "kept"


def test_earlier_incarnation_found_frozen_is_not_resumed_in_a_later_one(lease, suspended, memory) -> None:
    assert eviction.evict(suspended.pk, now=DUE)
    assert read(lease, now=LATER) == "kept"
    before = len(memory.calls)
    assert not suspension.recover_frozen(suspended, memory)
    assert memory.calls[before:] == []


@pytest.mark.parametrize("rival", ["process call", "run"])
def test_exec_that_read_its_sandbox_before_a_suspension_resumes_it(
    rival, lease, sandbox, memory, at_checkpoint, crash_at
) -> None:
    def suspend_and_die_while_resuming() -> None:
        assert passes.suspend_waiting(now=DUE).counts == {"suspended": 1}
        if rival == "run":
            with crash_at("run opened"):
                run(lease, now=DUE)
        else:
            with memory.fail("resume", Unavailable("engine down")), pytest.raises(Unavailable):
                suspension.ensure_awake(sandbox, memory, now=DUE)

    at_checkpoint("sandbox ready", suspend_and_die_while_resuming)
    assert read(lease, now=DUE) == "kept"
    assert not memory.inspect(sandbox.ref).suspended


def test_claimed_suspension_is_left_to_its_worker(lease, suspended, memory, at_checkpoint, monkeypatch) -> None:
    def claim() -> None:
        Sandbox.objects.update(claim=uuid.uuid4(), deadline_at=NOW + timedelta(hours=1))

    ended: list[float] = []

    def end_claim(seconds: float) -> None:
        ended.append(seconds)
        Sandbox.objects.update(claim=None, deadline_at=None)

    monkeypatch.setattr("sandboxes.suspension.time.sleep", end_claim)
    at_checkpoint("sandbox ready", claim)  # after the row was read
    assert read(lease, now=DUE) == "kept"
    assert passes.suspend_waiting(now=LATER).counts == {"suspended": 1}
    claim()
    assert not eviction.evict(suspended.pk, now=LATER)
    assert passes.evict_idle(now=NOW + 20 * MINUTE).counts == {}
    suspension.ensure_awake(suspended, memory, now=LATER)
    assert len(ended) == 2
    assert_awake(suspended, memory)


def test_sandbox_with_unsaved_data_is_not_suspended_before_the_data_is_stored(lease, sandbox, memory) -> None:
    Attachment.objects.update(unsaved_since=NOW)
    assert passes.suspend_waiting(now=DUE).counts == {}
    Attachment.objects.update(full=True)  # not retried
    assert passes.suspend_waiting(now=DUE).counts == {"suspended": 1}


def test_sandbox_used_since_it_was_read_is_not_suspended(lease, sandbox, memory) -> None:
    run(lease, now=DUE)
    assert not suspension.suspend(sandbox, now=LATER)
    assert_awake(sandbox, memory)


def test_reconcile_agrees_the_engine_with_the_row_in_both_directions(lease, suspended, memory) -> None:
    memory.resume(suspended.ref)  # for example by an operator
    assert sweeps.reconcile(now=LATER, grace=timedelta(0)).counts["suspended sandboxes frozen"] == 1
    assert memory.inspect(suspended.ref).suspended
    run(lease, now=LATER)
    memory.suspend(suspended.ref)
    assert sweeps.reconcile(now=LATER, grace=timedelta(0)).counts["frozen sandboxes resumed"] == 1
    assert_awake(suspended, memory)

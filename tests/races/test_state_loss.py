"""Failures, crashes and overtaken workers. A change that a run has acknowledged survives every one of them."""

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.db import OperationalError

from controlplane.errors import build_error_response
from leases import execution, leasing
from leases import sweeps as lease_sweeps
from leases.errors import LeaseEnded
from leases.models import LeaseEvent
from sandboxes import destruction, eviction, lifecycle
from sandboxes.errors import OutcomeUnknown, ProviderCallFailed, SandboxNotHeld, SandboxNotReady
from sandboxes.hosts import registry
from sandboxes.models import Host, Pool, Quota, Run, Sandbox, Snapshot
from sandboxes.pool import starts
from sandboxes.providers.errors import Missing, Rejected, Unavailable
from sandboxes.providers.memory import ProgramCall, ProgramResult
from sandboxes.runs import operations
from sandboxes.runs.operations import Command
from sandboxes.storage.base import StoreError
from sandboxes.sweeps import passes, reconciliation
from tests.conftest import MINUTE, NOW, SimulatedCrash
from tests.support.leases import run
from tests.support.suites import TEST_PROVIDER

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("guarded UPDATEs of the state machine")]
HOUR = timedelta(hours=1)
DISK_FULL = StoreError("memory", "upload", "disk full")


def sh(lease, line: str, now) -> bytes:
    _, result = execution.exec_command(lease.pk, Command(argv=["sh", "-c", line], timeout=MINUTE), now=now)
    return result.stdout


def get_sandbox(lease) -> Sandbox:
    return Sandbox.objects.get(holder=lease.pk)


def test_a_failed_delete_of_an_old_snapshot_does_not_fail_the_eviction(grant, memory_store) -> None:
    lease, now = grant(ttl=24 * HOUR), NOW
    for number in range(5):
        sh(lease, f"echo {number} >f", now)
        with memory_store.fail("remove", StoreError("memory", "remove", "access denied")):
            assert eviction.evict(get_sandbox(lease).pk, now=now + MINUTE)
        now += 20 * MINUTE
    assert sh(lease, "cat f", now) == b"4\n"


def test_an_eviction_between_the_rows_and_the_listing_of_a_reconcile_is_no_loss(
    grant, pool, memory, at_checkpoint, monkeypatch
) -> None:
    """The sweep has read the row before its state was stored, and looks for the sandbox after its process was destroyed."""
    lease, other = grant(), grant(environment="game-2")
    sh(lease, "echo kept >f", NOW)
    sh(other, "true", NOW)
    list_sandboxes = reconciliation.list_sandboxes

    def evict_before(listed_pool: Pool, *arguments: Any) -> Any:
        if listed_pool == pool:
            at_checkpoint("process gone")
            with pytest.raises(SimulatedCrash):
                eviction.evict(get_sandbox(lease).pk, now=NOW + MINUTE)
        return list_sandboxes(listed_pool, *arguments)

    monkeypatch.setattr(reconciliation, "list_sandboxes", evict_before)
    assert lease_sweeps.reconcile(now=NOW + MINUTE, grace=HOUR).counts == {"kept": 1, "lost race": 1}
    passes.recover_stalled(now=NOW + HOUR)
    assert sh(lease, "cat f", NOW + HOUR) == b"kept\n"


def test_a_snapshot_counts_only_if_no_run_began_after_it(grant, memory_store, memory) -> None:
    """The state is stored, the sandbox returns to use, and is evicted again."""
    lease = grant()
    sh(lease, "echo old >f", NOW)
    with memory.fail("destroy", Unavailable("engine"), times=1):
        assert not eviction.evict(get_sandbox(lease).pk, now=NOW + MINUTE)
    sandbox = get_sandbox(lease)
    assert (sandbox.state, sandbox.persisted) == ("evicting", True)
    Sandbox.objects.filter(pk=sandbox.pk).update(state="waiting", claim=None, deadline_at=None, tries=0)
    sh(lease, "echo new >f", NOW + 2 * MINUTE)
    assert eviction.evict(sandbox.pk, now=NOW + 3 * MINUTE)
    assert sh(lease, "cat f", NOW + HOUR) == b"new\n"


def test_a_sandbox_whose_state_is_not_stored_is_never_destroyed_as_stalled(grant, memory_store, at_checkpoint) -> None:
    """Hours of failed stores, then the death of the worker in the next eviction."""
    lease, now = grant(ttl=24 * HOUR), NOW
    sh(lease, "echo precious >f", now)
    with memory_store.fail("upload", DISK_FULL):
        for _ in range(9):
            now += HOUR
            assert passes.evict_idle(now=now).failures
    assert get_sandbox(lease).persist_failures == 9

    at_checkpoint("eviction claimed")
    with pytest.raises(SimulatedCrash):
        passes.evict_idle(now=now + HOUR)
    lease_sweeps.recover_stalled(now=now + 2 * HOUR)
    assert sh(lease, "cat f", now + 2 * HOUR) == b"precious\n"


def test_a_run_resets_the_count_of_failed_stores(grant, memory_store) -> None:
    lease = grant()
    sh(lease, "echo 1 >f", NOW)
    with memory_store.fail("upload", DISK_FULL):
        passes.evict_idle(now=NOW + HOUR)
    assert get_sandbox(lease).persist_failures == 1
    sh(lease, "true", NOW + HOUR)
    assert get_sandbox(lease).persist_failures == 0


def test_missing_sandbox_with_nothing_unsaved_is_woken_from_its_stored_state(grant, memory_store, memory) -> None:
    """The run finds the sandbox missing before the `reconcile` sweep does."""
    lease = grant()
    sh(lease, "echo stored >f", NOW)
    assert eviction.evict(get_sandbox(lease).pk, now=NOW)
    ready = execution.ensure_sandbox_ready(lease.pk, now=NOW + MINUTE)
    memory.vanish(ready.ref)
    with pytest.raises(SandboxNotReady):
        sh(lease, "cat f", NOW + MINUTE)
    assert get_sandbox(lease).state == "cold"
    assert sh(lease, "cat f", NOW + 2 * MINUTE) == b"stored\n"
    assert get_sandbox(lease).incarnation == ready.incarnation + 1


@pytest.mark.parametrize(
    ("method", "error", "raised"),
    [("exec", Rejected("no"), Rejected), ("put_files", Unavailable("no answer"), ProviderCallFailed)],
)
def test_missing_sandbox_in_which_no_command_was_executed_is_woken_from_its_stored_state(
    grant, memory_store, memory, method: str, error: Exception, raised: type[Exception]
) -> None:
    lease = grant()
    sh(lease, "echo stored >f", NOW)
    assert eviction.evict(get_sandbox(lease).pk, now=NOW)
    execution.ensure_sandbox_ready(lease.pk, now=NOW + MINUTE)
    memory.fail(method, error, times=1)
    with pytest.raises(raised):
        sh(lease, "echo changed >f", NOW + MINUTE)
    memory.vanish(get_sandbox(lease).ref)
    execution.ensure_sandbox_ready(grant("did:plc:other").pk, now=NOW + HOUR)  # an empty listing would not be trusted
    assert lease_sweeps.reconcile(now=NOW + HOUR, grace=MINUTE).counts["found cold"] == 1
    assert sh(lease, "cat f", NOW + HOUR) == b"stored\n"


def test_sandbox_that_vanishes_during_a_command_ends_the_lease_as_lost(grant, memory_store, memory) -> None:
    def lose(call: ProgramCall) -> ProgramResult:
        memory.vanish(get_sandbox(lease).ref)
        return ProgramResult()

    lease = grant()
    memory.programs["work"] = lose
    with pytest.raises(LeaseEnded, match="lost"):
        run(lease, "work")
    ended = Run.objects.get()
    assert (ended.outcome, ended.exit_code, ended.note.partition(":")[0]) == ("lost", None, "Sandbox lost during the run")
    assert get_sandbox(lease).lost_at
    event = LeaseEvent.objects.get(lease=lease, kind="ended")
    assert event.actor == "provider"
    assert event.reason.startswith("lost: Sandbox lost during the run: ")


def test_overtaken_worker_does_not_store_over_its_successor(grant, memory_store, at_checkpoint) -> None:
    """The worker's objects are stored when another worker takes over its claim."""
    lease = grant()
    sh(lease, "echo 1 >f", NOW)
    sandbox = get_sandbox(lease)
    at_checkpoint("objects stored", lambda: Sandbox.objects.filter(pk=sandbox.pk).update(claim=uuid4()))
    assert not eviction.evict(sandbox.pk, now=NOW)
    assert not Snapshot.objects.exists()
    assert (get_sandbox(lease).state, get_sandbox(lease).persisted) == ("evicting", False)


def test_start_whose_claim_was_taken_over_does_not_make_the_sandbox_ready(grant, memory_store, memory, at_checkpoint) -> None:
    lease = grant()
    at_checkpoint("prepared", lambda: Sandbox.objects.filter(holder=lease.pk).update(claim=uuid4()))
    with pytest.raises(SandboxNotHeld):
        execution.ensure_sandbox_ready(lease.pk, now=NOW)
    assert get_sandbox(lease).state == "warming"
    assert not memory.list(str(lease.pool.owner))


def test_each_wake_has_an_incarnation_of_its_own(grant, memory_store, monkeypatch) -> None:
    """Another request wakes the sandbox between the read of its row and the UPDATE, and the sandbox is evicted again."""
    lease, get_host = grant(), registry.get_placement_host
    sh(lease, "echo kept >f", NOW)
    assert eviction.evict(get_sandbox(lease).pk, now=NOW)

    def get_host_after_another_wake(*args: Any, **options: Any) -> Host:
        monkeypatch.undo()
        assert sh(lease, "cat f", NOW) == b"kept\n"
        assert eviction.evict(get_sandbox(lease).pk, now=NOW)
        return get_host(*args, **options)

    monkeypatch.setattr(registry, "get_placement_host", get_host_after_another_wake)
    assert sh(lease, "cat f", NOW) == b"kept\n"
    assert get_sandbox(lease).incarnation == 3


def test_run_does_not_join_a_running_sandbox_of_another_holder(grant, memory_store) -> None:
    sandbox = execution.ensure_sandbox_ready(grant().pk, now=NOW)
    assert sandbox.holder is not None
    assert lifecycle.start_run(sandbox.pk, 1, holder=sandbox.holder, now=NOW) == "warm"
    assert lifecycle.start_run(sandbox.pk, 1, holder=uuid4(), now=NOW) is None
    assert lifecycle.start_run(sandbox.pk, 1, holder=sandbox.holder, now=NOW) == "running"


def test_guarantee_is_checked_when_a_victim_is_chosen_and_when_its_place_is_taken(grant, memory_store, pool) -> None:
    """The guarantee may change between the two checks."""
    sandbox = execution.ensure_sandbox_ready(grant().pk, now=NOW)
    Quota.objects.filter(pool=pool, agent_did=sandbox.agent_did).update(guaranteed=1)
    assert eviction.find_victim(pool, agent_did="did:plc:other", now=NOW) is None
    assert eviction.find_victim(pool, agent_did=sandbox.agent_did, now=NOW) == sandbox
    assert eviction.evict(sandbox.pk, now=NOW)
    assert not eviction.release_cold(sandbox.pk, now=NOW, for_agent="did:plc:other")
    assert eviction.release_cold(sandbox.pk, now=NOW, for_agent=sandbox.agent_did)


class TestFailover:
    """The database does not respond while a result is being recorded."""

    pytestmark = pytest.mark.django_db(transaction=True)

    def test_result_in_hand_is_recorded_after_the_failover(self, grant, memory, failover) -> None:
        lease = grant()
        attempts = failover(operations, "close_run", 20)
        assert sh(lease, "echo done", NOW) == b"done\n"
        assert len(attempts) == 21
        assert Run.objects.get().outcome == "ok"

    def test_result_that_cannot_be_recorded_does_not_invite_a_repetition(self, grant, memory, failover) -> None:
        lease = grant()
        failover(operations, "close_run", 1000)
        with pytest.raises(OutcomeUnknown) as raised:
            sh(lease, "echo done", NOW)
        run = Run.objects.get()
        assert raised.value.extra == {"run_id": str(run.pk), "exit_code": 0}
        response = build_error_response(raised.value, "/", "GET")
        assert (response.status_code, response.headers.get("Retry-After")) == (409, None)
        assert len([verb for verb, _ in memory.calls if verb == "exec"]) == 1

    def test_run_of_a_failed_operation_is_closed_after_the_failover(self, grant, memory, failover) -> None:
        lease = grant()
        failover(operations, "close_run", 20)
        memory.fail("exec", Unavailable("no answer"), times=1)
        with pytest.raises(ProviderCallFailed):
            sh(lease, "echo done", NOW)
        assert Run.objects.get().outcome == "error"

    @pytest.mark.parametrize("cause", [Unavailable("no answer"), Missing("removed while the command ran")])
    def test_a_failure_that_cannot_be_recorded_is_answered_as_a_failure_of_the_provider(
        self, grant, memory, failover, cause: Exception
    ) -> None:
        lease = grant()
        failover(operations, "close_run", 1000)
        memory.fail("exec", cause, times=1)
        with pytest.raises(ProviderCallFailed, match=str(cause) if TEST_PROVIDER == "memory" else "The provider failed"):
            sh(lease, "true", NOW)
        assert Run.objects.get().outcome == "open"

    @pytest.mark.parametrize("cold", [False, True])
    @pytest.mark.parametrize("step", ["_restore_state", "_mark_ready"])
    def test_start_that_cannot_be_recorded_is_given_up_by_the_next_sweep(
        self, grant, pool, memory, failover, step: str, cold: bool
    ) -> None:
        lease = grant()
        if cold:
            sh(lease, "echo kept >file", NOW)
            assert eviction.evict(get_sandbox(lease).pk, now=NOW)
        failover(starts, step, times=1)
        with pytest.raises(OperationalError):
            sh(lease, "true", NOW)
        now = NOW + timedelta(seconds=5)
        assert passes.recover_stalled(now=now).counts["stalled starts destroyed"] == 1
        assert not passes.destroy_due(now=now).failures
        assert sh(lease, "cat file" if cold else "echo kept", now) == b"kept\n"
        assert (Quota.objects.get().used, len(memory.list(str(pool.owner)))) == (1, 1)

    @pytest.mark.parametrize(("end", "swept"), [("eviction", "cold"), ("destruction", "destroyed")])
    def test_step_that_cannot_be_recorded_is_repeated_by_the_next_sweep(
        self, grant, memory, monkeypatch: pytest.MonkeyPatch, end: str, swept: str
    ) -> None:
        lease = grant()
        sh(lease, "echo kept >file", NOW)
        sandbox = get_sandbox(lease)

        def fail(*args: Any, **values: Any) -> bool:
            raise OperationalError("the connection is closed")

        if end == "destruction":
            leasing.release(lease.pk, now=NOW)
        act = {"eviction": eviction.evict, "destruction": destruction.destroy}[end]
        with monkeypatch.context() as patch:
            patch.setattr(memory, "destroy", lambda ref: patch.setattr(f"sandboxes.{end}.advance", fail))
            with pytest.raises(OperationalError):
                act(sandbox.pk, now=NOW)
        now = NOW + timedelta(seconds=5)
        assert not (passes.recover_stalled(now=now).failures or passes.destroy_due(now=now).failures)
        sandbox.refresh_from_db()
        assert sandbox.state == swept

"""Several hosts with one database: each engine's sandboxes are touched only by processes that reach this engine."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from django.db import OperationalError, connection
from django_q.models import OrmQ

from leases import leasing, tasks
from leases import sweeps as lease_sweeps
from leases.errors import LeaseEnded
from leases.models import Lease, LeaseStatus
from sandboxes import claims, eviction, stop_reasons, sweep_log
from sandboxes.db import clock
from sandboxes.egress import authorization
from sandboxes.errors import CapacityExhausted, HostLost, ProviderCallFailed, WrongHost
from sandboxes.hosts import registry
from sandboxes.models import Host, Pool, Sandbox, SandboxState, Sweep
from sandboxes.providers.base import ProviderSandbox
from sandboxes.providers.memory import MemoryProvider
from sandboxes.storage import get_store
from sandboxes.sweep_log import RUN_TTL, RunningPass, SweepResult, SweepsInProgress, run_recorded
from sandboxes.sweeps import end_watch, heartbeat, lost_hosts
from sandboxes.sweeps import passes as sweeps
from tests.conftest import MINUTE, NOW, SimulatedCrash
from tests.support.actors import console_user
from tests.support.leases import evict, get_sandbox, read, run, update_pool, write

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("hand-written SQL")]
A, B = "engine-a", "engine-b"
LATER = NOW + timedelta(minutes=10)


@pytest.fixture
def lease(grant: Any, memory: MemoryProvider) -> Lease:
    """Lease whose sandbox runs on the engine A, with a file that is stored nowhere."""
    with memory.on_engine(A):
        lease = grant()
        write(lease, "kept")
    return lease


def sweep_all(now: Any = LATER) -> None:
    """Run the sweeps that call providers."""
    for sweep in (lease_sweeps.recover_stalled, lease_sweeps.reclaim, lease_sweeps.destroy_cold):
        sweep(now=now)
    lease_sweeps.reconcile(now=now, grace=MINUTE)


def test_another_hosts_request_and_sweeps_do_not_end_a_lease(lease: Lease, memory: MemoryProvider) -> None:
    with memory.on_engine(B):
        with pytest.raises(WrongHost):
            run(lease)
        sweep_all()
    lease.refresh_from_db()
    assert lease.status == LeaseStatus.ACTIVE
    with memory.on_engine(A):
        assert read(lease) == "kept"


def test_another_host_does_not_confirm_a_destroy_and_the_slot_stays_taken(lease: Lease, memory: MemoryProvider) -> None:
    sandbox = get_sandbox(lease)
    with memory.on_engine(B):
        leasing.release(lease.pk, now=NOW)
        sweep_all()
    sandbox.refresh_from_db()
    assert (sandbox.state, sandbox.slot is None) == (SandboxState.DESTROYING, False)
    with memory.on_engine(A):
        lease_sweeps.reclaim(now=LATER)
        assert memory.list(str(sandbox.pool.owner)) == []
    assert Sandbox.objects.get(pk=sandbox.pk).state == SandboxState.DESTROYED


def test_a_missing_sandbox_counts_only_if_the_engine_is_still_its_own(lease: Lease, memory: MemoryProvider) -> None:
    with memory.on_engine(A):
        # During the call, DOCKER_HOST comes to lead to another engine.
        with memory.before("exec", lambda ref: memory.select_engine(B)), pytest.raises(ProviderCallFailed):
            run(lease)
        memory.select_engine(A)
        assert read(lease) == "kept"
        memory.vanish(get_sandbox(lease).ref)
        with pytest.raises(LeaseEnded):
            run(lease)


def test_a_destroy_that_reached_another_engine_is_not_confirmed(lease: Lease, memory: MemoryProvider) -> None:
    with memory.on_engine(A):
        sandbox = get_sandbox(lease)
        leasing.release(lease.pk, now=NOW)
        with memory.before("destroy", lambda ref: memory.select_engine(B)):
            assert lease_sweeps.reclaim(now=LATER).failures
        sandbox.refresh_from_db()
        assert sandbox.state == SandboxState.DESTROYING


def test_a_cold_sandbox_wakes_on_any_host(lease: Lease, memory: MemoryProvider) -> None:
    with memory.on_engine(A):
        evict(lease)
    with memory.on_engine(B):
        assert read(lease) == "kept"
        assert get_sandbox(lease).host == registry.get_local_host("memory", now=NOW)


def test_state_that_only_another_host_has_is_refused_and_kept(lease: Lease, memory: MemoryProvider, settings: Any) -> None:
    with memory.on_engine(A):
        evict(lease)
    directory = settings.STORAGE_DIR
    with memory.on_engine(B):
        settings.STORAGE_DIR = directory.with_name("store-of-b")  # a filesystem store that the hosts do not share
        get_store.cache_clear()
        with pytest.raises(WrongHost, match="stored state"):
            run(lease)
        assert get_sandbox(lease).state == SandboxState.COLD
    settings.STORAGE_DIR = directory
    get_store.cache_clear()
    with memory.on_engine(A):
        assert read(lease) == "kept"


def test_room_is_made_on_the_own_host_or_from_cold_sandboxes(
    lease: Lease, grant: Any, pool: Pool, memory: MemoryProvider
) -> None:
    update_pool(pool, capacity=1)
    with memory.on_engine(B), pytest.raises(CapacityExhausted):
        run(grant("did:plc:bob"))
    with memory.on_engine(A):
        evict(lease)
    with memory.on_engine(B):
        run(grant("did:plc:bob"))


def test_a_silent_host_keeps_its_leases_until_it_is_declared_lost(
    lease: Lease, memory: MemoryProvider, pool: Pool, settings: Any
) -> None:
    settings.HOST_TIMEOUT = timedelta(minutes=20)
    host = get_sandbox(lease).host
    assert host and registry.get_state(host, now=NOW + timedelta(minutes=19)) == "live"
    later = NOW + timedelta(minutes=30)
    with memory.on_engine(B):
        heartbeat.record_heartbeats(now=later)
        sweep_all(now=later)
        assert (registry.get_state(host, now=later), lease_status(lease)) == ("unreachable", LeaseStatus.ACTIVE)
        assert lease_sweeps.declare_host_lost(host, now=later, actor=console_user("ops"))
    sandbox = Sandbox.objects.get(holder=lease.pk)
    assert (sandbox.state, lease_status(lease), Pool.objects.get(pk=pool.pk).used) == (SandboxState.DESTROYED, "expired", 0)
    assert stop_reasons.find_last_stop(lease.pk).reason == "host_lost"


def test_a_lost_host_that_returns_is_cleaned_up_before_it_starts_sandboxes(
    lease: Lease, grant: Any, memory: MemoryProvider, pool: Pool
) -> None:
    host = get_sandbox(lease).host
    assert host
    lease_sweeps.declare_host_lost(host, now=LATER, actor=console_user("ops"))
    with memory.on_engine(A):
        with pytest.raises(HostLost):
            run(grant("did:plc:bob"))
        assert len(memory.list(str(pool.owner))) == 1
        assert heartbeat.record_heartbeats(now=LATER).counts == {
            "hosts seen": 1, "leftovers destroyed": 1, "hosts returned": 1,
        }  # fmt: skip
        assert memory.list(str(pool.owner)) == []
        run(grant("did:plc:bob"))


def test_the_release_of_a_lost_host_continues_after_a_crash(lease: Lease, memory: MemoryProvider) -> None:
    host = get_sandbox(lease).host
    assert host
    assert lost_hosts.declare_lost(host, now=LATER, actor=console_user("ops"))  # the process dies here
    with memory.on_engine(B):
        assert lease_sweeps.recover_stalled(now=LATER).counts["sandboxes of lost hosts released"] == 1
    assert lease_status(lease) == LeaseStatus.EXPIRED


def test_sandboxes_of_earlier_versions_are_assigned_to_the_host_that_has_them(lease: Lease, memory: MemoryProvider) -> None:
    host = get_sandbox(lease).host
    Sandbox.objects.update(host=None)
    with memory.on_engine(B):
        registry.get_local_host("memory", now=NOW)
        assert "sandboxes assigned" not in heartbeat.record_heartbeats(now=NOW).counts
        with pytest.raises(WrongHost):
            run(lease)
    with memory.on_engine(A):
        assert heartbeat.record_heartbeats(now=NOW).counts["sandboxes assigned"] == 1
        assert (read(lease), get_sandbox(lease).host) == ("kept", host)


def test_local_copies_of_another_host_are_left_to_it(lease: Lease, memory: MemoryProvider) -> None:
    with memory.on_engine(A):
        evict(lease)
        assert eviction.release_cold(get_sandbox(lease).pk, now=NOW)
    with memory.on_engine(B):
        registry.get_local_host("memory", now=NOW)
        assert not sweeps.find_leftover_local_copies().exists()
    with memory.on_engine(A):
        assert sweeps.find_leftover_local_copies().count() == 1


def test_the_egress_proxy_of_another_host_does_not_take_a_slot_for_the_sandboxs(lease: Lease, memory: MemoryProvider) -> None:
    slot = get_sandbox(lease).slot
    with memory.on_engine(A):
        assert authorization.identify_caller(slot, now=NOW).holder == lease.pk
    with memory.on_engine(B), pytest.raises(authorization.CallRefused):
        authorization.identify_caller(slot, now=NOW)


def test_a_sweep_of_the_installation_runs_on_one_host_and_a_hosts_own_on_each(memory: MemoryProvider) -> None:
    for engine, passes in ((A, {"pass": 1}), (B, {"left to another process": 1})):
        with memory.on_engine(engine):
            host = registry.get_local_host("memory", now=NOW)
            for name, own, counts in (("meter", None, passes), ("idle", host, {"pass": 1})):
                result = run_recorded(name, lambda: SweepResult({"pass": 1}), now=NOW, every=MINUTE, host=own, started_by=host)
                assert result.counts == counts


def test_a_sweep_of_the_installation_is_not_begun_by_another_host_while_it_makes_progress(
    memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another pass would wait for the locks of the first one. A pass whose process died is followed after RUN_TTL."""
    elapsed = [0.0]
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: elapsed[0]))

    def run(engine: str, sweep: Callable[[], SweepResult], now: datetime) -> dict[str, int]:
        with memory.on_engine(engine):
            host = registry.get_local_host("memory", now=NOW)
            return run_recorded("meter", sweep, now=now, every=MINUTE, started_by=host).counts

    def work_and_die() -> SweepResult:
        assert run(A, SweepResult, NOW) == {"still running": 1}
        for seconds in (90.0, 180.0):
            elapsed[0] = seconds
            claims.note_progress()
            claims.HEARTBEAT.beat()
        raise SimulatedCrash

    with pytest.raises(SimulatedCrash):
        run(A, work_and_die, NOW)
    last_progress = NOW + timedelta(seconds=180)
    elapsed[0] = 0.0
    assert run(B, SweepResult, last_progress + RUN_TTL - timedelta(seconds=1)) == {"left to another process": 1}
    assert run(B, lambda: SweepResult({"pass": 1}), last_progress + RUN_TTL) == {"pass": 1}
    assert run(A, lambda: SweepResult({"pass": 1}), last_progress + RUN_TTL + MINUTE) == {"pass": 1}  # the pass of B is over


@pytest.mark.parametrize("error", [None, ValueError("failed")])
def test_a_pass_that_outlasted_its_claim_neither_extends_nor_ends_the_claim_of_another_host(
    error: Exception | None, memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    with memory.on_engine(B):
        other = registry.get_local_host("memory", now=NOW)
    begun = NOW + RUN_TTL
    claim = {"started_at": begun, "started_by": other.pk, "running_until": begun + RUN_TTL, "claim": uuid4()}

    def be_taken_over() -> SweepResult:
        Sweep.objects.filter(name="meter").update(**claim)
        monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: (RUN_TTL + MINUTE).total_seconds()))
        claims.note_progress()
        claims.HEARTBEAT.beat()
        assert read_claim() == claim
        if error:
            raise error
        return SweepResult()

    def read_claim() -> dict[str, Any]:
        return Sweep.objects.values(*claim).get(name="meter")

    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: 0.0))
    with memory.on_engine(A), pytest.raises(ValueError) if error else nullcontext():
        host = registry.get_local_host("memory", now=NOW)
        run_recorded("meter", be_taken_over, now=NOW, every=MINUTE, started_by=host)
    assert read_claim() == claim


def test_a_failed_pass_records_its_error_and_ends_its_claim(memory: MemoryProvider) -> None:
    def fail() -> SweepResult:
        raise ValueError("no store")

    with pytest.raises(ValueError):
        run_recorded("meter", fail, now=NOW, every=MINUTE)
    assert Sweep.objects.values_list("last_error", "running_until").get() == ("ValueError: no store", None)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("is_answered", [True, False])
def test_a_pass_that_ends_while_the_heartbeat_extends_its_claim_leaves_none(is_answered: bool) -> None:
    """The heartbeat has not noted the new deadline yet, or never does because the answer to its UPDATE is lost."""
    token = uuid4()
    row = Sweep.objects.create(name="meter", every=MINUTE, running_until=NOW + RUN_TTL, claim=token)
    running = RunningPass(Sweep.objects.filter(pk=row.pk, claim=token), lambda: NOW + MINUTE, until=NOW + RUN_TTL)

    def interrupt(execute: Any, *statement: Any) -> Any:
        result = execute(*statement)
        if not is_answered:
            raise OperationalError("the connection is closed")
        if not interruptions:
            interruptions.append(statement)
            running.end()
        return result

    interruptions = list[Any]()
    running.note_progress()
    with connection.execute_wrapper(interrupt), nullcontext() if is_answered else pytest.raises(OperationalError):
        running.beat()
    running.end()
    running.beat()
    row.refresh_from_db()
    assert row.running_until is None


def test_a_pass_of_another_worker_of_the_host_is_followed_once_its_instance_is_released(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.INSTANCE = "up-a.worker"

    def run() -> dict[str, int]:
        return run_recorded("meter", lambda: SweepResult({"pass": 1}), now=NOW, every=MINUTE).counts

    def work_and_die() -> SweepResult:
        monkeypatch.setattr(sweep_log, "IN_PROGRESS", SweepsInProgress())  # of another process
        assert run() == {"left to another process": 1}
        raise SimulatedCrash

    with pytest.raises(SimulatedCrash):
        run_recorded("meter", work_and_die, now=NOW, every=MINUTE)
    assert run() == {"left to another process": 1}
    assert sweeps.release_instance("up-a", now=NOW) == 1
    assert run() == {"pass": 1}


@pytest.fixture
def watched(memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], SweepResult]:
    """Watch of an engine that announces no end, under a claim from NOW. A function is called during the watch."""
    registry.get_local_host("memory", now=NOW)

    def watch(act: Callable[[], object]) -> SweepResult:
        def watch_ends(self: MemoryProvider, *, timeout: timedelta) -> Iterator[ProviderSandbox]:
            act()
            yield from ()

        monkeypatch.setattr(MemoryProvider, "watches_ends", True)
        monkeypatch.setattr(MemoryProvider, "watch_ends", watch_ends)
        return end_watch.watch_ends(now=NOW)

    return watch


def test_an_engine_is_watched_by_one_process_at_a_time(watched: Any) -> None:
    attempts = []

    def watch_too() -> None:
        for seconds in (0, 54):
            attempts.append(end_watch.watch_ends(now=NOW + timedelta(seconds=seconds)).counts)

    assert watched(watch_too).counts == {}
    assert attempts == [{"watched already": 1}] * 2
    assert Host.objects.get().watched_until is None


def test_a_watch_that_outlasted_its_claim_does_not_end_that_of_its_successor(watched: Any) -> None:
    until = NOW + 2 * end_watch.CLAIM_TIME
    watched(lambda: Host.objects.update(watched_until=until))
    assert Host.objects.get().watched_until == until


def test_a_hosts_own_sweep_replaces_the_row_from_before_the_host_was_known(memory: MemoryProvider) -> None:
    host = registry.get_local_host("memory", now=NOW)
    for own in (None, host):
        run_recorded("idle", SweepResult, now=NOW, every=MINUTE, host=own, started_by=own)
    run_recorded("meter", SweepResult, now=NOW, every=MINUTE, started_by=host)
    assert {*Sweep.objects.values_list("name", "host__name")} == {("idle", host.name), ("meter", None)}


def test_tasks_of_a_sandbox_go_to_the_queue_of_its_host(lease: Lease, memory: MemoryProvider) -> None:
    sandbox = get_sandbox(lease)
    with memory.on_engine(B):
        assert tasks.request_snapshot(sandbox, "before", now=NOW, actor="ops", reason="test")
    assert sandbox.host and OrmQ.objects.get().key == sandbox.host.queue


def lease_status(lease: Lease) -> str:
    return Lease.objects.values_list("status", flat=True).get(pk=lease.pk)

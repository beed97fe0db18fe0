"""Constructed races: a rival runs at a checkpoint or a statement, or threads start at a barrier."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import pytest
from django.db import OperationalError, connection, connections, transaction

from leases import conditions, execution, leasing, snapshots, sweeps
from leases.errors import LeaseEnded
from leases.models import Lease
from sandboxes import eviction, runs
from sandboxes import pool as pools
from sandboxes import sweeps as pool_sweeps
from sandboxes.errors import CapacityExhausted
from sandboxes.models import Pool, Run, RunOutcome, Sandbox
from sandboxes.providers.memory import MemoryProvider
from sandboxes.runs import Command
from tests.conftest import MINUTE, NOW, run_in_threads
from tests.support.waiting import wait_until, wait_until_blocked

pytestmark = pytest.mark.django_db(transaction=True)
DAY = timedelta(days=1)


def true() -> Command:
    return Command(argv=["true"], timeout=MINUTE)


@contextmanager
def start_before(statement: str, rival: threading.Thread) -> Iterator[None]:
    """Start the rival before the first execution of a statement with this prefix, and join it at the end."""

    def start_first(execute, sql, *rest):
        if sql.startswith(statement) and not rival.ident:
            rival.start()
            wait_until_blocked(rival)
        return execute(sql, *rest)

    with connection.execute_wrapper(start_first):
        yield
    rival.join(30)


def test_sixteen_concurrent_acquires_grant_one_lease(pool: Pool) -> None:
    request = leasing.LeaseRequest("did:plc:ada", "game-1", "catan", pool=pool.name)
    with run_in_threads(16) as run:
        results = run(lambda i: leasing.acquire(request, now=NOW))
    assert len({lease.pk for lease, _ in results}) == 1
    assert [is_new for _, is_new in results].count(True) == 1


def test_sixteen_concurrent_acquires_of_an_elapsed_lease_grant_one_new_lease(pool: Pool, grant) -> None:
    old = grant(ttl=MINUTE)
    request = leasing.LeaseRequest("did:plc:ada", "game-1", "catan", pool=pool.name)
    with run_in_threads(16) as run:
        results = run(lambda i: leasing.acquire(request, now=NOW + 5 * MINUTE))
    assert len({lease.pk for lease, _ in results} - {old.pk}) == 1
    assert old.events.filter(kind="ended").count() == 1


def test_eight_concurrent_first_execs_start_one_sandbox(grant, memory: MemoryProvider) -> None:
    lease: Lease = grant()
    with run_in_threads(8) as run:
        results = run(lambda i: execution.exec_command(lease.pk, true(), now=NOW)[1].exit_code)
    assert results == [0] * 8
    assert Sandbox.objects.count() == 1 and memory.calls.count(("create", Sandbox.objects.get().ref)) == 1
    sandbox = Sandbox.objects.get()
    assert (sandbox.state, sandbox.open_runs, Run.objects.count()) == ("waiting", 0, 8)


def test_32_concurrent_starts_never_exceed_a_capacity_of_10(pool: Pool, grant, memory: MemoryProvider) -> None:
    Pool.objects.filter(pk=pool.pk).update(capacity=10)
    leases = [grant(agent=f"did:plc:a{i}") for i in range(32)]
    counts = []
    memory.after("create", lambda ref: counts.append(len(memory.list(str(pool.owner)))))
    with run_in_threads(32) as run:
        results = run(lambda i: execution.exec_command(leases[i].pk, true(), now=NOW)[1].exit_code)
    assert max(counts) <= 10
    assert all(result == 0 or isinstance(result, CapacityExhausted) for result in results)
    assert Sandbox.objects.filter(pool=pool).exclude(state="destroyed").count() == Pool.objects.get(pk=pool.pk).used <= 10


def test_execs_beyond_ten_running_sandboxes_in_ten_places_are_refused(pool: Pool, grant, memory: MemoryProvider) -> None:
    Pool.objects.filter(pk=pool.pk).update(capacity=10)
    leases = [grant(agent=f"did:plc:a{i}") for i in range(32)]
    release, running = threading.Event(), threading.Semaphore(0)

    def hold(ref: str) -> None:
        running.release()
        assert release.wait(30)

    memory.before("exec", hold)
    refused: list[object] = []

    def act(i: int) -> object:
        try:
            return execution.exec_command(leases[i].pk, true(), now=NOW)[1].exit_code
        except CapacityExhausted as error:
            refused.append(error)
            if len(refused) == 22:
                release.set()
            return error

    with run_in_threads(32) as run:
        results = run(act)
    assert (results.count(0), len(refused)) == (10, 22)


def test_eviction_and_starting_run_never_both_succeed(pool: Pool, grant, at_checkpoint) -> None:
    lease: Lease = grant()
    execution.exec_command(lease.pk, true(), now=NOW)
    sandbox = Sandbox.objects.get()
    at_checkpoint("run opened", lambda: evicted.append(eviction.evict(sandbox.pk, now=NOW, reason="idle")))
    evicted: list[bool] = []
    assert execution.exec_command(lease.pk, true(), now=NOW)[1].exit_code == 0
    assert evicted == [False]
    sandbox.refresh_from_db()
    assert (sandbox.state, sandbox.incarnation) == ("waiting", 1)


def test_run_during_an_eviction_waits_and_wakes_the_sandbox(pool: Pool, grant, at_checkpoint) -> None:
    lease: Lease = grant()
    execution.exec_command(lease.pk, Command(argv=["sh", "-c", "echo kept >f"], timeout=MINUTE), now=NOW)
    sandbox, results = Sandbox.objects.get(), []

    def rival() -> None:
        cat = Command(argv=["cat", "f"], timeout=MINUTE)
        results.append(execution.exec_command(lease.pk, cat, now=NOW)[1].stdout)
        connections.close_all()

    thread = threading.Thread(target=rival)
    at_checkpoint("persisted", thread.start)
    assert eviction.evict(sandbox.pk, now=NOW, reason="idle")
    thread.join(30)
    assert results == [b"kept\n"]
    sandbox.refresh_from_db()
    assert (sandbox.incarnation, sandbox.source) == (2, "local")


def test_sixteen_concurrent_claims_get_four_different_warm_sandboxes(pool: Pool, grant) -> None:
    Pool.objects.filter(pk=pool.pk).update(warm_target=4)
    assert pool_sweeps.warm_pools(now=NOW).counts == {"warmed up": 4}
    leases = [grant(agent=f"did:plc:a{i}") for i in range(16)]
    with run_in_threads(16) as run:
        run(lambda i: execution.exec_command(leases[i].pk, true(), now=NOW))
    assert Pool.objects.get(pk=pool.pk).claimed_warm == 4
    assert Sandbox.objects.exclude(holder=None).values("holder").distinct().count() == Sandbox.objects.count() == 16


def test_eight_concurrent_warm_sweeps_start_only_the_target(pool: Pool, memory: MemoryProvider, settings) -> None:
    settings.EGRESS_SLOTS = 5  # few, so that concurrent choices of the same slot would be frequent
    Pool.objects.filter(pk=pool.pk).update(warm_target=3)
    with run_in_threads(8) as run:
        run(lambda i: pool_sweeps.warm_pools(now=NOW))
    assert len(memory.list(str(pool.owner))) == 3


def test_sandbox_that_becomes_ready_during_a_sweep_is_not_surplus(
    pool: Pool, memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    Pool.objects.filter(pk=pool.pk).update(warm_target=2)
    pool.refresh_from_db()
    assert pools.start_warm(pool, now=NOW)
    unclaimed = pools.find_unclaimed

    def read_then_start(pool: Pool) -> object:
        rows = unclaimed(pool).filter(pk__in=[*unclaimed(pool).values_list("pk", flat=True)])
        assert pools.start_warm(pool, now=NOW)  # a rival
        return rows

    monkeypatch.setattr(pool_sweeps, "find_unclaimed", read_then_start)
    assert pool_sweeps.find_surplus() == []


def test_release_during_a_wake_leaves_no_sandbox(pool: Pool, grant, memory: MemoryProvider, at_checkpoint) -> None:
    lease: Lease = grant()
    execution.exec_command(lease.pk, true(), now=NOW)
    assert eviction.evict(Sandbox.objects.get().pk, now=NOW, reason="idle")
    at_checkpoint("wake claimed", lambda: (leasing.release(lease.pk, now=NOW), sweeps.reclaim(now=NOW)))
    with pytest.raises(LeaseEnded):
        execution.exec_command(lease.pk, true(), now=NOW)
    sweeps.reclaim(now=NOW)
    assert memory.list(str(pool.owner)) == []
    assert Pool.objects.get(pk=pool.pk).used == 0


def test_release_between_check_and_reservation_starts_nothing(grant, memory: MemoryProvider) -> None:
    lease: Lease = grant()
    request = execution.build_sandbox_request(lease, now=NOW)
    leasing.release(lease.pk, now=NOW)
    with pytest.raises(LeaseEnded), transaction.atomic():
        request.guard.fence()
    assert memory.calls == []


def test_release_during_a_start_ends_the_lease(grant, pool: Pool, memory: MemoryProvider, at_checkpoint) -> None:
    lease: Lease = grant()
    at_checkpoint("created", lambda: leasing.release(lease.pk, now=NOW))
    with pytest.raises(LeaseEnded):
        execution.exec_command(lease.pk, true(), now=NOW)
    assert sweeps.reclaim(now=NOW).counts == {"destroyed": 1, "leases closed": 1}
    assert memory.list(str(pool.owner)) == []


def test_release_during_a_run_closes_it_and_refuses_the_late_result(grant, at_checkpoint) -> None:
    lease: Lease = grant()
    at_checkpoint("run opened", lambda: leasing.release(lease.pk, now=NOW))
    with pytest.raises(LeaseEnded):
        execution.exec_command(lease.pk, true(), now=NOW)
    run = Run.objects.get()
    assert (run.outcome, Sandbox.objects.get().state) == ("lost", "destroying")


def test_end_of_a_run_and_release_of_its_lease_do_not_deadlock(grant) -> None:
    lease = grant()
    sandbox = execution.ensure_sandbox_ready(lease.pk, now=NOW)
    run = runs.open_run(sandbox, Command(argv=["true"], timeout=MINUTE), now=NOW)
    closed: list[object] = []

    def end() -> None:
        try:
            closed.append(runs.close_run(run, now=NOW, outcome=RunOutcome.OK))
        except OperationalError as error:
            closed.append(error)
        connections.close_all()

    rival = threading.Thread(target=end)

    with start_before('UPDATE "sandboxes_run"', rival):
        leasing.release(lease.pk, now=NOW)
    assert closed == [False]
    run.refresh_from_db()
    assert (run.outcome, Sandbox.objects.get().state) == ("lost", "destroying")


@pytest.mark.parametrize("cause", ["its clock", "a condition"])
def test_end_of_a_lease_and_its_snapshot_do_not_deadlock(grant, cause: str) -> None:
    lease = grant(expiry_conditions=["game-over"])
    execution.exec_command(lease.pk, true(), now=NOW)
    results: list[object] = []

    def end() -> None:
        try:
            if cause == "its clock":
                results.append(sweeps.expire_due_leases(now=NOW + DAY).counts)
            else:
                results.append(len(conditions.post_condition("game-1", "game-over", now=NOW, agents=None)))
        except OperationalError as error:
            results.append(error)
        connections.close_all()

    rival = threading.Thread(target=end)

    with start_before('INSERT INTO "leases_leaseevent"', rival), suppress(LeaseEnded):
        snapshots.take_snapshot(lease.pk, now=NOW)
    assert results in ([{"expired": 1}], [1])
    assert sorted(lease.events.values_list("kind", flat=True)) == ["ended", "granted", "snapshot"]


def test_renewal_between_read_and_update_keeps_the_lease(grant, monkeypatch) -> None:
    lease: Lease = grant(ttl=MINUTE)
    monkeypatch.setattr(leasing, "find_elapsed_clock", _renew_first(lease, leasing.find_elapsed_clock))
    assert sweeps.expire_due_leases(now=NOW + MINUTE).counts == {"lost race": 1}
    lease.refresh_from_db()
    assert lease.status == "active"


def _renew_first(lease: Lease, find_elapsed_clock):  # type: ignore[no-untyped-def]
    def rival(seen: Lease, now):  # type: ignore[no-untyped-def]
        reason = find_elapsed_clock(seen, now)
        leasing.renew(lease, now=now - timedelta(seconds=1))
        return reason

    return rival


def test_concurrent_sweeps_destroy_each_sandbox_once(grant, pool: Pool) -> None:
    for i in range(8):
        lease = grant(agent=f"did:plc:a{i}")
        execution.exec_command(lease.pk, true(), now=NOW)
        leasing.release(lease.pk, now=NOW)
    with run_in_threads(4) as run:
        results = run(lambda i: sweeps.reclaim(now=NOW).counts.get("destroyed", 0))
    assert sum(results) == 8
    assert Pool.objects.get(pk=pool.pk).used == 0


@contextmanager
def start_after(statement: str, act: Callable[[], object]) -> Iterator[None]:
    """Start a rival after the first execution of a statement with this prefix, and go on when the rival waits for a lock."""
    rivals: list[threading.Thread] = []
    errors: list[Exception] = []
    backend_pids: list[int] = []

    def run() -> None:
        try:
            connection.ensure_connection()
            backend_pids.append(connection.connection.info.backend_pid)
            act()
        except Exception as exception:
            errors.append(exception)
        finally:
            connections.close_all()

    def waits() -> bool:
        with connection.cursor() as cursor:
            cursor.execute("SELECT cardinality(pg_blocking_pids(%s))", backend_pids or [0])
            return bool(cursor.fetchone()[0])

    def rival(execute, sql: str, *args):
        result = execute(sql, *args)
        if sql.startswith(statement) and not rivals:
            rivals.append(threading.Thread(target=run))
            rivals[0].start()
            wait_until(waits, "the rival waits for a lock")
        return result

    with connection.execute_wrapper(rival):
        yield
    rivals[0].join()
    assert not errors


@pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite has one writer")
def test_lease_ends_while_its_run_ends(grant, memory: MemoryProvider) -> None:
    lease: Lease = grant()
    with start_after("UPDATE sandboxes_run", lambda: leasing.release(lease.pk, now=NOW)), pytest.raises(LeaseEnded):
        execution.exec_command(lease.pk, true(), now=NOW)
    assert (Run.objects.get().outcome, Sandbox.objects.get().state) == ("ok", "destroying")


@pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite has one writer")
def test_lease_ends_while_an_event_of_it_is_inserted(grant, memory: MemoryProvider) -> None:
    """The event's foreign key to the lease is deferred: PostgreSQL checks it at commit."""
    lease: Lease = grant(expiry_conditions=["over"])
    execution.exec_command(lease.pk, true(), now=NOW)
    with (
        start_after(
            'INSERT INTO "leases_leaseevent"', lambda: conditions.post_condition("game-1", "over", now=NOW, agents=None)
        ),
        pytest.raises(LeaseEnded),
    ):
        snapshots.take_snapshot(lease.pk, now=NOW)
    assert [*lease.events.order_by("pk").values_list("kind", flat=True)] == ["granted", "snapshot", "ended"]

"""Constructed races: a rival runs at a checkpoint or a statement, or threads start at a barrier."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from uuid import uuid4

import pytest
from django.db import OperationalError, connection, connections, transaction

from leases import conditions, execution, leasing, snapshots, sweeps
from leases.errors import LeaseEnded
from leases.models import Lease
from sandboxes import eviction
from sandboxes.errors import CapacityExhausted, TooManyRuns
from sandboxes.guard import HolderRenewal
from sandboxes.models import Pool, Run, RunOutcome, Sandbox
from sandboxes.pool import allocation, prewarmed
from sandboxes.providers.memory import MemoryProvider
from sandboxes.runs import operations
from sandboxes.runs.operations import Command
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW, run_in_threads
from tests.support.leases import evict, read, run, update_pool, write
from tests.support.waiting import wait_until, wait_until_blocked

pytestmark = pytest.mark.django_db(transaction=True)
DAY = timedelta(days=1)


@pytest.fixture
def used_lease(lease: Lease) -> Lease:
    write(lease)
    return lease


def make_rival(results: list[object], act: Callable[[], object]) -> threading.Thread:
    """Return a thread that appends the result of `act`, or its OperationalError, to the results."""

    def act_as_rival() -> None:
        try:
            results.append(act())
        except OperationalError as error:
            results.append(error)
        connections.close_all()

    return threading.Thread(target=act_as_rival)


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
    with run_in_threads(16) as together:
        results = together(lambda i: leasing.acquire(request, now=NOW))
    assert len({lease.pk for lease, _ in results}) == 1
    assert [is_new for _, is_new in results].count(True) == 1


def test_sixteen_concurrent_acquires_of_an_elapsed_lease_grant_one_new_lease(pool: Pool, grant) -> None:
    old = grant(ttl=MINUTE)
    request = leasing.LeaseRequest("did:plc:ada", "game-1", "catan", pool=pool.name)
    with run_in_threads(16) as together:
        results = together(lambda i: leasing.acquire(request, now=NOW + 5 * MINUTE))
    assert len({lease.pk for lease, _ in results} - {old.pk}) == 1
    assert old.events.filter(kind="ended").count() == 1


def test_eight_concurrent_first_execs_start_one_sandbox(lease, memory: MemoryProvider) -> None:
    with run_in_threads(8) as together:
        results = together(lambda i: run(lease).exit_code)
    assert results == [0] * 8
    assert Sandbox.objects.count() == 1 and memory.calls.count(("create", Sandbox.objects.get().ref)) == 1
    sandbox = Sandbox.objects.get()
    assert (sandbox.state, sandbox.open_runs, Run.objects.count()) == ("waiting", 0, 8)


def test_32_concurrent_starts_never_exceed_a_capacity_of_10(pool: Pool, grant, memory: MemoryProvider) -> None:
    update_pool(pool, capacity=10)
    leases = [grant(agent=f"did:plc:a{i}") for i in range(32)]
    counts = []
    memory.after("create", lambda ref: counts.append(len(memory.list(str(pool.owner)))))
    with run_in_threads(32) as together:
        results = together(lambda i: run(leases[i]).exit_code)
    assert max(counts) <= 10
    assert all(result == 0 or isinstance(result, CapacityExhausted) for result in results)
    assert Sandbox.objects.filter(pool=pool).exclude(state="destroyed").count() == Pool.objects.get(pk=pool.pk).used <= 10


def test_execs_beyond_ten_running_sandboxes_in_ten_places_are_refused(pool: Pool, grant, memory: MemoryProvider) -> None:
    update_pool(pool, capacity=10)
    leases = [grant(agent=f"did:plc:a{i}") for i in range(32)]
    release, refused = threading.Event(), []
    memory.before("exec", lambda ref: release.wait(30))

    def act(i: int) -> object:
        try:
            return run(leases[i]).exit_code
        except CapacityExhausted as error:
            refused.append(error)
            if len(refused) == 22:
                release.set()
            return error

    with run_in_threads(32) as together:
        results = together(act)
    assert (results.count(0), len(refused)) == (10, 22)


def test_eviction_and_starting_run_never_both_succeed(used_lease, at_checkpoint) -> None:
    sandbox, evicted = Sandbox.objects.get(), []
    at_checkpoint("run opened", lambda: evicted.append(eviction.evict(sandbox.pk, now=NOW, reason="idle")))
    assert run(used_lease).exit_code == 0
    assert evicted == [False]
    sandbox.refresh_from_db()
    assert (sandbox.state, sandbox.incarnation) == ("waiting", 1)


def test_resume_eviction_and_suspension_at_once_lose_nothing(used_lease: Lease, memory: MemoryProvider) -> None:
    """In any order, the commands run with their files, and a sandbox is frozen only while its row is suspended."""
    sandbox = Sandbox.objects.get()
    for attempt in range(5):
        now = NOW + (attempt + 1) * MINUTE
        Sandbox.objects.update(suspend_after=MINUTE / 4)
        acts = [
            partial(read, used_lease, now=now),
            partial(eviction.evict, sandbox.pk, now=now, reason="test"),
            partial(passes.suspend_waiting, now=now),
            partial(read, used_lease, now=now),
        ]
        if attempt % 2:
            passes.suspend_waiting(now=now)
        with run_in_threads(len(acts)) as together:
            results = together(lambda index, acts=acts: acts[index]())
        assert (results[0], results[3]) == ("kept", "kept"), results
        sandbox.refresh_from_db()
        if sandbox.state != "cold":
            assert memory.inspect(sandbox.ref).suspended == (sandbox.state == "suspended")
            assert sandbox.frozen == (sandbox.state == "suspended") and sandbox.deadline_at is None


def test_run_during_an_eviction_waits_and_wakes_the_sandbox(used_lease, at_checkpoint) -> None:
    results: list[object] = []
    rival = make_rival(results, lambda: read(used_lease))
    at_checkpoint("persisted", rival.start)
    evict(used_lease)
    rival.join(30)
    assert results == ["kept"]
    sandbox = Sandbox.objects.get()
    assert (sandbox.incarnation, sandbox.source) == (2, "local")


def test_sixteen_concurrent_claims_get_four_different_warm_sandboxes(pool: Pool, grant) -> None:
    update_pool(pool, warm_target=4)
    assert passes.warm_pools(now=NOW).counts == {"warmed up": 4}
    leases = [grant(agent=f"did:plc:a{i}") for i in range(16)]
    with run_in_threads(16) as together:
        together(lambda i: run(leases[i]))
    assert Pool.objects.get(pk=pool.pk).claimed_warm == 4
    assert Sandbox.objects.exclude(holder=None).values("holder").distinct().count() == Sandbox.objects.count() == 16


def test_eight_concurrent_warm_sweeps_start_only_the_target(pool: Pool, memory: MemoryProvider, settings) -> None:
    settings.EGRESS_SLOTS = 5  # few, so that concurrent choices of the same slot would be frequent
    update_pool(pool, warm_target=3)
    with run_in_threads(8) as together:
        together(lambda i: passes.warm_pools(now=NOW))
    assert len(memory.list(str(pool.owner))) == 3


@pytest.mark.parametrize("limited", ["MAX_RUNS_PER_LEASE", "MAX_RUNS_PER_AGENT"])
def test_concurrent_runs_never_exceed_the_limits_of_a_lease_and_of_its_agent(grant, settings, limited: str) -> None:
    setattr(settings, limited, 5)
    environments = ["e1"] if limited == "MAX_RUNS_PER_LEASE" else ["e1", "e2", "e3", "e4"]
    sandboxes = [execution.ensure_sandbox_ready(grant(environment=name).pk, now=NOW) for name in environments]
    command = Command(argv=["sleep"], timeout=MINUTE)
    with run_in_threads(16) as together:
        results = together(
            lambda i: operations.open_run(sandboxes[i % len(sandboxes)], replace(command, run_id=uuid4()), now=NOW)
        )
    assert Counter(type(result) for result in results) == {Run: 5, TooManyRuns: 11}
    assert Run.objects.count() == sum(Sandbox.objects.values_list("open_runs", flat=True)) == 5


def test_four_concurrent_wakes_take_the_four_egress_slots(grant, settings) -> None:
    settings.EGRESS_SLOTS = 4
    leases = [grant(environment=f"e{number}") for number in range(4)]
    for lease in leases:
        write(lease)
        evict(lease)
    with run_in_threads(4) as together:
        assert together(lambda i: read(leases[i])) == ["kept"] * 4
    assert {*Sandbox.objects.values_list("slot", flat=True)} == {0, 1, 2, 3}


def test_sandbox_that_becomes_ready_during_a_sweep_is_not_surplus(
    pool: Pool, memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    update_pool(pool, warm_target=2)
    assert allocation.start_warm(pool, now=NOW)
    unclaimed = prewarmed.find_local_unclaimed

    def read_then_start(pool: Pool) -> object:
        rows = unclaimed(pool).filter(pk__in=[*unclaimed(pool).values_list("pk", flat=True)])
        assert allocation.start_warm(pool, now=NOW)  # a rival
        return rows

    monkeypatch.setattr(passes, "find_local_unclaimed", read_then_start)
    assert passes.find_surplus() == []


def test_release_during_a_wake_leaves_no_sandbox(used_lease, pool: Pool, memory: MemoryProvider, at_checkpoint) -> None:
    evict(used_lease)
    at_checkpoint("wake claimed", lambda: (leasing.release(used_lease.pk, now=NOW), sweeps.reclaim(now=NOW)))
    with pytest.raises(LeaseEnded):
        run(used_lease)
    sweeps.reclaim(now=NOW)
    assert memory.list(str(pool.owner)) == []
    assert Pool.objects.get(pk=pool.pk).used == 0


def test_release_between_check_and_reservation_starts_nothing(lease, memory: MemoryProvider) -> None:
    request = execution.build_sandbox_request(lease, now=NOW)
    leasing.release(lease.pk, now=NOW)
    with pytest.raises(LeaseEnded), transaction.atomic():
        request.guard.fence()
    assert memory.calls == []


def test_release_during_a_start_ends_the_lease(lease, pool: Pool, memory: MemoryProvider, at_checkpoint) -> None:
    at_checkpoint("created", lambda: leasing.release(lease.pk, now=NOW))
    with pytest.raises(LeaseEnded):
        run(lease)
    assert sweeps.reclaim(now=NOW).counts == {"destroyed": 1, "leases closed": 1}
    assert memory.list(str(pool.owner)) == []


def test_release_during_a_run_closes_it_and_refuses_the_late_result(lease, at_checkpoint) -> None:
    at_checkpoint("run opened", lambda: leasing.release(lease.pk, now=NOW))
    with pytest.raises(LeaseEnded):
        run(lease)
    assert (Run.objects.get().outcome, Sandbox.objects.get().state) == ("lost", "destroying")


def test_end_of_a_run_and_release_of_its_lease_do_not_deadlock(lease) -> None:
    sandbox = execution.ensure_sandbox_ready(lease.pk, now=NOW)
    opened = operations.open_run(sandbox, Command(argv=["true"], timeout=MINUTE), now=NOW)
    closed: list[object] = []
    rival = make_rival(closed, lambda: operations.close_run(opened, now=NOW, outcome=RunOutcome.OK))
    with start_before('UPDATE "sandboxes_run"', rival):
        leasing.release(lease.pk, now=NOW)
    assert closed == [False]
    assert (Run.objects.get().outcome, Sandbox.objects.get().state) == ("lost", "destroying")


@pytest.mark.parametrize("cause", ["its clock", "a condition"])
def test_end_of_a_lease_and_its_snapshot_do_not_deadlock(grant, cause: str) -> None:
    lease = grant(expiry_conditions=["game-over"])
    run(lease)

    def end() -> int:
        if cause == "its clock":
            return sweeps.expire_due_leases(now=NOW + DAY).counts["expired"]
        return len(conditions.post_condition("game-1", "game-over", now=NOW, agents=None))

    results: list[object] = []
    with start_before('INSERT INTO "leases_leaseevent"', make_rival(results, end)), suppress(LeaseEnded):
        snapshots.take_snapshot(lease.pk, now=NOW)
    assert results == [1]
    assert sorted(lease.events.values_list("kind", flat=True)) == ["ended", "granted", "snapshot"]


def test_renewal_between_read_and_update_keeps_the_lease(grant, monkeypatch) -> None:
    lease, find_elapsed_clock = grant(ttl=MINUTE), leasing.find_elapsed_clock

    def find_then_renew(seen: Lease, now: datetime) -> str | None:
        reason = find_elapsed_clock(seen, now)
        leasing.renew(lease, now=now - timedelta(seconds=1))
        return reason

    monkeypatch.setattr(leasing, "find_elapsed_clock", find_then_renew)
    assert sweeps.expire_due_leases(now=NOW + MINUTE).counts == {"lost race": 1}
    lease.refresh_from_db()
    assert lease.status == "active"


def test_concurrent_sweeps_destroy_each_sandbox_once(grant, pool: Pool) -> None:
    for i in range(8):
        lease = grant(agent=f"did:plc:a{i}")
        run(lease)
        leasing.release(lease.pk, now=NOW)
    with run_in_threads(4) as together:
        results = together(lambda i: sweeps.reclaim(now=NOW).counts.get("destroyed", 0))
    assert sum(results) == 8
    assert Pool.objects.get(pk=pool.pk).used == 0


@contextmanager
def start_after(statement: str, act: Callable[[], object]) -> Iterator[None]:
    """Start a rival after the first execution of a statement with this prefix, and go on when the rival waits for a lock."""
    rivals: list[threading.Thread] = []
    errors: list[Exception] = []
    backend_pids: list[int] = []

    def act_as_rival() -> None:
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
            rivals.append(threading.Thread(target=act_as_rival))
            rivals[0].start()
            wait_until(waits, "the rival waits for a lock")
        return result

    with connection.execute_wrapper(rival):
        yield
    rivals[0].join()
    assert not errors


@pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite has one writer")
@pytest.mark.parametrize(("first", "outcome"), [("run", "ok"), ("lease", "lost")])
def test_lease_and_run_end_together(lease, first: str, outcome: str) -> None:
    """Both lock the lease before the sandbox: the later one waits, and neither holds what the other needs."""
    opened = operations.open_run(
        execution.ensure_sandbox_ready(lease.pk, now=NOW), Command(argv=["true"], timeout=MINUTE), now=NOW
    )
    assert opened
    renewal = HolderRenewal(lambda at: leasing.build_renewal(lease, now=at))

    def close() -> None:
        operations.close_run(opened, now=NOW + MINUTE, outcome=RunOutcome.OK, renewal=renewal)

    def release() -> None:
        leasing.release(lease.pk, now=NOW + MINUTE)

    if first == "run":
        with start_after("WITH renewed", release), transaction.atomic():
            close()
    else:
        with start_after('UPDATE "leases_lease"', close):
            release()
    assert (Run.objects.get().outcome, Sandbox.objects.get().state) == (outcome, "destroying")
    assert renewal.done == (first == "run")


@pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite has one writer")
def test_lease_ends_while_an_event_of_it_is_inserted(grant) -> None:
    """The event's foreign key to the lease is deferred: PostgreSQL checks it at commit.

    After the commit, the end of the lease and the renewal after the snapshot wait for the same row, in either order."""
    lease: Lease = grant(expiry_conditions=["over"])
    run(lease)
    rival = partial(conditions.post_condition, "game-1", "over", now=NOW, agents=None)
    with start_after('INSERT INTO "leases_leaseevent"', rival), suppress(LeaseEnded):
        snapshots.take_snapshot(lease.pk, now=NOW)
    assert [*lease.events.order_by("pk").values_list("kind", flat=True)] == ["granted", "snapshot", "ended"]

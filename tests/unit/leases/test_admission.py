"""Queue for places of a full pool: waiting, positions, fairness between agents, clients that went away."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from billing.models import Tab
from leases import admission, execution, leasing, sweeps
from leases.leasing import LeaseRequest
from leases.models import Lease
from sandboxes import pool_stats
from sandboxes.errors import CapacityExhausted, PoolDraining, QuotaExceeded, TooManyAdmissionRequests
from sandboxes.long_calls import WAITING_CALLS, get_shutdown_path
from sandboxes.models import AdmissionRequest, Pool, Quota, Sandbox
from sandboxes.pool import admission_queue, allocation
from sandboxes.sweeps import passes
from tests.conftest import NOW
from tests.support.billing import start_run
from tests.support.leases import evict, run, update_pool

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("hand-written SQL")]
SECOND = timedelta(seconds=1)


class Timeline:
    """Clock and sleep of a waiting request. Sleep advances the clock and executes the acts that are due."""

    def __init__(self, start: datetime = NOW) -> None:
        self.now = start
        self.acts: list[tuple[datetime, Callable[[], object]]] = []

    def __call__(self) -> datetime:
        return self.now

    def at(self, seconds: float, act: Callable[[], object]) -> "Timeline":
        self.acts.append((NOW + seconds * SECOND, act))
        return self

    def sleep(self, seconds: float) -> None:
        self.now += seconds * SECOND
        while self.acts and self.acts[0][0] <= self.now:
            self.acts.pop(0)[1]()


@pytest.fixture
def busy(grant, pool: Pool) -> Lease:
    """A lease whose running sandbox has the pool's only place."""
    update_pool(pool, capacity=1)
    lease: Lease = grant("did:plc:busy", "work")
    start_run(lease)
    return lease


def end(lease: Lease, now: datetime = NOW) -> None:
    leasing.release(lease.pk, now=now)
    sweeps.reclaim(now=now)


@pytest.fixture
def join(pool: Pool) -> Callable[..., tuple[Lease, bool]]:
    """Join with a wait: join("did:plc:bob", wait=30, timeline=Timeline())."""

    def acquire(
        agent: str, *, environment: str = "game", wait: int = 0, timeline: Timeline | None = None
    ) -> tuple[Lease, bool]:
        timeline = timeline or Timeline()
        return admission.acquire_with_place(
            LeaseRequest(agent, environment, "catan", pool=pool.name),
            wait=wait * SECOND, now=timeline.now, clock=timeline, sleep=timeline.sleep,
        )[:2]  # fmt: skip

    return acquire


@pytest.fixture
def poll(join) -> Callable[..., tuple[int, int]]:
    """Join without time to wait. Return position and length of the queue."""

    def refused(agent: str, second: float = 0, **fields: str) -> tuple[int, int]:
        with pytest.raises(CapacityExhausted) as error:
            join(agent, timeline=Timeline(NOW + second * SECOND), **fields)
        return error.value.extra["position"], error.value.extra["queue_length"]

    return refused


def read_rows() -> tuple[int, ...]:
    """Number of everything that a waiting request must not hold."""
    return (
        Lease.objects.count(), Tab.objects.count(), Sandbox.objects.count(), sum(Quota.objects.values_list("used", flat=True)),
        sum(Pool.objects.values_list("used", flat=True)),
    )  # fmt: skip


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_join_with_a_wait_gets_the_place_that_a_lease_frees(busy: Lease, join, pool: Pool) -> None:
    timeline = Timeline().at(3, lambda: end(busy, timeline.now))
    lease, is_new = join("did:plc:bob", wait=30, timeline=timeline)
    assert (is_new, lease.leased_at >= timeline.now, timeline.now) == (True, True, NOW + 3 * SECOND)
    assert allocation.find_by_holder(lease.pk).state == "warm"
    assert not AdmissionRequest.objects.exists()


def test_join_with_a_wait_gets_a_place_that_becomes_evictable(busy: Lease, join) -> None:
    idle = {"state": "waiting", "open_runs": 0, "persisted": True}
    timeline = Timeline().at(2, lambda: Sandbox.objects.filter(holder=busy.pk).update(**idle))
    lease, _ = join("did:plc:bob", wait=30, timeline=timeline)
    assert allocation.find_by_holder(lease.pk) and allocation.find_by_holder(busy.pk) is None


def test_wait_without_a_place_ends_with_the_position_and_holds_nothing(busy: Lease, join, pool: Pool) -> None:
    update_pool(pool, warm_target=1)  # a pre-warmed sandbox is looked for first
    timeline, before = Timeline(), read_rows()
    with pytest.raises(CapacityExhausted, match="Position 1 of 1 in the queue") as error:
        join("did:plc:bob", wait=30, timeline=timeline)
    assert timeline.now == NOW + 30 * SECOND
    assert error.value.extra == {"position": 1, "queue_length": 1}
    assert error.value.retry_after * SECOND < admission_queue.ABANDONED_AFTER
    assert read_rows() == before


def test_position_can_be_read_during_the_wait(busy: Lease, join, poll) -> None:
    poll("did:plc:eve")
    seen: list[tuple[str, int, int]] = []

    def look() -> None:
        found = admission.find_position("did:plc:bob", "game", now=timeline.now)
        assert found
        seen.append((found[0].name, found[1].number, found[1].length))

    timeline = Timeline().at(2, look).at(20, look).at(25, lambda: end(busy, timeline.now))
    lease, _ = join("did:plc:bob", wait=60, timeline=timeline)
    assert seen == [(lease.pool.name, 2, 2), (lease.pool.name, 1, 1)]  # Eve did not come back
    assert admission.find_position("did:plc:bob", "game", now=timeline.now) is None


def test_lease_without_a_sandbox_waits_and_stays(busy: Lease, grant, join, poll) -> None:
    held = grant("did:plc:bob", "game")
    assert poll("did:plc:bob") == (1, 1)
    timeline = Timeline().at(3, lambda: end(busy, timeline.now))
    assert join("did:plc:bob", wait=30, timeline=timeline) == (held, False)
    assert not AdmissionRequest.objects.exists()


def test_second_request_of_the_same_agent_and_environment_gets_the_same_lease(busy: Lease, join) -> None:
    granted: list[Lease] = []

    def join_again() -> None:
        end(busy, timeline.now)
        granted.append(join("did:plc:bob", timeline=Timeline(timeline.now))[0])

    timeline = Timeline().at(3, join_again)
    assert join("did:plc:bob", wait=30, timeline=timeline) == (granted[0], False)


def test_request_that_is_refused_for_another_reason_leaves_the_queue(busy: Lease, join, poll, pool: Pool) -> None:
    poll("did:plc:bob")
    Quota.objects.create(pool=pool, agent_did="did:plc:bob", most=0)
    with pytest.raises(QuotaExceeded):
        join("did:plc:bob", wait=30)
    timeline = Timeline().at(2, lambda: allocation.set_draining(pool, draining=True))
    with pytest.raises(PoolDraining):
        join("did:plc:eve", wait=30, timeline=timeline)
    assert not AdmissionRequest.objects.exists()


def test_call_beyond_the_limit_of_the_process_keeps_a_position_and_does_not_wait(busy: Lease, join) -> None:
    WAITING_CALLS.set_maximum(1)
    waiting_call, timeline = WAITING_CALLS.admit(), Timeline()
    with ThreadPoolExecutor(1) as another:
        another.submit(waiting_call.__enter__).result()
        with pytest.raises(CapacityExhausted):
            join("did:plc:bob", wait=30, timeline=timeline)
        another.submit(waiting_call.__exit__, None, None, None).result()
    WAITING_CALLS.set_maximum(None)
    assert (timeline.now, AdmissionRequest.objects.count()) == (NOW, 1)


def test_wake_without_an_egress_slot_is_not_queued_for_a_place(grant, pool: Pool, join, settings) -> None:
    settings.EGRESS_SLOTS = 1
    cold, running = grant("did:plc:bob", "game"), grant("did:plc:busy")
    run(cold)
    evict(cold)
    start_run(running)
    with pytest.raises(CapacityExhausted, match="egress slots"):
        join("did:plc:bob", wait=30)
    assert not AdmissionRequest.objects.exists()


def test_process_that_shuts_down_ends_the_wait(busy: Lease, join) -> None:
    def shut_down() -> None:
        get_shutdown_path().parent.mkdir(parents=True, exist_ok=True)
        get_shutdown_path().touch()

    timeline = Timeline().at(2, shut_down)
    with pytest.raises(CapacityExhausted):
        join("did:plc:bob", wait=30, timeline=timeline)
    assert timeline.now == NOW + 2 * SECOND


# --- order ------------------------------------------------------------------------------------------------------------


def test_agents_take_turns_and_a_guarantee_comes_first(pool: Pool) -> None:
    update_pool(pool, capacity=9)
    for second, (agent, environment) in enumerate(
        [("many", "1"), ("many", "2"), ("many", "3"), ("holder", "1"), ("late", "1"), ("guaranteed", "1"), ("guaranteed", "2")]
    ):
        admission_queue.enqueue(pool, agent, environment, now=NOW + second * SECOND)
    Quota.objects.create(pool=pool, agent_did="holder", used=1)
    Quota.objects.create(pool=pool, agent_did="guaranteed", used=4, guaranteed=5)
    waiting = [(request.agent_did, request.environment_id) for request in AdmissionRequest.objects.all()]
    positions = {each: admission_queue.find_position(pool, *each, now=NOW + 9 * SECOND).ahead for each in waiting}
    assert sorted(positions, key=positions.__getitem__) == [
        ("guaranteed", "1"), ("many", "1"), ("late", "1"), ("many", "2"), ("holder", "1"), ("many", "3"), ("guaranteed", "2"),
    ]  # fmt: skip


def test_one_agent_with_many_requests_does_not_starve_another(busy: Lease, join, poll) -> None:
    for number in range(5):
        poll("did:plc:many", environment=f"e{number}")
    assert poll("did:plc:bob", 1) == (2, 6)
    end(busy)
    first, _ = join("did:plc:many", environment="e0", timeline=Timeline(NOW + 2 * SECOND))
    assert poll("did:plc:many", 3, environment="e1") == (2, 5)  # Bob is next
    end(first)  # a short lease does not bring the agent's other requests to the front
    assert poll("did:plc:many", 4, environment="e1") == (2, 5)
    assert join("did:plc:bob", timeline=Timeline(NOW + 5 * SECOND))[1]


def test_position_is_kept_for_a_client_that_returns_in_time(busy: Lease, poll) -> None:
    assert [poll("did:plc:bob"), poll("did:plc:eve", 1)] == [(1, 1), (2, 2)]
    assert poll("did:plc:bob", 14) == (1, 2)
    assert poll("did:plc:eve", 15) == (2, 2)
    assert poll("did:plc:bob", 29.5) == (2, 2)  # half a second late


def test_free_place_goes_to_those_who_wait(busy: Lease, grant, poll, join, pool: Pool) -> None:
    poll("did:plc:bob")
    end(busy)
    newcomer = grant("did:plc:new")
    with pytest.raises(CapacityExhausted, match="1 before this one") as error:
        run(newcomer)
    assert error.value.extra == {"position": 2, "queue_length": 1}
    assert poll("did:plc:eve", 1) == (2, 2)
    update_pool(pool, warm_target=1)
    assert allocation.start_warm(pool, now=NOW + SECOND) is None
    update_pool(pool, capacity=3)  # more than wait
    assert run(newcomer).exit_code == 0
    assert join("did:plc:bob", timeline=Timeline(NOW + 2 * SECOND))[1]


def test_prewarmed_sandbox_is_not_claimed_before_those_who_wait(pool: Pool, grant, join) -> None:
    update_pool(pool, capacity=1, warm_target=1)
    passes.warm_pools(now=NOW)
    admission_queue.enqueue(pool, "did:plc:bob", "game", now=NOW)
    with pytest.raises(CapacityExhausted):
        run(grant("did:plc:new"))
    lease, _ = join("did:plc:bob")
    assert (Pool.objects.get(pk=pool.pk).claimed_warm, lease.agent_did) == (1, "did:plc:bob")
    assert not AdmissionRequest.objects.exists()


def test_newcomer_below_its_guarantee_is_served_before_others(busy: Lease, grant, poll, pool: Pool) -> None:
    poll("did:plc:bob")
    end(busy)
    Quota.objects.create(pool=pool, agent_did="did:plc:new", guaranteed=1)
    assert run(grant("did:plc:new")).exit_code == 0


def test_sandbox_of_an_admitted_request_is_not_evicted_before_its_first_use(busy: Lease, join, poll, grant) -> None:
    for agent in ("did:plc:bob", "did:plc:eve"):
        poll(agent)
    end(busy)
    admitted, _ = join("did:plc:bob", timeline=Timeline(NOW + SECOND))
    assert poll("did:plc:eve", 2) == (1, 1)
    assert run(admitted, now=NOW + 3 * SECOND).exit_code == 0
    assert join("did:plc:eve", timeline=Timeline(NOW + 4 * SECOND))[1]


# --- clients that went away -------------------------------------------------------------------------------------------


def test_crash_while_waiting_leaves_nothing_and_delays_others_for_seconds(busy: Lease, join, poll, crash_at) -> None:
    before = read_rows()
    with crash_at("place awaited"):
        join("did:plc:bob", wait=30)
    assert read_rows() == before
    end(busy)
    assert poll("did:plc:eve", 14) == (2, 2)
    assert join("did:plc:eve", timeline=Timeline(NOW + 16 * SECOND))[1]
    assert passes.recover_stalled(now=NOW + 16 * SECOND).counts == {"abandoned requests for a place deleted": 1}


def test_waiting_requests_of_an_agent_are_limited(busy: Lease, pool: Pool, join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_queue, "MAX_REQUESTS_PER_AGENT", 1)
    admission_queue.enqueue(pool, "did:plc:bob", "e1", now=NOW)
    with pytest.raises(TooManyAdmissionRequests):
        join("did:plc:bob")
    assert AdmissionRequest.objects.get().environment_id == "e1"


# --- cost and statistics ----------------------------------------------------------------------------------------------


def test_use_of_an_awake_sandbox_does_not_read_the_queue_and_a_new_place_reads_it_once(grant) -> None:
    table, reads = AdmissionRequest._meta.db_table, []
    lease = grant()
    for _ in range(2):
        with CaptureQueriesContext(connection) as queries:
            execution.ensure_sandbox_ready(lease.pk, now=NOW)
        reads.append(sum(table in query["sql"] for query in queries.captured_queries))
    assert reads == [1, 0]


def test_waiting_requests_are_counted_by_pool(busy: Lease, poll, pool: Pool) -> None:
    poll("did:plc:bob")
    poll("did:plc:eve", 10)

    def count(second: int) -> int:
        stats = pool_stats.collect_pool_stats(now=NOW + second * SECOND)
        return next(one.queue_length for one in stats if one.pk == pool.pk)

    assert [count(11), count(16), count(30)] == [2, 1, 0]

"""Engines without room for a sandbox: its row and its place are kept, and the same lease asks for it again."""

import pytest

from leases import leasing
from leases.models import Lease
from sandboxes.errors import CapacityExhausted, CapacityPending
from sandboxes.models import Pool, Sandbox, Transition
from sandboxes.pool import allocation, starts
from sandboxes.providers import errors
from sandboxes.providers.memory import MemoryProvider
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW
from tests.support.leases import evict, get_sandbox, read, run, write

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("stopped_clock"), pytest.mark.postgres("hand-written SQL")]
WORDS = "0/3 nodes are available: 3 Insufficient memory."


@pytest.fixture
def no_room(memory: MemoryProvider):
    """Context in which the engine accepts sandboxes and has no room for them."""
    return lambda: memory.fail("wait_ready", errors.CapacityPending(WORDS))


def test_pending_start_keeps_its_place_and_the_same_lease_gets_the_same_row(lease: Lease, pool: Pool, memory, no_room) -> None:
    for _ in range(2):
        with no_room(), pytest.raises(CapacityPending, match="3 Insufficient memory") as raised:
            run(lease, "true", now=NOW)
        assert raised.value.retry_after == CapacityPending.retry_after
    [sandbox] = Sandbox.objects.all()
    pool.refresh_from_db()
    assert (sandbox.state, sandbox.pending_since, sandbox.claim, pool.used) == ("warming", NOW, None, 1)
    assert WORDS in sandbox.last_error
    assert run(lease, "true", now=NOW + MINUTE).exit_code == 0
    sandbox.refresh_from_db()
    assert (sandbox.pending_since, sandbox.last_error, sandbox.incarnation) == (None, "", 1)
    assert [call for call, *_ in memory.calls].count("create") == 1


def test_pending_start_is_awaited_by_one_process_at_a_time(lease: Lease, memory, no_room) -> None:
    with no_room(), pytest.raises(CapacityPending):
        run(lease, "true", now=NOW)
    pending, results = get_sandbox(lease), []

    def continue_too(ref: str) -> None:
        if not results:
            results.append("called")
            results.append(starts.continue_pending(pending, now=NOW + MINUTE))

    memory.before("wait_ready", continue_too)
    assert run(lease, "true", now=NOW + MINUTE).exit_code == 0
    assert results == ["called", None]


def test_pending_start_is_given_up_after_the_providers_limit(lease: Lease, memory, no_room) -> None:
    with no_room(), pytest.raises(CapacityPending):
        run(lease, "true", now=NOW)
    end = NOW + memory.pending_timeout
    with no_room(), pytest.raises(CapacityPending):
        run(lease, "true", now=end - MINUTE)
    with pytest.raises(CapacityExhausted, match="Insufficient memory"):
        run(lease, "true", now=end)
    assert Sandbox.objects.get().state == "destroying"
    assert run(lease, "true", now=end + MINUTE).exit_code == 0  # in a new sandbox


def test_wake_that_is_pending_continues_with_the_stored_state(lease: Lease, no_room) -> None:
    write(lease)
    evict(lease)
    with no_room(), pytest.raises(CapacityPending):
        run(lease, "true", now=NOW + MINUTE)
    assert read(lease, now=NOW + 2 * MINUTE) == "kept"


def test_engine_that_gets_no_room_ends_the_start_and_counts_as_a_failure(lease: Lease, memory) -> None:
    with memory.fail("create", errors.NoCapacity("exceeded quota: sandboxes")), pytest.raises(CapacityExhausted, match="quota"):
        run(lease, "true", now=NOW)
    sandbox = Sandbox.objects.select_related("host").get()
    assert (sandbox.state, sandbox.host.start_failures) == ("destroying", 1)  # the breaker prevents a loop


def test_pending_sandboxes_count_towards_the_warm_target_and_the_sweep_asks_again(pool: Pool, no_room) -> None:
    Pool.objects.filter(pk=pool.pk).update(warm_target=1)
    for _ in range(2):
        with no_room():
            assert passes.warm_pools(now=NOW).counts == {"pending": 1}
    assert Sandbox.objects.count() == 1
    assert passes.warm_pools(now=NOW + MINUTE).counts == {"warmed up": 1}
    assert Sandbox.objects.get().state == "warm"


def test_released_lease_ends_its_pending_start(lease: Lease, no_room) -> None:
    with no_room(), pytest.raises(CapacityPending):
        run(lease, "true", now=NOW)
    leasing.release(lease.pk, now=NOW)
    assert Transition.objects.filter(to="destroying").values_list("code", flat=True).get() == "lease_ended"
    assert allocation.find_by_holder(lease.pk) is None

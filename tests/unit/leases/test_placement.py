"""Placement in an ordered list of pools: failover, the lease's timeline, the circuit breaker, concurrent starts, prices."""

from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal

import pytest

from billing.models import Rate
from leases import admission, execution, leasing, sweeps
from leases.allow_lists import AllowLists
from leases.errors import InvalidRequest
from leases.leasing import LeaseRequest
from leases.models import AlternativePool, EnvironmentType, Lease, LeaseEvent
from leases.placement import LeasePlacement
from leases.resources import Resources
from sandboxes.errors import (
    CapacityExhausted,
    NoPoolAvailable,
    QuotaExceeded,
    SandboxNotReady,
    StartsPaused,
    TooManyStarts,
)
from sandboxes.failures import find_cause, needs_operator
from sandboxes.models import Host, Pool, Quota, Sandbox, Transition
from sandboxes.pool import admission_queue, allocation, start_breaker
from sandboxes.pool.placement import PoolSearch
from sandboxes.providers.errors import FailureCause, ProviderError, Rejected, Unavailable
from sandboxes.providers.memory import MemoryProvider
from tests.conftest import MINUTE, NOW
from tests.support.leases import evict, get_sandbox, read, run, update_pool, write

pytestmark = pytest.mark.django_db
SECOND = timedelta(seconds=1)


@pytest.fixture
def second(pool: Pool) -> Pool:
    """Second pool of the environment type "duo", whose first pool is `pool`."""
    second = Pool.objects.create(name="second", provider="memory", capacity=100)
    duo = EnvironmentType.objects.create(name="duo", pool=pool)
    AlternativePool.objects.create(environment_type=duo, pool=second, position=1)
    return second


@pytest.fixture
def lease(second: Pool, grant) -> Lease:
    granted: Lease = grant(environment_type="duo", pool="")
    return granted


@pytest.fixture
def fail_in(memory: MemoryProvider) -> Callable[[Pool, ProviderError], None]:
    """Make creates fail in one pool, although the sandbox then exists."""

    def fail(pool: Pool, error: ProviderError) -> None:
        def raise_in_pool(ref: str) -> None:
            if Sandbox.objects.filter(ref=ref, pool=pool).exists():
                raise error

        memory.after("create", raise_in_pool)

    return fail


def list_skips(lease: Lease) -> list[tuple[str, str]]:
    events = LeaseEvent.objects.filter(lease=lease, kind="pool_skipped").order_by("pk")
    return [(event.pool.name, event.skip_reason) for event in events if event.pool]


def get_pool_name(lease: Lease) -> str:
    return Lease.objects.select_related("pool").get(pk=lease.pk).pool.name


# --- failover -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "reason"), [(Unavailable("timed out"), "unavailable"), (Rejected("image"), "rejected")])
def test_failed_start_goes_on_in_the_next_pool_and_the_first_sandbox_keeps_its_place(
    error, reason, lease, pool, second, memory, fail_in
) -> None:
    fail_in(pool, error)
    assert run(lease).exit_code == 0
    assert list_skips(lease) == [(pool.name, reason)]
    assert get_pool_name(lease) == get_sandbox(lease).pool.name == "second"
    first = Sandbox.objects.get(pool=pool)
    assert (first.state, Pool.objects.get(pk=pool.pk).used, len(memory.list(str(pool.owner)))) == ("destroying", 1, 1)
    sweeps.reclaim(now=NOW + MINUTE)
    assert Sandbox.objects.get(pool=pool).state == "destroyed"
    assert (Pool.objects.get(pk=pool.pk).used, memory.list(str(pool.owner))) == (0, [])
    assert run(lease, now=NOW + MINUTE).exit_code == 0
    assert Pool.objects.get(pk=second.pk).used == 1


def test_full_and_draining_pools_are_passed_over_and_the_first_pool_is_used_again_later(lease, grant, pool, second) -> None:
    update_pool(pool, draining=True)
    run(lease)
    assert list_skips(lease) == [(pool.name, "draining")]
    update_pool(pool, draining=False, capacity=1)
    write(other := grant(agent="did:plc:other", environment_type="duo", pool=""))
    Quota.objects.filter(pool=pool, agent_did=other.agent_did).update(guaranteed=1)
    third = grant(agent="did:plc:third", environment_type="duo", pool="")
    run(third)
    assert (get_pool_name(other), get_pool_name(third)) == (pool.name, "second")
    assert list_skips(third) == [(pool.name, "full")]


def test_quota_is_not_evaded_in_another_pool(lease, pool, second) -> None:
    Quota.objects.create(pool=pool, agent_did=lease.agent_did, most=0)
    with pytest.raises(QuotaExceeded):
        run(lease)
    assert list_skips(lease) == []


def test_error_of_all_pools_has_the_reasons_which_the_timeline_has_once(lease, pool, second, fail_in) -> None:
    update_pool(pool, draining=True)
    fail_in(second, Unavailable("timed out"))
    for attempt in range(2):
        with pytest.raises(NoPoolAvailable) as failed:
            run(lease, now=NOW + attempt * MINUTE)
    assert [(each["pool"], each["reason"]) for each in failed.value.extra["pools"]] == [
        (pool.name, "draining"), ("second", "unavailable"),
    ]  # fmt: skip
    assert failed.value.retry_after == SandboxNotReady.retry_after
    assert list_skips(lease) == [(pool.name, "draining"), ("second", "unavailable")]


def test_lease_that_named_its_pool_or_whose_key_allows_one_stays_in_it(grant, pool, second, fail_in) -> None:
    fail_in(pool, Unavailable("timed out"))
    named = grant(environment_type="duo", pool=pool.name)
    with pytest.raises(SandboxNotReady):
        run(named)
    only_second = AllowLists(pools=["second"])
    of_key = grant(environment="game-2", environment_type="duo", pool="", allowed=only_second)
    assert of_key.pool == second
    run(of_key)
    assert list_skips(of_key) == []
    fail_in(second, Unavailable("timed out"))
    both = grant(environment="game-3", environment_type="duo", pool="", allowed=AllowLists(pools=["second", pool.name]))
    with pytest.raises(NoPoolAvailable):
        run(both)


def test_lease_follows_its_sandbox_although_it_was_read_before_another_request_moved_it(lease, pool, second) -> None:
    as_read = Lease.objects.get(pk=lease.pk)
    Lease.objects.filter(pk=lease.pk).update(pool=second)
    LeasePlacement(as_read).place(pool, [], now=NOW)
    assert get_pool_name(lease) == pool.name


def test_join_grants_one_lease_in_the_second_pool(pool, second, fail_in) -> None:
    fail_in(pool, Unavailable("timed out"))
    request = LeaseRequest("did:plc:ada", "game-1", "duo")
    joined = admission.acquire_with_place(request, wait=None, now=NOW)
    assert joined.is_new and joined.sandbox and joined.sandbox.pool_id == joined.lease.pool_id == second.pk
    assert list_skips(joined.lease) == [(pool.name, "unavailable")]
    assert joined.lease.events.filter(kind="granted").count() == 1


def test_join_that_waits_for_the_first_full_pool_leaves_its_queue_when_another_pool_has_a_place(pool, second, fail_in) -> None:
    update_pool(pool, draining=True)
    update_pool(second, capacity=1)
    Quota.objects.create(pool=second, agent_did="did:plc:ada", guaranteed=1)
    first = admission.acquire_with_place(LeaseRequest("did:plc:ada", "game-1", "duo"), wait=None, now=NOW)
    request = LeaseRequest("did:plc:bob", "game-1", "duo")
    with pytest.raises(CapacityExhausted) as waits:
        admission.acquire_with_place(request, wait=timedelta(0), now=NOW)
    assert waits.value.extra["position"] == 1
    assert admission_queue.find_pool("did:plc:bob", "game-1", now=NOW) == second
    update_pool(pool, draining=False)
    assert admission.acquire_with_place(request, wait=timedelta(0), now=NOW + SECOND).lease.pool == pool
    assert admission_queue.count_waiting(second, now=NOW + SECOND) == 0
    assert leasing.require_active(first.lease.pk, now=NOW)


# --- wake -----------------------------------------------------------------------------------------------------------------


def test_cold_sandbox_of_an_unavailable_provider_wakes_in_another_pool_with_its_state(lease, pool, second, fail_in) -> None:
    write(lease)
    evict(lease)
    fail_in(pool, Unavailable("timed out"))
    assert read(lease, now=NOW + SECOND) == "kept"
    woken = get_sandbox(lease)
    assert (woken.pool, woken.source) == (second, "local")
    assert list_skips(lease) == [(pool.name, "unavailable")]
    evict(lease, now=NOW + MINUTE)
    assert read(lease, now=NOW + 2 * MINUTE) == "kept"
    assert get_sandbox(lease).pool == second  # stays where its provider is available


def test_cold_sandbox_is_given_up_only_if_another_pool_seems_able_to_start_one(lease, pool, second) -> None:
    write(lease)
    evict(lease)
    Host.objects.update(start_failures=3, starts_paused_until=NOW + MINUTE)
    with pytest.raises(StartsPaused):  # both pools are of one provider
        read(lease)
    assert get_sandbox(lease).state == "cold"
    Pool.objects.filter(pk=second.pk).update(provider="process")
    assert read(lease) == "kept"
    assert Transition.objects.filter(code="moved").values_list("to", flat=True).get() == "destroying"
    assert (get_sandbox(lease).pool, list_skips(lease)) == (second, [(pool.name, "circuit_open")])
    assert Pool.objects.get(pk=pool.pk).used == 0
    leasing.release(lease.pk, now=NOW)
    sweeps.reclaim(now=NOW)


def test_cold_sandbox_that_another_request_has_woken_since_is_not_given_up(lease, pool, second, monkeypatch) -> None:
    write(lease)
    evict(lease)
    update_pool(second, provider="process")
    Host.objects.update(start_failures=3, starts_paused_until=NOW + MINUTE)
    find_promising = PoolSearch.find_promising

    def find_while_another_request_wakes(search: PoolSearch, *args, **options) -> object:
        monkeypatch.undo()
        Host.objects.update(start_failures=0, starts_paused_until=None)
        assert read(lease) == "kept"
        evict(lease)
        return find_promising(search, *args, **options)

    monkeypatch.setattr(PoolSearch, "find_promising", find_while_another_request_wakes)
    assert read(lease) == "kept"
    sandbox = get_sandbox(lease)
    assert (sandbox.pool, sandbox.incarnation) == (pool, 3)
    assert not Transition.objects.filter(code="moved").exists()


# --- circuit breaker and concurrent starts --------------------------------------------------------------------------------


def test_breaker_opens_after_failures_in_a_row_and_lets_one_start_through_after_the_pause(grant, pool, memory) -> None:
    outage = memory.fail("create", Unavailable("timed out"))
    lease = grant()
    for _ in range(start_breaker.MAX_START_FAILURES):
        with pytest.raises(SandboxNotReady):
            run(lease)
    calls = len(memory.calls)
    with pytest.raises(StartsPaused) as paused:
        run(lease)
    assert paused.value.retry_after and 25 < paused.value.retry_after <= 31
    assert len(memory.calls) == calls
    host = Host.objects.get(provider="memory")
    later = host.starts_paused_until
    assert later
    start_breaker.admit(host, now=later)  # the one start
    with pytest.raises(StartsPaused):
        run(lease, now=later)
    start_breaker.note_failure(host, Unavailable("timed out"), now=later)
    host.refresh_from_db()
    assert host.starts_paused_until == later + 2 * start_breaker.INITIAL_PAUSE
    start_breaker.note_failure(host, Unavailable("began before the pause"), now=later)
    assert Host.objects.get(pk=host.pk).starts_paused_until == host.starts_paused_until
    outage.close()
    run(lease, now=host.starts_paused_until)
    host.refresh_from_db()
    assert (host.start_failures, host.starts_paused_until, host.start_error) == (0, None, "")


@pytest.mark.parametrize(
    ("cause", "is_final"), [(FailureCause.CREDENTIALS_REFUSED, True), (FailureCause.NO_CAPACITY, False), (None, False)]
)
def test_a_pause_has_the_cause_of_the_last_failure(grant, pool, memory, cause: FailureCause | None, is_final: bool) -> None:
    lease = grant()
    with memory.fail("create", Unavailable("status 401", cause=cause)):
        for _ in range(start_breaker.MAX_START_FAILURES):
            with pytest.raises(SandboxNotReady):
                run(lease)
    with pytest.raises(StartsPaused) as paused:
        run(lease)
    assert (find_cause(paused.value), needs_operator(paused.value)) == (cause.value if cause else "", is_final)
    Host.objects.update(starts_paused_until=NOW)
    run(lease, now=NOW)
    assert Host.objects.get(provider="memory").start_error_code == ""


def test_rejected_start_does_not_open_the_breaker_and_reset_closes_it(lease, pool, memory) -> None:
    memory.fail("create", Rejected("no such image"))
    for _ in range(start_breaker.MAX_START_FAILURES + 1):
        with pytest.raises(NoPoolAvailable):
            run(lease)
    host = Host.objects.get(provider="memory")
    assert not start_breaker.is_open(host, now=NOW)
    assert not start_breaker.reset(host, now=NOW)
    Host.objects.update(start_failures=3, starts_paused_until=NOW + MINUTE)
    assert start_breaker.reset(host, now=NOW)
    assert Host.objects.get(pk=host.pk).start_failures == 0


def test_pool_starts_no_more_sandboxes_at_once_than_it_may(grant, pool, memory, at_checkpoint) -> None:
    update_pool(pool, max_starting=1)
    refused: list[BaseException] = []

    def start_another() -> None:
        with pytest.raises(TooManyStarts) as raised:
            run(grant(agent="did:plc:other"))
        refused.append(raised.value)

    at_checkpoint("created", start_another)
    assert run(grant()).exit_code == 0
    assert len(refused) == 1
    assert Pool.objects.get(pk=pool.pk).used == 1


# --- price ----------------------------------------------------------------------------------------------------------------


def test_cheapest_pool_is_tried_first_and_one_without_a_price_last(lease, pool, second) -> None:
    Pool.objects.filter(pk=pool.pk).update(provider="daytona")
    update_pool(second, provider="process")
    third = Pool.objects.create(name="third", provider="memory")
    AlternativePool.objects.create(environment_type_id=lease.environment_type.pk, pool=third, position=2)
    Rate.objects.all().delete()
    for provider, usd in (("daytona", "0.2"), ("process", "0.1")):
        Rate.objects.bulk_create([Rate(provider=provider, item="time", usd=Decimal(usd), valid_from=NOW - MINUTE)])

    def list_names() -> list[str]:
        return [each.name for each in LeasePlacement(Lease.objects.get(pk=lease.pk)).find_candidates(now=NOW).pools]

    assert list_names()[-2:] == ["second", "third"]
    EnvironmentType.objects.filter(name="duo").update(cheapest_pool=True)
    assert list_names()[0] == "second"
    assert execution.ensure_sandbox_ready(lease.pk, now=NOW).pool == second


# --- resources by request -------------------------------------------------------------------------------------------------


def test_requested_resources_select_the_pools_that_allow_them_and_no_pre_warmed_sandbox(grant, pool, second, memory) -> None:
    update_pool(pool, memory_mib=256, warm_target=1)
    update_pool(second, memory_mib=256, max_memory_mib=1024, max_millicpus=4000, warm_target=1)
    allocation.start_warm(second, now=NOW)
    lease = grant(environment_type="duo", pool="", resources=Resources(memory_mib=512, millicpus=2000))
    run(lease)
    sandbox = get_sandbox(lease)
    assert (sandbox.pool, sandbox.memory_mib, sandbox.millicpus) == (second, 512, 2000)
    assert list_skips(lease) == [(pool.name, "too_small")]
    evict(lease)
    run(lease)
    assert get_sandbox(lease).memory_mib == 512
    assert Sandbox.objects.filter(holder=None, state="warm").count() == 1


def test_requested_image_selects_a_pool_that_lists_it_and_is_that_of_each_sandbox(grant, pool, second, memory) -> None:
    update_pool(second, allowed_images=["tools:1"], warm_target=1)
    allocation.start_warm(second, now=NOW)
    lease = grant(environment_type="duo", pool="", resources=Resources(image="tools:1"))
    run(lease)
    assert (get_sandbox(lease).pool, get_sandbox(lease).image) == (second, "tools:1")
    evict(lease)
    run(lease)
    assert get_sandbox(lease).image == "tools:1"
    assert Sandbox.objects.filter(holder=None, state="warm").count() == 1


@pytest.mark.parametrize(
    ("resources", "field", "limit"),
    [
        (Resources(image="other"), "resources.image", "allows this image"),
        (Resources(memory_mib=1025), "resources.memory_mib", "from 16 to 1024"),
        (Resources(memory_mib=1), "resources.memory_mib", "from 16 to 1024"),
        (Resources(millicpus=4001), "resources.millicpus", "from 50 to 4000"),
        (Resources(memory_mib=1024, millicpus=4000), "resources", "together"),
    ],
)
def test_resources_beyond_the_limits_of_every_pool_are_refused(resources, field, limit, grant, pool, second) -> None:
    update_pool(pool, max_millicpus=4000)
    update_pool(second, max_memory_mib=1024)
    with pytest.raises(InvalidRequest, match=limit) as refused:
        grant(environment_type="duo", pool="", resources=resources)
    assert refused.value.extra["field"] == field
    with pytest.raises(InvalidRequest):  # the limits of the named pool
        grant(environment_type="duo", pool=pool.name, resources=Resources(memory_mib=1024))

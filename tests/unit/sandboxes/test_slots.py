"""Egress slots: released by an eviction, taken again by a wake, and freed by evicting another sandbox."""

from collections.abc import Callable

import pytest

from leases.models import Lease
from sandboxes.egress import authorization, slots
from sandboxes.egress.refusals import CallRefused
from sandboxes.errors import CapacityExhausted, QuotaExceeded
from sandboxes.models import Pool, Quota, Sandbox
from sandboxes.pool import allocation
from tests.conftest import NOW
from tests.support.billing import start_run
from tests.support.leases import evict, get_sandbox, read, run, update_pool, write

pytestmark = pytest.mark.django_db


@pytest.fixture
def lease(grant: Callable[..., Lease], settings) -> Lease:
    """A lease whose waiting sandbox has the only slot."""
    settings.EGRESS_SLOTS = 1
    granted = grant()
    write(granted)
    return granted


def list_slots() -> dict[str, tuple[str, int | None]]:
    return {sandbox.environment_id: (sandbox.state, sandbox.slot) for sandbox in Sandbox.objects.all()}


def test_eviction_releases_the_slot_and_the_wake_takes_one(lease: Lease) -> None:
    evict(lease)
    assert list_slots() == {"game-1": ("cold", None)}
    with pytest.raises(CallRefused, match="No active lease"):
        authorization.identify_caller(0, now=NOW)
    assert read(lease) == "kept"
    assert list_slots() == {"game-1": ("waiting", 0)}
    assert authorization.identify_caller(0, now=NOW).holder == lease.pk


def test_start_without_a_free_slot_evicts_a_sandbox_and_keeps_its_place(lease: Lease, grant, pool: Pool) -> None:
    write(grant(environment="game-2"))
    assert list_slots() == {"game-1": ("cold", None), "game-2": ("waiting", 0)}
    write(grant("did:plc:bob", "game-3"))
    assert list_slots() == {"game-1": ("cold", None), "game-2": ("cold", None), "game-3": ("waiting", 0)}
    assert Pool.objects.get(pk=pool.pk).used == 3


def test_wake_without_a_free_slot_evicts_a_sandbox(lease: Lease, grant) -> None:
    write(grant(environment="game-2"))
    assert read(lease) == "kept"
    assert list_slots() == {"game-1": ("waiting", 0), "game-2": ("cold", None)}


def test_without_a_free_slot_an_unclaimed_sandbox_is_destroyed(grant, pool: Pool, settings) -> None:
    settings.EGRESS_SLOTS = 1
    update_pool(pool, warm_target=1)
    assert allocation.start_warm(pool, now=NOW)
    update_pool(pool, memory_mib=pool.memory_mib * 2)  # the unclaimed sandbox does not fit
    run(grant())
    assert list_slots() == {"": ("destroyed", 0), "game-1": ("waiting", 0)}


def test_running_and_guaranteed_sandboxes_keep_their_slots(lease: Lease, grant, pool: Pool) -> None:
    sleeper = grant(environment="game-2")
    write(sleeper)
    evict(sleeper)
    start_run(lease)
    for needy in (sleeper, grant("did:plc:bob", "game-3")):
        with pytest.raises(CapacityExhausted, match=r"All 1 egress slots .*LEASEHOLD_EGRESS_SLOTS"):
            run(needy)
    assert list_slots() == {"game-1": ("running", 0), "game-2": ("cold", None)}
    assert Pool.objects.get(pk=pool.pk).used == 2
    Sandbox.objects.filter(holder=lease.pk).update(state="waiting", open_runs=0)
    Quota.objects.filter(pool=pool).update(guaranteed=2)
    with pytest.raises(CapacityExhausted):
        run(grant("did:plc:bob", "game-3"))


def test_refused_quota_evicts_nobody_for_a_slot(lease: Lease, grant, pool: Pool) -> None:
    Quota.objects.create(pool=pool, agent_did="did:plc:bob", most=0)
    with pytest.raises(QuotaExceeded):
        run(grant("did:plc:bob"))
    assert get_sandbox(lease).state == "waiting"


def test_prewarming_evicts_nobody_for_a_slot(lease: Lease, pool: Pool) -> None:
    update_pool(pool, warm_target=1)
    assert allocation.start_warm(pool, now=NOW) is None
    assert get_sandbox(lease).state == "waiting"


def test_slot_taken_by_another_sandbox_is_replaced_at_the_wake(grant, settings, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.EGRESS_SLOTS = 2
    lease, other = grant(), grant(environment="game-2")
    for each in (lease, other):
        write(each)
    evict(lease)
    choices = iter([get_sandbox(other).slot, 1 - (get_sandbox(other).slot or 0)])
    monkeypatch.setattr(slots, "choose_free_slot", lambda: next(choices))
    assert read(lease) == "kept"
    assert {slot for _, slot in list_slots().values()} == {0, 1}

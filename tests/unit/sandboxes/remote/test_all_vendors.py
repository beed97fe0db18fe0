"""One reconcile pass and one inventory over the pools of several vendors at once, with faults at some of them."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from leases import leasing, sweeps
from leases.models import Lease
from sandboxes import providers
from sandboxes.errors import SandboxNotReady
from sandboxes.inventory.entries import Finding, collect_inventory
from sandboxes.inventory.listings import ListingState
from sandboxes.models import Pool, Sandbox
from sandboxes.providers.base import SandboxSpec
from sandboxes.sweeps import passes
from tests.conftest import MINUTE
from tests.emulators.vendor import CUT_AFTER, Fault
from tests.support.leases import get_sandbox, run
from tests.support.remote import GetEmulator
from tests.unit.sandboxes.remote.conftest import LIST, LISTING
from tests.unit.sandboxes.remote.test_reconcile import LATER, count_running

pytestmark = pytest.mark.django_db(transaction=True)
ALL = [*LISTING, "memory"]


@pytest.fixture
def pools(move_pool: Callable[[str], Pool], pool: Pool, settings: Any) -> Iterator[dict[str, Pool]]:
    """A pool of each provider that lists."""
    for kind in LISTING:
        move_pool(kind)
    settings.SANDBOX_PROVIDER = "memory"
    Pool.objects.filter(pk=pool.pk).update(provider="memory")
    made = {kind: Pool.objects.create(name=f"at-{kind}", provider=kind) for kind in ALL}
    yield made
    for kind, each in made.items():
        for found in providers.get_provider(kind).list(str(each.owner)):
            providers.get_provider(kind).destroy(found.ref)


def add_orphan(kind: str, pool: Pool) -> str:
    name = f"leasehold-{uuid4().hex}-1"
    providers.get_provider(kind).create(SandboxSpec(name, str(pool.owner)))
    return name


def find_names(kind: str, pool: Pool) -> set[str]:
    return {each.name for each in providers.get_provider(kind).list(str(pool.owner))}


def test_one_pass_covers_every_pool_and_a_vendor_without_a_conclusive_listing_blocks_no_other(
    pools: dict[str, Pool], grant: Callable[..., Lease], emulators: GetEmulator
) -> None:
    leases = {kind: grant(environment=kind, pool=pools[kind].name) for kind in ALL}
    for lease in leases.values():
        run(lease)
    held = {kind: get_sandbox(lease).name for kind, lease in leases.items()}
    orphans = {kind: add_orphan(kind, pools[kind]) for kind in ALL}
    emulators("daytona").is_listing_late = True  # lists nothing
    emulators("runloop").faults.append(Fault(LIST["runloop"], 503, times=100))
    result = sweeps.reconcile(now=LATER, grace=MINUTE)
    assert sorted(failure.split(":")[0] for failure in result.failures) == [
        'pool "at-daytona", daytona', 'pool "at-runloop", runloop',
    ]  # fmt: skip
    engines = {each.provider: each.state for each in collect_inventory(now=LATER, grace=MINUTE).engines}
    assert (engines["runloop"], engines["daytona"]) == (ListingState.UNAVAILABLE, ListingState.LISTED)
    emulators("daytona").is_listing_late = False
    emulators("runloop").faults.clear()
    assert {kind for kind in ALL if orphans[kind] in find_names(kind, pools[kind])} == {"daytona", "runloop"}
    found = {each.name: each.finding for each in collect_inventory(now=LATER, grace=MINUTE).entries}
    expected = dict.fromkeys(held.values(), Finding.NONE)
    assert found == expected | {orphans[kind]: Finding.NO_ROW for kind in ("daytona", "runloop")}
    assert not sweeps.reconcile(now=LATER, grace=MINUTE).failures
    assert {kind: find_names(kind, pools[kind]) for kind in ALL} == {kind: {name} for kind, name in held.items()}


def test_orphan_at_a_vendor_that_its_pool_has_left_is_destroyed(pools: dict[str, Pool], grant: Callable[..., Lease]) -> None:
    kind, pool = "langsmith", pools["langsmith"]
    lease = grant(pool=pool.name)
    run(lease)
    leasing.release(lease.pk, now=LATER)
    passes.destroy_due(now=LATER)
    assert {each.state for each in Sandbox.objects.all()} == {"destroyed"}
    Pool.objects.filter(pk=pool.pk).update(provider="memory")
    orphan = add_orphan(kind, pool)
    assert sweeps.reconcile(now=LATER, grace=timedelta(days=7000)).counts.get("orphans destroyed") is None
    assert find_names(kind, pool) == {orphan}
    assert sweeps.reconcile(now=LATER, grace=MINUTE).counts["orphans destroyed"] == 1
    assert find_names(kind, pool) == set()


def test_create_at_the_bridge_whose_outcome_stays_unknown_leaves_one_sandbox(
    move_pool: Callable[[str], Pool], grant: Callable[..., Lease], emulators: GetEmulator, settings: Any
) -> None:
    """The bridge cannot list: the row of the failed start destroys what its name stands for."""
    pool, emulator = move_pool("cloudflare"), emulators("cloudflare")
    settings.SANDBOX_START_TIMEOUT = timedelta(seconds=0.3)
    emulator.faults.append(Fault("POST .*/exec", CUT_AFTER, times=100))
    lease = grant()
    with pytest.raises(SandboxNotReady):
        run(lease)
    assert count_running(emulator, pool) == 1
    emulator.faults.clear()
    settings.SANDBOX_START_TIMEOUT = MINUTE
    run(lease)
    passes.destroy_due(now=LATER)
    sweeps.reconcile(now=LATER, grace=MINUTE)
    assert count_running(emulator, pool) == 1

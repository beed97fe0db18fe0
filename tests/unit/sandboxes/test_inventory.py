"""Inventory of all engines: findings, adoption and destruction of sandboxes without an owner, races with starts."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from leases.adoption import adopt_sandbox
from leases.errors import InvalidRequest
from leases.models import Lease
from sandboxes import destruction, snapshots, stop_reasons
from sandboxes.audit import COMMAND_LINE, Actor
from sandboxes.errors import (
    CapacityExhausted,
    InstallationMismatch,
    SandboxHasOwner,
    SandboxNotAdoptable,
    SandboxTooYoung,
)
from sandboxes.inventory import listings
from sandboxes.inventory.adoption import Adoption
from sandboxes.inventory.entries import Entry, Finding, collect_inventory
from sandboxes.inventory.listings import ListingState
from sandboxes.inventory.removal import destroy_ownerless
from sandboxes.lifecycle import CHECKPOINT_HOOKS
from sandboxes.models import Installation, OperatorAction, Pool, Quota, Sandbox, Transition
from sandboxes.models.state import Snapshot
from sandboxes.pool import prewarmed
from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider
from sandboxes.sweeps import passes, reconciliation
from tests.conftest import MINUTE, NOW
from tests.support.actors import console_user
from tests.support.leases import evict, get_sandbox, read, run, write

pytestmark = pytest.mark.django_db
LATER = NOW + timedelta(days=3650)  # than the clock of the memory provider


@pytest.fixture
def add_unknown(memory: MemoryProvider) -> Callable[..., str]:
    """Create a sandbox without a row: add_unknown(owner) returns its name."""

    def add(owner: object, name: str = "") -> str:
        name = name or f"leasehold-{uuid4().hex}-1"
        memory.create(SandboxSpec(name, str(owner)))
        memory.write_file(name, "/workspace/f", b"kept")
        return name

    return add


@pytest.fixture
def at_checkpoint() -> Iterator[Callable[[str, Callable[[], object]], None]]:
    """Run a concurrent operation at a checkpoint, once."""
    hooks = []

    def install(name: str, act: Callable[[], object]) -> None:
        pending = [act]

        def hook(reached: str, subject: Any) -> None:
            if reached == name and pending:
                pending.pop()()

        hooks.append(hook)
        CHECKPOINT_HOOKS.append(hook)

    yield install
    for hook in hooks:
        CHECKPOINT_HOOKS.remove(hook)


def collect(now: Any = LATER) -> dict[str, Entry]:
    return {entry.name: entry for entry in collect_inventory(now=now, grace=MINUTE).entries}


def destroy(name: str, now: Any = LATER, actor: Actor | None = None) -> bool:
    actor = actor or console_user("ops")
    return destroy_ownerless("memory", name, now=now, grace=MINUTE, actor=actor, reason="unused")


def list_orders() -> list[str]:
    return [action.summary for action in OperatorAction.objects.all()]


def adopt(name: str, now: Any = LATER, **options: Any) -> Adoption:
    return adopt_sandbox("memory", name, now=now, actor=console_user("ops"), reason="after a restore", **options)


def test_each_sandbox_has_the_finding_that_its_listing_and_its_row_give(
    lease: Lease, grant: Callable[..., Lease], memory: MemoryProvider, add_unknown: Callable[..., str]
) -> None:
    write(lease, "kept")
    held = get_sandbox(lease)
    gone = grant("did:plc:bob")
    write(gone, "lost")
    memory.vanish(get_sandbox(gone).ref)
    cold = grant("did:plc:eve")
    write(cold, "stored")
    evict(cold)
    left = add_unknown(lease.pool.owner, get_sandbox(cold).name)  # the row of a cold sandbox names no process
    orphan, foreign = add_unknown(lease.pool.owner), add_unknown("unknown-owner")
    found = collect()
    assert {name: entry.finding for name, entry in found.items()} == {
        foreign: Finding.UNKNOWN_OWNER, orphan: Finding.NO_ROW, left: Finding.NO_ROW,
        get_sandbox(gone).name: Finding.MISSING, held.name: Finding.NONE,
    }  # fmt: skip
    assert [entry.finding for entry in found.values()][:2] == [Finding.UNKNOWN_OWNER, Finding.NO_ROW]  # urgent ones first
    assert (found[held.name].sandbox_id, found[held.name].process_state) == ("did:plc:ada::game-1", "running")
    assert (found[left].sandbox_id, found[left].pool) == ("did:plc:eve::game-1", lease.pool)
    assert collect(NOW)[orphan].finding == Finding.STARTING


def test_engine_without_a_listing_is_shown_with_its_error_and_never_as_empty(
    lease: Lease, memory: MemoryProvider, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(lease, "kept")
    Pool.objects.create(name="remote", provider="daytona")  # its API key is not set
    name = get_sandbox(lease).name

    def look() -> tuple[Any, Finding]:
        inventory = collect_inventory(now=LATER, grace=MINUTE)
        engines = {engine.provider: (engine.state, engine.error) for engine in inventory.engines}
        assert engines["daytona"][0] == ListingState.NOT_CONFIGURED and "DAYTONA_API_KEY" in engines["daytona"][1]
        return engines["memory"], {entry.name: entry.finding for entry in inventory.entries}[name]

    assert look() == ((ListingState.LISTED, ""), Finding.NONE)
    with memory.fail("list", Unavailable("out of order")):
        assert look() == ((ListingState.UNAVAILABLE, "out of order"), Finding.UNCONFIRMED)
    ended = threading.Event()
    monkeypatch.setattr(listings, "LISTING_TIMEOUT_SECONDS", 0.05)
    with memory.before("list", lambda owner: ended.wait(10) and None):
        (state, error), finding = look()
        ended.set()
    assert (state, finding) == (ListingState.UNAVAILABLE, Finding.UNCONFIRMED) and "within" in error
    monkeypatch.undo()
    memory.vanish(get_sandbox(lease).ref)
    assert look() == ((ListingState.LISTED, ""), Finding.UNCONFIRMED)  # an empty listing proves nothing


def test_sandboxes_of_another_host_are_neither_missing_nor_without_an_owner(
    grant: Callable[..., Lease], memory: MemoryProvider
) -> None:
    for engine, agent in (("engine-a", "did:plc:ada"), ("engine-b", "did:plc:bob")):
        with memory.on_engine(engine):
            write(grant(agent), "kept")
    with memory.on_engine("engine-a"):
        inventory = collect_inventory(now=NOW, grace=MINUTE)
    assert sorted((each.state, len(each.sandboxes)) for each in inventory.engines) == [
        (ListingState.LISTED, 1), (ListingState.OTHER_HOST, 0),
    ]  # fmt: skip
    assert [entry.finding for entry in inventory.entries] == [Finding.NONE, Finding.NONE]


def test_destroy_refuses_what_has_a_row_is_young_or_of_a_database_that_does_not_match(
    lease: Lease, memory: MemoryProvider, add_unknown: Callable[..., str]
) -> None:
    write(lease, "kept")
    orphan, foreign = add_unknown(lease.pool.owner), add_unknown("unknown-owner")
    with pytest.raises(SandboxHasOwner):
        destroy(get_sandbox(lease).name)
    with pytest.raises(SandboxTooYoung):
        destroy(orphan, now=NOW)
    Installation.objects.update_or_create(pk=1, defaults={"mismatch": "restored"})
    with pytest.raises(InstallationMismatch):
        destroy(orphan)
    Installation.objects.update(mismatch="")
    with memory.fail("destroy", Unavailable("timeout")), pytest.raises(Unavailable):
        destroy(orphan)
    assert [destroy(foreign), destroy(foreign), destroy(orphan)] == [True, False, True]
    assert read(lease) == "kept" and {*collect()} == {get_sandbox(lease).name}


def test_adoption_between_the_check_and_the_destroy_keeps_the_sandbox(
    pool: Pool, memory: MemoryProvider, add_unknown: Callable[..., str], at_checkpoint: Any
) -> None:
    orphan = add_unknown(pool.owner)
    at_checkpoint("removal checked", lambda: adopt(orphan))
    with pytest.raises(SandboxHasOwner):
        destroy(orphan)
    at_checkpoint("removal checked", lambda: destroy(other))
    other = add_unknown(pool.owner)
    assert destroy(other)  # two operators destroy it at the same time, and neither fails
    assert {*collect()} == {orphan}


def test_adopted_sandbox_stays_in_quarantine_until_its_destroy_is_retried(
    pool: Pool, memory: MemoryProvider, add_unknown: Callable[..., str]
) -> None:
    orphan = add_unknown(pool.owner)
    row = adopt(orphan).sandbox
    assert adopt(orphan).sandbox == row
    pool.refresh_from_db()
    assert (row.name, row.state, row.holder, pool.used) == (orphan, "destroying", None, 1)
    Pool.objects.filter(pk=pool.pk).update(warm_target=1)
    assert prewarmed.lock_ready(pool, now=LATER)[0] is None  # its files are those of another agent
    reconciliation.reconcile(now=LATER, grace=MINUTE)
    passes.destroy_due(now=LATER)
    passes.recount(now=LATER)
    assert memory.read_file(orphan, "/workspace/f", limit=9) == b"kept" and collect()[orphan].finding == Finding.NONE
    assert destruction.retry_destroy(row.pk, now=LATER)
    passes.destroy_due(now=LATER)
    pool.refresh_from_db()
    assert (collect(), pool.used, Sandbox.objects.get(pk=row.pk).state) == ({}, 0, "destroyed")
    codes = Transition.objects.filter(sandbox=row).order_by("pk").values_list("to", "code")
    assert [*codes] == [("warming", "adopted"), ("destroying", "adopted"), ("destroyed", "confirmed_gone")]


def test_files_of_an_adopted_sandbox_become_a_snapshot_that_no_wake_reads_unless_it_is_restored(
    grant: Callable[..., Lease], memory: MemoryProvider, add_unknown: Callable[..., str]
) -> None:
    lease = grant(now=LATER)
    write(lease, "own", now=LATER)
    evict(lease, now=LATER)
    orphan = add_unknown(lease.pool.owner)
    quota = Quota.objects.get(agent_did=lease.agent_did)
    with memory.fail("get_files", Unavailable("cut"), times=1), pytest.raises(Unavailable):
        adopt(orphan, lease_id=lease.pk)
    adopted = adopt(orphan, lease_id=lease.pk)
    assert adopt(orphan, lease_id=lease.pk).snapshot == adopted.snapshot
    assert adopted.snapshot and Snapshot.objects.filter(holder=lease.pk).first() != adopted.snapshot
    assert Quota.objects.get(pk=quota.pk).used == quota.used + 1
    assert read(lease, now=LATER) == "own"
    stop = stop_reasons.find_last_stop(lease.pk)
    assert stop and stop.reason != "adopted"  # the lease has had another sandbox
    request = snapshots.SandboxRequest(lease.pk, lease.agent_did, lease.environment_id, lease.pool, idle_after=MINUTE)
    snapshots.restore_snapshot(request, adopted.snapshot.pk, now=LATER)
    run(lease, "true", now=LATER)
    assert memory.read_file(get_sandbox(lease).ref, "/workspace/f", limit=9) == b"kept"
    destruction.retry_destroy(adopted.sandbox.pk, now=LATER)
    passes.destroy_due(now=LATER)
    assert Quota.objects.get(pk=quota.pk).used == quota.used


def test_adoption_is_refused_where_it_is_not_safe(
    lease: Lease, memory: MemoryProvider, add_unknown: Callable[..., str]
) -> None:
    write(lease, "kept")
    former = get_sandbox(lease)
    pool, other = lease.pool, Pool.objects.create(name="remote", provider="daytona")
    orphan, foreign = add_unknown(pool.owner), add_unknown("unknown-owner")
    refused = {
        add_unknown(pool.owner, f"leasehold-{former.pk.hex}-7"): "incarnation 7",
        add_unknown(pool.owner, "own-name"): "name",
        foreign: "Choose a pool",
    }
    for name, text in refused.items():
        with pytest.raises(SandboxNotAdoptable, match=text):
            adopt(name)
    with pytest.raises(SandboxNotAdoptable, match="another provider"):
        adopt(orphan, pool_name=other.name)
    for field in ({"pool_name": "none"}, {"lease_id": uuid4()}):
        with pytest.raises(InvalidRequest):
            adopt(orphan, **field)
    Pool.objects.filter(pk=pool.pk).update(capacity=1)
    with pytest.raises(CapacityExhausted):
        adopt(orphan)
    assert Sandbox.objects.count() == 1
    Pool.objects.filter(pk=pool.pk).update(capacity=9)
    assert adopt(foreign, pool_name=pool.name).sandbox.pool == pool


def test_a_destroy_that_is_interrupted_at_any_step_is_recorded_as_an_order(
    pool: Pool, add_unknown: Callable[..., str], memory: MemoryProvider, crash_at: Callable[[str], AbstractContextManager[None]]
) -> None:
    name = add_unknown(pool.owner)
    with crash_at("removal checked"):
        destroy(name, actor=COMMAND_LINE)
    assert (list_orders(), len(memory.list_all())) == ([], 1)
    with memory.fail("destroy", Unavailable("no answer")), pytest.raises(Unavailable):
        destroy(name, actor=COMMAND_LINE)
    assert list_orders() == [f"memory {name}: unused; result: failed: no answer"]
    OperatorAction.objects.all().delete()
    with crash_at("removal done"):
        destroy(name, actor=COMMAND_LINE)
    assert (list_orders(), memory.list_all()) == ([f"memory {name}: unused; result: not known"], [])

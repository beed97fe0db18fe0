"""Leases on remote sandboxes through faults of the vendor: one sandbox each, none forgotten, no state lost."""

import json
from collections.abc import Callable
from datetime import timedelta

import pytest

from leases import execution, leasing, sweeps
from leases.models import Lease
from sandboxes.errors import SandboxNotReady
from sandboxes.models import Pool, Sandbox
from sandboxes.models.names import build_name
from sandboxes.runs.operations import Command
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW
from tests.emulators.base import CUT_AFTER, Emulator, Fault
from tests.support.leases import evict
from tests.support.remote import GetEmulator
from tests.unit.sandboxes.remote.conftest import CREATE, LISTING, LOOK_UP

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.parametrize("kind", LISTING)]
LATER = NOW + timedelta(days=3650)  # than the clock of the emulators, which state when a sandbox was created


def run(lease: Lease, *argv: str) -> bytes:
    return bytes(execution.exec_command(lease.pk, Command(argv=list(argv), timeout=MINUTE), now=NOW)[0].stdout)


def count_running(emulator: Emulator, pool: Pool) -> int:
    pks = Sandbox.objects.filter(pool=pool).values_list("pk", flat=True)
    return sum(len(emulator.find_machines(build_name(pk, number))) for pk in pks for number in range(1, 4))


def test_create_whose_outcome_stays_unknown_leaves_one_sandbox_after_the_sweeps(
    kind: str, move_pool: Callable[[str], Pool], grant: Callable[..., Lease], emulators: GetEmulator
) -> None:
    pool, emulator = move_pool(kind), emulators(kind)
    emulator.faults += [Fault(CREATE[kind], CUT_AFTER), Fault(LOOK_UP, 503, times=100)]  # no look-up settles it either
    lease = grant()
    with pytest.raises(SandboxNotReady):
        run(lease, "true")
    emulator.faults.clear()
    assert run(lease, "sh", "-c", "echo kept >/data/f; cat /data/f") == b"kept\n"
    for _ in range(2):
        passes.destroy_due(now=LATER)
        sweeps.reconcile(now=LATER, grace=MINUTE)
    assert count_running(emulator, pool) == 1
    assert run(lease, "cat", "/data/f") == b"kept\n"


def test_sandbox_that_no_row_names_is_destroyed_after_the_grace_period_and_never_by_an_empty_listing(
    kind: str, move_pool: Callable[[str], Pool], grant: Callable[..., Lease], emulators: GetEmulator
) -> None:
    pool, emulator = move_pool(kind), emulators(kind)
    lease = grant()
    run(lease, "true")
    Sandbox.objects.filter(holder=lease.pk).update(incarnation=2, ref="other")  # the row names another one
    emulator.is_listing_late = True
    assert sweeps.reconcile(now=LATER, grace=MINUTE).failures
    assert count_running(emulator, pool) == 1
    emulator.is_listing_late = False
    assert sweeps.reconcile(now=LATER, grace=timedelta(days=7000)).counts.get("orphans destroyed") is None
    assert sweeps.reconcile(now=LATER, grace=MINUTE).counts["orphans destroyed"] == 1
    assert count_running(emulator, pool) == 0


def test_sleep_stores_the_state_and_a_wake_restores_it_in_another_sandbox(
    kind: str, move_pool: Callable[[str], Pool], grant: Callable[..., Lease], emulators: GetEmulator
) -> None:
    pool, emulator = move_pool(kind), emulators(kind)
    lease = grant()
    run(lease, "sh", "-c", "echo w >/workspace/w; echo d >/data/d; ln -s w /workspace/l; chmod 700 /workspace/w")
    evict(lease)
    assert count_running(emulator, pool) == 0
    assert run(lease, "sh", "-c", "cat /workspace/l /data/d; stat -c %a /workspace/w") == b"w\nd\n700\n"
    leasing.release(lease.pk, now=NOW)
    passes.destroy_due(now=LATER)
    assert count_running(emulator, pool) == 0


def test_image_is_that_of_the_pool_or_of_the_vendor_and_never_that_of_docker(
    kind: str, move_pool: Callable[[str], Pool], grant: Callable[..., Lease], emulators: GetEmulator
) -> None:
    pool, emulator = move_pool(kind), emulators(kind)
    for image, agent in (("", "did:plc:ada"), ("own:1", "did:plc:bob")):
        Pool.objects.filter(pk=pool.pk).update(image=image)
        lease = grant(agent)
        run(lease, "true")
        sandbox = Sandbox.objects.get(holder=lease.pk)
        sent = json.dumps(emulator.get_creation(sandbox.ref))
        assert sandbox.image == image and "leasehold-sandbox" not in sent and ("own:1" in sent) == bool(image)

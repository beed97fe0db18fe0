"""Crashes at each step of the operations on a remote sandbox. After the sweeps, rows and vendor agree, and no file is lost."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta

import pytest

from leases import leasing
from leases.models import Lease
from sandboxes.models import Snapshot
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW
from tests.support.leases import read, run, write
from tests.unit.sandboxes.remote.conftest import Account

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.parametrize("vendor", ["daytona", "runloop"])]
LATER = NOW + timedelta(hours=1)  # every deadline has passed, no lease has
CrashAt = Callable[[str], AbstractContextManager[None]]


@pytest.mark.parametrize("step", ["reserved", "created", "prepared", "run opened", "run answered"])
def test_crash_at_any_step_of_an_exec_converges_and_the_lease_goes_on(
    step: str, account: Account, grant: Callable[..., Lease], crash_at: CrashAt
) -> None:
    lease = grant()
    with crash_at(step):
        run(lease)
    account.sweep(LATER)
    account.assert_converged()
    assert run(lease, now=LATER).exit_code == 0
    account.assert_converged()


@pytest.mark.parametrize("step", ["eviction claimed", "objects stored", "persisted", "process gone", "wake claimed", "created"])
def test_crash_at_any_step_of_a_sleep_or_a_wake_loses_no_file(
    step: str, account: Account, grant: Callable[..., Lease], crash_at: CrashAt
) -> None:
    lease = grant()
    write(lease)
    with crash_at(step):
        passes.evict_idle(now=NOW + 10 * MINUTE)
        read(lease, now=NOW + 11 * MINUTE)
    account.sweep(LATER)
    assert read(lease, now=LATER) == "kept"
    account.assert_converged()


@pytest.mark.parametrize("step", ["destroy claimed", "objects stored", "state stored", "destroy answered"])
def test_crash_at_any_step_of_a_destroy_leaves_no_sandbox_and_stores_the_state_once(
    step: str, account: Account, grant: Callable[..., Lease], crash_at: CrashAt
) -> None:
    lease = grant()
    write(lease)
    leasing.release(lease.pk, now=NOW + MINUTE)
    with crash_at(step):
        account.sweep(NOW + MINUTE)
    account.sweep(LATER)
    account.assert_converged()
    assert Lease.objects.get(pk=lease.pk).status == "destroyed"
    assert Snapshot.objects.filter(holder=lease.pk, forgotten_at=None).count() == 1
    assert not [machine for machine in account.emulator.list_machines() if machine.is_running]

"""Modal's snapshots of sleeping workspaces: used for a wake of the same state alone, and deleted when no wake needs them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.conf import settings as live_settings

from leases import leasing, snapshots, sweeps
from leases.models import Lease
from sandboxes import providers
from sandboxes.models import Sandbox, Snapshot
from sandboxes.state import vendor_snapshots, workspace
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW
from tests.emulators.base import CUT_AFTER, Fault
from tests.emulators.modal import ModalEmulator
from tests.support.leases import evict, get_sandbox, read, run, write
from tests.unit.sandboxes.remote.conftest import Account

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.parametrize("vendor", ["modal"])]
TAKE, MOUNT = "RPC /TaskSnapshotDirectory", "RPC /TaskMountDirectory"
HOUR = timedelta(hours=1)
CrashAt = Callable[[str], AbstractContextManager[None]]
slow = pytest.mark.matrix("seconds of vendor calls: a wake from a snapshot and one without it are fast cases")


@pytest.fixture
def modal(account: Account, settings: Any) -> Iterator[ModalEmulator]:
    """Emulator without snapshots, for a pool whose sandboxes have snapshots of workspaces of every size."""
    configuration = live_settings.REMOTE_PROVIDERS["modal"]
    options = {**configuration.options, "snapshot_min_mib": "0"}
    settings.REMOTE_PROVIDERS = {**live_settings.REMOTE_PROVIDERS, "modal": replace(configuration, options=options)}
    providers._create_provider.cache_clear()
    assert isinstance(account.emulator, ModalEmulator)
    for identifier in [*account.emulator.snapshots]:
        account.emulator.delete_snapshot(identifier)
    account.emulator.requests.clear()
    yield account.emulator
    providers._create_provider.cache_clear()


def sleep(lease: Lease, text: str = "kept", *, now: Any = NOW) -> Snapshot:
    """Write to the workspace and evict its sandbox. Return the stored snapshot."""
    write(lease, text, now=now)
    evict(lease, now=now)
    found = workspace.find_latest(lease.pk)
    assert found
    return found


@pytest.mark.smoke
def test_wake_restores_the_vendors_snapshot_without_an_upload(modal: ModalEmulator, grant: Callable[..., Lease]) -> None:
    lease = grant()
    script = "mkdir -p a/b; echo x >a/b/x; chmod 640 a/b/x; ln -s x a/b/link; touch -d @1000 a/b/x"
    large = "head -c 3000000 /dev/urandom >big; sha256sum big >sum"
    assert run(lease, "sh", "-c", f"{script}; {large}").exit_code == 0
    snapshot = sleep(lease)
    [(identifier, taken)] = modal.snapshots.items()
    assert (snapshot.vendor_snapshot, snapshot.vendor_host) == (identifier, get_sandbox(lease).host)
    assert timedelta(seconds=taken.ttl_seconds) == vendor_snapshots.VENDOR_SNAPSHOT_TTL
    assert snapshot.vendor_expires_at
    assert MINUTE > snapshot.vendor_expires_at - NOW - vendor_snapshots.VENDOR_SNAPSHOT_TTL >= timedelta(0)
    workspace.forget_local(snapshot)
    modal.requests.clear()
    assert read(lease, now=NOW + MINUTE) == "kept"
    assert MOUNT in modal.requests
    listing = run(lease, "sh", "-c", "stat -c '%a %Y' a/b/x; readlink a/b/link; sha256sum -c sum", now=NOW + MINUTE)
    assert listing.stdout == b"640 1000\nx\nbig: OK\n"
    sandbox = get_sandbox(lease)
    assert (sandbox.source, sandbox.woken_vendor, sandbox.prepared) == ("vendor", 1, True)
    assert not workspace.local_directory(snapshot).exists()  # nothing was downloaded from the store
    assert run(lease, "sh", "-c", "ls -d /mnt/leasehold-*/*", now=NOW + MINUTE).exit_code != 0  # nothing stays mounted


@slow
def test_next_sleep_supersedes_the_snapshot_and_the_sweep_deletes_it(
    modal: ModalEmulator, grant: Callable[..., Lease]
) -> None:  # fmt: skip
    lease = grant(ttl=24 * HOUR)
    first = sleep(lease, "first").vendor_snapshot
    second = sleep(lease, "second", now=NOW + MINUTE).vendor_snapshot
    assert {*modal.snapshots} == {first, second} and first != second
    sweeps.prune(now=NOW + 2 * MINUTE)
    assert {*modal.snapshots} == {second}
    assert read(lease, now=NOW + 3 * MINUTE) == "second"
    evict(lease, now=NOW + 4 * MINUTE)  # the read was a run: its state is stored and taken anew
    sweeps.prune(now=NOW + 5 * MINUTE)
    assert len(modal.snapshots) == 1
    leasing.release(lease.pk, now=NOW + 6 * MINUTE)
    sweeps.prune(now=NOW + 7 * MINUTE)
    assert not modal.snapshots
    assert not Snapshot.objects.exclude(vendor_snapshot="").exists()


@slow
def test_restored_earlier_state_is_never_that_of_the_vendors_snapshot(
    modal: ModalEmulator, grant: Callable[..., Lease]
) -> None:
    lease = grant(ttl=24 * HOUR)
    first = sleep(lease, "first")
    sleep(lease, "second", now=NOW + MINUTE)
    snapshots.restore_snapshot(lease.pk, first.pk, now=NOW + 2 * MINUTE)
    assert read(lease, now=NOW + 3 * MINUTE) == "first"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("gone", marks=pytest.mark.smoke),
        *(pytest.param(case, marks=slow) for case in ("tampered", "expired", "other account", "off")),
    ],
)
def test_unusable_snapshot_is_replaced_by_the_stored_one(
    case: str, modal: ModalEmulator, grant: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = grant()
    snapshot, later = sleep(lease), NOW + MINUTE
    if case == "gone":
        modal.delete_snapshot(snapshot.vendor_snapshot)
    elif case == "tampered":
        (modal.snapshots[snapshot.vendor_snapshot].directory / "f").write_text("tampered")
        (modal.snapshots[snapshot.vendor_snapshot].directory / "g").write_text("added")
    elif case == "expired":
        Snapshot.objects.filter(pk=snapshot.pk).update(vendor_expires_at=later + vendor_snapshots.EXPIRY_MARGIN)
        modal.requests.clear()
    elif case == "other account":
        Snapshot.objects.filter(pk=snapshot.pk).update(vendor_host=None)
        modal.requests.clear()
    elif case == "off":
        monkeypatch.setattr(providers.get_provider("modal"), "min_directory_snapshot_bytes", None)
        modal.requests.clear()
    assert read(lease, now=later) == "kept"
    assert run(lease, "ls", "g", now=later).exit_code != 0
    assert get_sandbox(lease).source == "local"
    assert (MOUNT in modal.requests) == (case in ("gone", "tampered"))


@slow
def test_unknown_outcome_of_a_mount_wakes_the_stored_state(modal: ModalEmulator, grant: Callable[..., Lease]) -> None:
    lease = grant()
    sleep(lease)
    modal.faults.append(Fault(MOUNT, CUT_AFTER, times=20))  # more than the client repeats
    assert read(lease, now=NOW + MINUTE) == "kept"
    assert get_sandbox(lease).source == "local"
    sweeps.prune(now=NOW + 2 * MINUTE)
    assert not modal.snapshots


@slow
@pytest.mark.parametrize("outcome", [CUT_AFTER, 500])
def test_failed_snapshot_does_not_prevent_the_sleep(
    outcome: int | str, modal: ModalEmulator, grant: Callable[..., Lease]
) -> None:  # fmt: skip
    lease = grant()
    modal.faults.append(Fault(TAKE, outcome, times=20))
    assert sleep(lease).vendor_snapshot == ""
    modal.faults.clear()
    assert read(lease, now=NOW + MINUTE) == "kept"
    assert len(modal.snapshots) <= 1  # taken once: the client's repetitions have one id


@slow
def test_small_workspaces_and_those_that_leave_files_out_are_not_taken(
    modal: ModalEmulator, grant: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = grant(ttl=24 * HOUR)
    monkeypatch.setattr(providers.get_provider("modal"), "min_directory_snapshot_bytes", 1 << 20)
    assert sleep(lease).vendor_snapshot == ""
    run(lease, "sh", "-c", "head -c 1048576 /dev/zero >large", now=NOW + MINUTE)
    assert sleep(lease, now=NOW + MINUTE).vendor_snapshot != ""
    write(lease, now=NOW + 2 * MINUTE)
    Sandbox.objects.filter(holder=lease.pk).update(excludes=["*.pyc"])
    assert sleep(lease, now=NOW + 2 * MINUTE).vendor_snapshot == ""


@slow
@pytest.mark.parametrize(("step", "taken"), [("persisted", 0), ("vendor snapshot taken", 1), ("process gone", 1)])
def test_crash_at_any_step_of_a_sleep_loses_no_file_and_leaves_at_most_what_the_vendor_expires(
    step: str, taken: int, account: Account, modal: ModalEmulator, grant: Callable[..., Lease], crash_at: CrashAt
) -> None:
    lease, later = grant(), NOW + HOUR
    write(lease)
    with crash_at(step):
        passes.evict_idle(now=NOW + 10 * MINUTE)
    assert len(modal.snapshots) == taken
    account.sweep(later)
    assert read(lease, now=later) == "kept"
    account.assert_converged()
    leasing.release(lease.pk, now=later)
    sweeps.prune(now=later)
    lifetimes = [snapshot.ttl_seconds for snapshot in modal.snapshots.values()]
    leaked = 1 if step == "vendor snapshot taken" else 0  # no row names it, so the vendor's time limit has to end it
    assert lifetimes == [vendor_snapshots.VENDOR_SNAPSHOT_TTL.total_seconds()] * leaked


@slow
def test_crash_after_the_restore_loses_no_file_and_the_next_wake_restores_again(
    account: Account, modal: ModalEmulator, grant: Callable[..., Lease], crash_at: CrashAt
) -> None:
    lease, later = grant(), NOW + HOUR
    sleep(lease)
    with crash_at("prepared"):
        read(lease, now=NOW + MINUTE)
    account.sweep(later)
    assert read(lease, now=later) == "kept"
    assert get_sandbox(lease).source == "vendor"
    account.assert_converged()


@slow
def test_eviction_that_lost_its_claim_records_nothing_and_deletes_what_it_took(
    modal: ModalEmulator, grant: Callable[..., Lease], at_checkpoint: Callable[..., None]
) -> None:
    lease = grant()
    sandbox = write(lease)

    def take_over() -> None:
        Sandbox.objects.filter(pk=sandbox.pk).update(claim=uuid4())

    at_checkpoint("vendor snapshot taken", take_over)
    assert passes.evict_idle(now=NOW + HOUR).counts.get("put to sleep", 0) == 0
    assert not modal.snapshots and not Snapshot.objects.exclude(vendor_snapshot="").exists()

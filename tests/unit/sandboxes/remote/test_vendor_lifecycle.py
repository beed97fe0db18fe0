"""Lifecycle at the vendors: intervals that a lease outlives are raised, and waiting sandboxes are stopped with stored state."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from billing import metering
from billing.models import UsageRecord
from leases import execution, leasing, sweeps
from leases.models import EnvironmentType, Lease
from leases.resources import Resources
from sandboxes.models import Pool, Sandbox
from sandboxes.providers import load_class
from sandboxes.runs.operations import Command
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW
from tests.emulators.registry import EMULATORS
from tests.emulators.vendor import CUT_AFTER, CUT_BEFORE, Fault, VendorEmulator
from tests.support.leases import evict, get_sandbox, update_pool
from tests.support.remote import GetEmulator

pytestmark = pytest.mark.django_db(transaction=True)
STOPPING = [name for name in EMULATORS if load_class(name).can_suspend]
SETTABLE = [name for name in EMULATORS if load_class(name).can_set_intervals]
SET_DELETION = {"daytona": "POST .*/autodelete/", "langsmith": "PATCH .*/boxes/"}
SET_LAST = {"daytona": "POST .*/autostop/", "langsmith": "PATCH .*/boxes/"}  # the last request of the two
DUE, LATER = NOW + MINUTE, NOW + 10 * MINUTE
DAY_MINUTES = 24 * 60
MoveTo = Callable[[str], VendorEmulator]


@pytest.fixture
def move_to(move_pool: Callable[[str], Pool], settings: Any, emulators: GetEmulator) -> MoveTo:
    """Move the test's pool to a vendor that stops idle sandboxes after an hour, and deletes stopped ones after two."""

    def move(kind: str) -> VendorEmulator:
        move_pool(kind)
        short = replace(settings.REMOTE_PROVIDERS[kind], auto_stop=60 * MINUTE, auto_delete=120 * MINUTE)
        settings.REMOTE_PROVIDERS = {**settings.REMOTE_PROVIDERS, kind: short}
        return emulators(kind)

    return move


def run(lease: Lease, *argv: str, now: Any = NOW) -> bytes:
    return bytes(execution.exec_command(lease.pk, Command(argv=list(argv), timeout=MINUTE), now=now)[0].stdout)


def read_minutes(emulator: VendorEmulator, ref: str) -> tuple[int, int]:
    """Return the auto-stop and the auto-delete of a sandbox that the vendor has, in minutes."""
    fields = emulator.get_creation(ref)
    if "autoStopInterval" in fields:
        return fields["autoStopInterval"], fields["autoDeleteInterval"]
    return fields["idle_ttl_seconds"] // 60, fields["delete_after_stop_seconds"] // 60


@pytest.mark.smoke
@pytest.mark.parametrize("kind", SETTABLE)
def test_auto_delete_reaches_beyond_the_lease_and_follows_its_end(kind: str, move_to: MoveTo, grant: Any) -> None:
    emulator, lease = move_to(kind), grant()
    run(lease, "true")
    ref = get_sandbox(lease).ref
    assert read_minutes(emulator, ref) == (60, 2 * DAY_MINUTES)
    leasing.renew(lease, now=NOW + 60 * MINUTE)
    assert sweeps.raise_intervals(now=NOW + 60 * MINUTE).counts == {}
    Lease.objects.update(max_expires_at=lease.max_expires_at + timedelta(days=1))
    for pattern, outcome in ((SET_DELETION[kind], CUT_BEFORE), (SET_LAST[kind], CUT_AFTER)):
        emulator.faults.append(Fault(pattern, outcome))
        assert len(sweeps.raise_intervals(now=LATER).failures) == 1  # the outcome is not known: nothing is recorded
    assert sweeps.raise_intervals(now=LATER).counts == {"intervals set": 1}
    assert read_minutes(emulator, ref) == (60, pytest.approx(3 * DAY_MINUTES, abs=1))
    assert sweeps.raise_intervals(now=LATER).counts == {}


@pytest.mark.parametrize("kind", SETTABLE)
def test_interval_of_the_lease_reaches_the_vendor_rounded_up(kind: str, move_to: MoveTo, grant: Any) -> None:
    emulator = move_to(kind)
    lease = grant(auto_stop=timedelta(seconds=90), auto_delete=timedelta(days=9, seconds=1))
    run(lease, "true")
    assert read_minutes(emulator, get_sandbox(lease).ref) == (2, 9 * DAY_MINUTES + 1)


@pytest.mark.parametrize("kind", STOPPING)
def test_waiting_sandbox_is_stopped_and_its_next_use_starts_it(kind: str, move_to: MoveTo, grant: Any) -> None:
    EnvironmentType.objects.update(suspend_after=timedelta(seconds=30))
    emulator, lease = move_to(kind), grant()
    run(lease, "sh", "-c", "echo w >/workspace/w; echo d >/data/d")
    sandbox = get_sandbox(lease)
    assert passes.suspend_waiting(now=DUE).counts == {"suspended": 1}
    [machine] = emulator.find_machines(sandbox.ref)
    sandbox.refresh_from_db()
    assert (sandbox.state, sandbox.persisted, machine.is_running) == ("suspended", True, False)
    assert sweeps.reconcile(now=DUE, grace=MINUTE).failures == []
    assert run(lease, "cat", "/workspace/w", "/data/d", now=LATER) == b"w\nd\n"
    sandbox.refresh_from_db()
    assert (sandbox.state, sandbox.frozen, sandbox.incarnation, machine.is_running) == ("waiting", False, 1, True)
    metering.meter_usage(now=LATER + MINUTE)
    [suspended] = UsageRecord.objects.filter(provider=kind, state="suspended")  # priced by the rate item `suspend`
    assert (suspended.ended_at - suspended.began_at) > 8 * MINUTE


@pytest.mark.parametrize("kind", STOPPING)
def test_stopped_sandbox_that_its_vendor_deletes_is_woken_from_its_stored_state(kind: str, move_to: MoveTo, grant: Any) -> None:
    EnvironmentType.objects.update(suspend_after=timedelta(seconds=30))
    emulator, lease = move_to(kind), grant()
    run(lease, "sh", "-c", "echo w >/workspace/w; echo d >/data/d")
    assert passes.suspend_waiting(now=DUE).counts == {"suspended": 1}
    emulator.delete_stopped(get_sandbox(lease).ref)
    with pytest.raises(execution.SandboxError, match="nothing unsaved was in it"):
        run(lease, "true", now=LATER)
    assert run(lease, "cat", "/workspace/w", "/data/d", now=LATER) == b"w\nd\n"


@pytest.mark.parametrize("step", ["suspension stored", "frozen"])
def test_crash_at_any_step_of_a_stop_loses_nothing(step: str, move_to: MoveTo, grant: Any, crash_at: Any) -> None:
    EnvironmentType.objects.update(suspend_after=timedelta(seconds=30))
    emulator, lease = move_to("daytona"), grant()
    run(lease, "sh", "-c", "echo w >/workspace/w")
    with crash_at(step):
        passes.suspend_waiting(now=DUE)
    assert sweeps.recover_stalled(now=LATER).counts["suspensions finished"] == 1
    [machine] = emulator.find_machines(get_sandbox(lease).ref)
    assert not machine.is_running
    assert run(lease, "cat", "/workspace/w", now=LATER) == b"w\n"


@pytest.mark.parametrize("kind", ["daytona", "runloop"])
def test_stop_whose_response_is_lost_is_repeated(kind: str, move_to: MoveTo, grant: Any) -> None:
    EnvironmentType.objects.update(suspend_after=timedelta(seconds=30))
    emulator, lease = move_to(kind), grant()
    run(lease, "sh", "-c", "echo w >/workspace/w")
    emulator.faults.append(Fault("POST .*/(stop|suspend)$", CUT_AFTER))
    assert len(passes.suspend_waiting(now=DUE).failures) == 1
    assert Sandbox.objects.get(holder=lease.pk).state == "waiting"
    assert passes.suspend_waiting(now=DUE + MINUTE).counts == {"suspended": 1}
    assert run(lease, "cat", "/workspace/w", now=LATER) == b"w\n"


GPU_FIELDS: dict[str, tuple[Resources, dict[str, Any]]] = {
    "daytona": (
        Resources(memory_mib=1500, image="python:3", disk_mib=5000, gpus=1, gpu_type="H100"),
        {"cpu": 1, "memory": 2, "disk": 5, "gpu": 1, "gpuType": ["H100"]},
    ),
    "modal": (
        Resources(memory_mib=1500, gpus=2, gpu_type="A10G"),
        {"resources": {
            "milli_cpu": 500, "milli_cpu_max": 500, "memory_mb": 1500, "memory_mb_max": 1500,
            "gpu_config": {"count": 2, "gpu_type": "A10G"},
        }},
    ),
}  # fmt: skip


@pytest.mark.parametrize("vendor", GPU_FIELDS)
def test_requested_resources_reach_the_vendor_at_each_start(
    vendor: str, move_to: MoveTo, pool: Pool, grant: Callable[..., Lease]
) -> None:
    resources, expected = GPU_FIELDS[vendor]
    emulator = move_to(vendor)
    update_pool(pool, max_memory_mib=2048, max_disk_mib=9999, max_gpus=2, allowed_images=["python:3"])
    lease = grant(resources=resources)
    names = set()
    for _ in range(2):
        run(lease, "true")
        sandbox = get_sandbox(lease)
        names.add(sandbox.ref)
        sent = emulator.get_creation(sandbox.ref)
        assert {name: sent.get(name) for name in expected} == expected
        evict(lease)
    assert len(names) == 2

"""Free space of the host: refusals below LEASEHOLD_MIN_FREE_DISK, with a reserve for the state of existing sandboxes.

The mark is set above the free space of the real disk."""

import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from leases import execution, one_shot, snapshots
from leases.api.files.base import build_command
from leases.models import Lease
from sandboxes.errors import EngineDiskFull
from sandboxes.models import Run, Sandbox, Snapshot
from sandboxes.state import disk_space
from sandboxes.state.spool import open_spool
from sandboxes.storage.base import DiskFull
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW
from tests.support.leases import evict, get_sandbox, read, run, update_pool, write

pytestmark = pytest.mark.django_db
HOUR = timedelta(hours=1)


@pytest.fixture
def lease(grant: Callable[..., Lease]) -> Lease:
    granted: Lease = grant(max_ttl=24 * HOUR)
    write(granted)
    return granted


def set_mark(settings, *, of_free_space: float) -> None:
    settings.MIN_FREE_DISK = int(shutil.disk_usage(Path("/tmp")).free * of_free_space)


@pytest.fixture
def low_disk(lease: Lease, settings) -> None:
    """Free space below the mark, and above the reserve."""
    set_mark(settings, of_free_space=2)


@pytest.fixture
def full_disk(lease: Lease, settings) -> None:
    """Free space below the reserve."""
    set_mark(settings, of_free_space=20)


@pytest.mark.usefixtures("low_disk")
def test_low_disk_starts_no_new_sandbox(lease: Lease, grant, pool) -> None:
    with pytest.raises(DiskFull, match="MiB are free"):
        run(grant(environment="another"))
    update_pool(pool, warm_target=2)
    assert passes.warm_pools(now=NOW).failures == []
    with pytest.raises(DiskFull):
        one_shot.run_once(one_shot.OneShotRequest("did:plc:ada", ["true"], MINUTE, pool=pool.name), now=NOW)
    pool.refresh_from_db()
    assert (Sandbox.objects.count(), pool.used) == (1, 1)


@pytest.mark.usefixtures("low_disk")
def test_low_disk_leaves_existing_sandboxes_usable_and_stored(lease: Lease) -> None:
    assert read(lease, now=NOW) == "kept"
    evict(lease, now=NOW + MINUTE)
    assert read(lease, now=NOW + 2 * MINUTE) == "kept"


@pytest.mark.usefixtures("low_disk")
def test_low_disk_refuses_spools_of_requests_only() -> None:
    open_spool().close()
    with pytest.raises(DiskFull):
        open_spool(for_request=True)


# --- disk of the engine ----------------------------------------------------------------------------------------------------


@pytest.fixture
def engine_disk(lease: Lease, memory, monkeypatch, tmp_path):
    """Set the free space of the engine's disk, in MiB. The other disks have enough."""
    free_mib = [1 << 20]
    memory.disk = tmp_path
    measure = disk_space._get_free_bytes
    monkeypatch.setattr(disk_space, "_get_free_bytes", lambda path: free_mib[0] << 20 if path == tmp_path else measure(path))

    def set_free(mib: int) -> None:
        free_mib[0] = mib

    return set_free


@pytest.fixture
def mark(settings) -> None:
    settings.MIN_FREE_DISK = 80 << 20


@pytest.mark.usefixtures("mark")
def test_low_engine_disk_starts_no_new_sandbox_and_wakes_cold_ones(lease: Lease, grant, pool, engine_disk) -> None:
    evict(lease, now=NOW)
    engine_disk(79)
    with pytest.raises(EngineDiskFull, match="79 MiB are free on the disk of the engine") as refused:
        run(grant(environment="another"))
    assert (refused.value.code, refused.value.retry_after, refused.value.provider) == ("disk_full", 60, "memory")
    update_pool(pool, warm_target=2)
    assert passes.warm_pools(now=NOW).failures == []
    assert Sandbox.objects.count() == 1
    assert read(lease, now=NOW + MINUTE) == "kept"
    engine_disk(80)
    run(grant(environment="another"))


@pytest.mark.usefixtures("mark")
def test_full_engine_disk_wakes_no_sandbox_and_writes_no_file(lease: Lease, engine_disk) -> None:
    engine_disk(9)
    command = build_command("write", "/workspace/f", root="/workspace")
    with pytest.raises(EngineDiskFull):
        execution.change_files(lease.pk, command, lambda provider, sandbox: pytest.fail("written"), now=NOW)
    assert read(lease, now=NOW) == "kept"
    evict(lease, now=NOW + MINUTE)
    with pytest.raises(EngineDiskFull):
        run(lease, now=NOW + 2 * MINUTE)
    assert get_sandbox(lease).state == "cold"
    engine_disk(10)
    assert read(lease, now=NOW + 3 * MINUTE) == "kept"


@pytest.mark.usefixtures("full_disk")
def test_full_disk_keeps_the_sandbox_until_its_state_can_be_stored(lease: Lease, settings) -> None:
    assert passes.evict_idle(now=NOW + HOUR).failures
    sandbox = get_sandbox(lease)
    assert sandbox.state == "waiting" and "MiB are free" in sandbox.last_error and not Snapshot.objects.exists()
    with pytest.raises(DiskFull):
        snapshots.take_snapshot(lease.pk, now=NOW + HOUR)
    assert Run.objects.latest("started_at").outcome == "failed"
    settings.MIN_FREE_DISK = 0
    assert passes.evict_idle(now=NOW + 3 * HOUR).counts == {"put to sleep": 1}


def test_stream_is_ended_when_the_disk_fills_meanwhile(settings) -> None:
    def fill() -> object:
        yield bytes(disk_space.CHECK_INTERVAL_BYTES - 1)
        set_mark(settings, of_free_space=20)
        yield b"x"

    with pytest.raises(DiskFull):
        list(disk_space.check_while_writing(fill()))

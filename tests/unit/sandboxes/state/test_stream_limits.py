"""Limits on bytes and time of tar streams out of a sandbox, and files left in the state directory."""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest

from leases import one_shot, snapshots
from leases.models import Lease
from sandboxes import files, installation_marks
from sandboxes.errors import WorkspaceFull
from sandboxes.lifecycle import WAITING
from sandboxes.models import Pool, Snapshot
from sandboxes.pool.allocation import SandboxRequest
from sandboxes.providers.base import DATA, WORKSPACE
from sandboxes.providers.errors import TooLarge, Unavailable
from sandboxes.providers.memory import MemoryProvider
from sandboxes.providers.streams import limit_stream
from sandboxes.runs.operations import Command
from sandboxes.state import pruning, workspace
from sandboxes.storage import get_store
from sandboxes.storage.base import StoreError
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW
from tests.support.leases import evict, get_sandbox, read, update_pool, write

pytestmark = pytest.mark.django_db
MIB = 1 << 20
CHUNK = bytes(MIB)
HOUR = timedelta(hours=1)
REASON = "workspace holds 40 MiB, the limit is 1 MiB"


@pytest.fixture
def lease(grant: Callable[..., Lease], pool: Pool) -> Lease:
    update_pool(pool, workspace_limit_mib=1)
    granted: Lease = grant(max_ttl=24 * HOUR)
    write(granted)
    return granted


def fill(memory: MemoryProvider, lease: Lease, mib: int = 40) -> None:
    memory.write_file(get_sandbox(lease).ref, f"{WORKSPACE}/big", bytes(mib * MIB))


def list_state_files(root: Path) -> list[str]:
    """List the files but the note of the last start."""
    files = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    return sorted(files - {installation_marks.CHANGE_NAME})


@pytest.mark.parametrize("excludes", [[], ["unrelated"]])
def test_eviction_of_a_too_large_workspace_keeps_the_sandbox_and_says_why(lease, memory, settings, excludes) -> None:
    fill(memory, lease)
    type(get_sandbox(lease)).objects.update(excludes=excludes)
    assert passes.evict_idle(now=NOW + HOUR).failures
    sandbox = get_sandbox(lease)
    assert (sandbox.state, sandbox.lost_at) == (WAITING, None) and REASON in sandbox.last_error
    assert not Snapshot.objects.exists() and list_state_files(settings.STATE_DIR) == []
    memory.remove_file(sandbox.ref, f"{WORKSPACE}/big")
    assert passes.evict_idle(now=NOW + HOUR + 2 * MINUTE).counts == {"put to sleep": 1}
    assert read(lease, now=NOW + HOUR + 3 * MINUTE) == "kept"


def test_workspace_slightly_above_its_limit_is_stored(lease, memory) -> None:
    fill(memory, lease, mib=3)
    evict(lease, now=NOW + MINUTE)
    assert Snapshot.objects.count() == 1


def test_requested_snapshot_of_a_too_large_workspace_is_refused(lease, memory, settings) -> None:
    fill(memory, lease)
    with pytest.raises(WorkspaceFull, match=REASON):
        snapshots.take_snapshot(lease.pk, now=NOW)
    assert not Snapshot.objects.exists() and list_state_files(settings.STATE_DIR) == []
    assert get_sandbox(lease).state == WAITING


@pytest.mark.parametrize("failure", [Unavailable("engine away"), StoreError("filesystem", "upload", "bucket away")])
def test_failed_snapshot_leaves_nothing_in_the_state_directory(lease, memory, settings, monkeypatch, failure) -> None:
    def fail(*args: object) -> None:
        raise failure

    def break_off(*args: object, **options: object) -> Iterator[bytes]:
        yield b"x" * MIB
        raise failure

    if isinstance(failure, StoreError):
        monkeypatch.setattr(get_store(), "upload", fail)
    else:
        monkeypatch.setattr(memory, "get_files", break_off)
    assert passes.evict_idle(now=NOW + HOUR).failures
    assert list_state_files(settings.STATE_DIR) == [] and not Snapshot.objects.exists()


def test_prune_removes_abandoned_temporary_files_of_local_copies(lease, settings) -> None:
    evict(lease, now=NOW + MINUTE)
    directory = workspace.local_directory(Snapshot.objects.get())
    abandoned, recent = directory / ".new-abandoned", directory / ".new-recent"
    for path, age in ((abandoned, 2 * HOUR), (recent, MINUTE)):
        path.write_bytes(b"partial")
        os.utime(path, ((NOW - age).timestamp(),) * 2)
    assert pruning.remove_orphans(now=NOW).counts["local leftovers"] == 1
    assert (abandoned.exists(), recent.exists(), (directory / "workspace").exists()) == (False, True, True)


def test_archive_of_a_too_large_directory_is_refused(lease, pool, memory, settings) -> None:
    fill(memory, lease)
    settings.DATA_MOST_BYTES = MIB
    memory.write_file(get_sandbox(lease).ref, "/data/big", bytes(40 * MIB))
    request = SandboxRequest(lease.pk, lease.agent_did, lease.environment_id, pool, MINUTE)
    for root in (WORKSPACE, DATA):
        command, out = Command(argv=["pack", root], timeout=MINUTE, kind="file", needs_data=False), io.BytesIO()
        with pytest.raises(TooLarge, match="33 MiB"):
            files.read_files(request, root, command, lambda tree, out=out: tree.pack("", out), now=NOW)
        assert len(out.getvalue()) < 34 * MIB


@pytest.mark.parametrize(("chunk_seconds", "ended_after"), [(50.0, 7), (4.0, 120), (0.9, None)])
def test_stream_below_the_minimum_rate_is_ended_and_closed_while_one_of_any_size_passes(
    chunk_seconds: float, ended_after: int | None
) -> None:
    """Chunks of 1 MiB. The consumer takes ten minutes for each, which does not count."""
    elapsed, closed, chunks = [0.0], [], 0

    def send() -> Iterator[bytes]:
        try:
            for _ in range(50_000):  # 50 GB
                elapsed.append(elapsed[-1] + chunk_seconds)
                yield CHUNK
        finally:
            closed.append(True)

    stream = limit_stream(send(), max_bytes=None, timeout=timedelta(minutes=6), clock=lambda: elapsed[-1])
    with pytest.raises(Unavailable, match="too slow") if ended_after else nullcontext():
        for _ in stream:
            elapsed.append(elapsed[-1] + 600)
            chunks += 1
    assert (chunks, closed) == (ended_after or 50_000, [True])


def test_returned_workspace_of_a_one_shot_run_is_limited_in_bytes(pool, memory) -> None:
    output = io.BytesIO()
    run = one_shot.OneShotRequest(
        "did:plc:ada", ["sh", "-c", "echo result >f"], MINUTE, pool=pool.name, output=output, max_returned_bytes=100
    )
    result = one_shot.run_once(run, now=NOW)
    assert "exceeds 100 bytes" in result.note and result.exit_code == 0 and output.getvalue() == b""

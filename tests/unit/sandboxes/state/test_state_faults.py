"""Store failures during exec, turn, sleep, wake and destroy.

The caller gets an error, unsaved changes stay in the sandbox, and a sweep stores them once the store works again. The store
raises StoreError: test_s3_faults.py shows that each fault of a server becomes one."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from pytest_django import Settings

from leases import leasing, snapshots, sweeps, turns
from leases.models import EnvironmentType, Lease, Turn
from sandboxes import providers
from sandboxes.errors import SandboxError, SandboxNotReady, StoreUnavailable
from sandboxes.models import Attachment, Pool, Run, Snapshot
from sandboxes.providers.base import DATA, WORKSPACE
from sandboxes.providers.memory import File
from sandboxes.state import pruning, workspace
from sandboxes.storage import get_store
from sandboxes.storage.base import StoreError
from sandboxes.storage.memory import MemoryStore
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW
from tests.support.servers.services import require_s3
from tests.support.storage.disks import small_disk
from tests.support.storage.state import LATER, assert_nothing_left, run_sh, sandbox_of, sh

pytestmark = pytest.mark.django_db


@dataclass
class FaultSwitch:
    """down("upload") makes this method of the store fail from now on, for `reason`; up() makes all methods work again."""

    down: Callable[[str], object]
    up: Callable[[], object]
    reason: str


def fault_fixture(*kinds: str) -> Any:
    @pytest.fixture(params=kinds)
    def fixture(
        request: pytest.FixtureRequest, settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> Iterator[FaultSwitch]:
        """A store that fails before or after it acts, or a full disk that has the store or the state directory."""
        if request.param in ("STORAGE_DIR", "STATE_DIR"):
            with small_disk(tmp_path / "full", "256k") as fill:
                setattr(settings, request.param, tmp_path / "full" / "directory")
                get_store.cache_clear()
                yield FaultSwitch(lambda method: fill(), (tmp_path / "full" / "filler").unlink, "No space left")
            return
        store, faults = MemoryStore(), ExitStack()
        monkeypatch.setattr("sandboxes.storage.FilesystemStore", lambda root: store)
        get_store.cache_clear()

        def fail(key: str) -> None:
            raise StoreError("memory", "any", "out of order", key=key)

        def down(method: str) -> None:
            faults.enter_context(getattr(store, request.param)(method, fail))

        yield FaultSwitch(down, faults.close, "out of order")

    return fixture


broken = fault_fixture("before", "after", "STORAGE_DIR", "STATE_DIR")
unread = fault_fixture("before", "after", "STATE_DIR")  # a full store can still be read


def test_exec_succeeds_and_its_changes_are_stored_later(one: Lease, two: Lease, broken: FaultSwitch) -> None:
    sh(one, "true")
    broken.down("upload")
    run, output = run_sh(one, f"echo hello >{DATA}/note; echo done")
    assert (output, run.outcome) == ("done", "ok")
    assert "is not stored yet" in run.note and broken.reason in run.note
    assert sandbox_of(one).state == "waiting" and Attachment.objects.get(sandbox__holder=one.pk).unsaved_since
    assert pruning.persist_unsaved(now=NOW + MINUTE).failures
    assert sh(one, f"cat {DATA}/note") == "hello"
    broken.up()
    assert pruning.persist_unsaved(now=NOW + 2 * MINUTE).counts == {"stored": 1}
    assert pruning.persist_unsaved(now=NOW + 3 * MINUTE).counts == {}
    assert sh(two, f"cat {DATA}/note") == "hello"
    assert_nothing_left()


def test_failure_during_an_earlier_scan_is_not_forgotten(one: Lease, two: Lease, broken: FaultSwitch, at_checkpoint) -> None:
    """The scan of a command has listed /data before the file of another was there, and is recorded after that one's failure."""
    sh(one, "true")
    notes = []

    def write_without_store() -> None:
        broken.down("upload")
        notes.append(run_sh(one, f"echo late >{DATA}/late")[0].note)
        broken.up()

    at_checkpoint("data stored", write_without_store)
    sh(one, f"echo early >{DATA}/early")
    assert "is not stored yet" in notes[0]
    assert (sh(two, f"cat {DATA}/early"), sh(two, f"cat {DATA}/late")) == ("early", "late")
    assert not Attachment.objects.filter(unsaved_since__isnull=False).exists()
    assert_nothing_left()


def test_exec_without_its_data_is_refused_and_runs_nothing(one: Lease, two: Lease, unread: FaultSwitch, memory) -> None:
    sh(one, f"echo hello >{DATA}/note")
    unread.down("download")
    with pytest.raises(StoreUnavailable, match="nothing was run") as refused:
        sh(two, "echo ran >/workspace/ran")
    assert unread.reason in str(refused.value)
    assert "/workspace/ran" not in memory.files(sandbox_of(two).ref)
    assert (sandbox_of(two).state, Run.objects.get(sandbox=sandbox_of(two)).outcome) == ("waiting", "failed")
    unread.up()
    assert sh(two, f"cat {DATA}/note") == "hello"
    assert_nothing_left()


def test_failed_pull_does_not_overwrite_changes_of_the_sandbox(one: Lease, two: Lease, unread: FaultSwitch, memory) -> None:
    sh(one, f"echo old >{DATA}/note")
    sh(two, "true")
    sh(one, f"echo new >{DATA}/note")
    unread.down("download")
    with pytest.raises(StoreUnavailable):
        sh(two, "true")
    memory.files(sandbox_of(two).ref)[f"{DATA}/note"] = File(b"two\n")  # programs keep running while the store fails
    unread.up()
    assert sh(two, f"cat {DATA}/note") == sh(one, f"cat {DATA}/note") == "two"
    assert sh(one, f"cat {DATA}/.conflicts/{one.pk}/note") == "new"


def test_turn_without_its_data_is_refused_and_its_number_stays_free(one: Lease, two: Lease, unread: FaultSwitch) -> None:
    EnvironmentType.objects.filter(name="catan").update(turn_argv=["echo", '{"action": "roll"}'])
    sh(one, f"echo hello >{DATA}/note")
    unread.down("download")
    with pytest.raises(StoreUnavailable):
        turns.take_turn(two.pk, 1, {}, now=NOW)
    assert not Turn.objects.exists()
    unread.up()
    turn = turns.take_turn(two.pk, 1, {}, now=NOW + MINUTE)
    assert (turn.action, turn.skipped) == ({"action": "roll"}, False)


def test_turn_with_unsaved_changes_is_recorded(one: Lease, two: Lease, broken: FaultSwitch) -> None:
    sh(one, "true")
    argv = ["sh", "-c", f"""echo hello >{DATA}/note; echo '{{"action": "roll"}}'"""]
    EnvironmentType.objects.filter(name="catan").update(turn_argv=argv)
    broken.down("upload")
    turn = turns.take_turn(one.pk, 1, {}, now=NOW)
    assert turn.action == {"action": "roll"} and turn.run and "is not stored yet" in turn.run.note
    broken.up()
    assert pruning.persist_unsaved(now=NOW + MINUTE).counts == {"stored": 1}
    assert sh(two, f"cat {DATA}/note") == "hello"


@pytest.mark.parametrize("place", [WORKSPACE, DATA])
def test_sandbox_that_cannot_be_stored_is_evicted_later(one: Lease, broken: FaultSwitch, memory, place: str) -> None:
    sh(one, "true")
    broken.down("upload")
    sh(one, f"echo hello >{place}/note; head -c 50000 /dev/zero >{place}/large")  # a spool of this size is a file
    assert passes.evict_idle(now=NOW + 10 * MINUTE).failures
    assert sandbox_of(one).state == "waiting" and "could not be stored" in sandbox_of(one).last_error
    assert memory.files(sandbox_of(one).ref)[f"{place}/note"].content == b"hello\n"
    assert not Snapshot.objects.exists()
    broken.up()
    assert passes.evict_idle(now=NOW + 20 * MINUTE).counts == {"put to sleep": 1}
    assert memory.list(str(sandbox_of(one).pool.owner)) == []
    assert sh(one, f"cat {place}/note", now=NOW + 21 * MINUTE) == "hello"
    assert_nothing_left()


def test_wake_fails_while_the_store_fails_and_succeeds_later(one: Lease, unread: FaultSwitch) -> None:
    sh(one, "echo hello >note; head -c 50000 /dev/zero >large")
    passes.evict_idle(now=NOW + 10 * MINUTE)
    snapshot = workspace.find_latest(one.pk)
    assert snapshot
    workspace.forget_local(snapshot)
    unread.down("download")
    with pytest.raises(SandboxNotReady, match=unread.reason):
        sh(one, "cat note", now=NOW + 11 * MINUTE)
    passes.destroy_due(now=NOW + 12 * MINUTE)
    assert workspace.find_latest(one.pk) == snapshot
    unread.up()
    assert sh(one, "cat note", now=NOW + 13 * MINUTE) == "hello"
    assert sandbox_of(one).source == "cloud"
    assert_nothing_left()


def test_wake_succeeds_although_a_sweep_removes_the_local_copy_during_the_download(
    one: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    sh(one, "echo hello >note")
    passes.evict_idle(now=NOW + 10 * MINUTE)
    snapshot, store = workspace.find_latest(one.pk), get_store()
    assert snapshot
    workspace.forget_local(snapshot)
    download = store.download

    def download_and_remove(*args: Any, **options: Any) -> bool:
        monkeypatch.undo()
        exists = download(*args, **options)
        workspace.forget_local(snapshot)
        return exists

    monkeypatch.setattr(store, "download", download_and_remove)
    assert sh(one, "cat note", now=NOW + 11 * MINUTE) == "hello"
    assert_nothing_left()


def test_sandbox_is_not_destroyed_before_its_data_is_stored(one: Lease, two: Lease, broken: FaultSwitch, memory) -> None:
    sh(one, "true")
    broken.down("upload")
    sh(one, f"echo hello >{DATA}/note")
    leasing.release(one.pk, now=NOW + MINUTE)
    assert sweeps.reclaim(now=NOW + 2 * MINUTE).failures
    assert sandbox_of(one).state == "destroying" and broken.reason in sandbox_of(one).last_error
    assert memory.files(sandbox_of(one).ref)
    broken.up()
    assert sweeps.reclaim(now=LATER).counts == {"destroyed": 1, "leases closed": 1}
    assert sh(two, f"cat {DATA}/note", now=LATER) == "hello"
    assert_nothing_left()


def test_snapshot_that_cannot_be_stored_fails_and_can_be_retried(one: Lease, broken: FaultSwitch) -> None:
    sh(one, "echo hello >note")
    broken.down("upload")
    with pytest.raises(SandboxError):
        snapshots.take_snapshot(one.pk, name="before", now=NOW)
    assert not Snapshot.objects.exists() and sandbox_of(one).state == "waiting"
    broken.up()
    snapshot = snapshots.take_snapshot(one.pk, name="before", now=NOW + MINUTE)
    assert get_store().has(f"{snapshot.key}/workspace")
    assert_nothing_left()


# --- real S3 server --------------------------------------------------------------------------------------------------------


def test_state_round_trip_on_a_real_s3_server(settings: Settings) -> None:
    settings.STORAGE_BACKEND, settings.STORAGE_PREFIX = "s3", f"t-{uuid4().hex}/"
    settings.S3_ENDPOINT, settings.S3_BUCKET, settings.S3_ACCESS_KEY_ID, settings.S3_SECRET_ACCESS_KEY = require_s3()
    get_store.cache_clear()
    pool = Pool.objects.create(name=f"faults-{uuid4().hex[:12]}", provider="process", capacity=10)

    def lease(environment: str) -> Lease:
        request = leasing.LeaseRequest("did:plc:ada", environment, "coding", pool=pool.name)
        return leasing.acquire(request, now=NOW)[0]

    try:
        one, two = lease("game-1"), lease("game-2")
        digest = sh(one, "head -c 20000000 /dev/urandom >large; echo 'spoken of' >'od\u00e9 n\u00e4me'; sha256sum <large")
        sh(one, 'cp large "$0"', f"{DATA}/large")  # the process provider maps paths that are arguments
        assert passes.evict_idle(now=NOW + 10 * MINUTE).counts == {"put to sleep": 1}
        snapshot = workspace.find_latest(one.pk)
        assert snapshot and get_store().has(f"{snapshot.key}/workspace")
        workspace.forget_local(snapshot)
        assert sh(one, "sha256sum <large", now=NOW + 11 * MINUTE) == digest
        assert sh(one, "cat 'od\u00e9 n\u00e4me'", now=NOW + 11 * MINUTE) == "spoken of"
        assert sandbox_of(one).source == "cloud"
        assert sh(two, 'sha256sum <"$0"', f"{DATA}/large", now=NOW + 11 * MINUTE) == digest
        assert_nothing_left()
    finally:
        get_store().clear()
        get_store.cache_clear()
        for sandbox in providers.get_provider("process").list(str(pool.owner)):
            providers.get_provider("process").destroy(sandbox.ref)

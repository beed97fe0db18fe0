"""The prune sweep at every step of an upload that takes hours, is given up, or dies."""

import io
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.conf import LazySettings, settings
from django.db import connection

from leases.models import Lease
from sandboxes import claims, eviction
from sandboxes.models import AgentData, DataEvent, DataObject, ObjectUpload, Snapshot
from sandboxes.state import pruning, uploads
from sandboxes.storage.base import StoreError
from sandboxes.stores import lease_stores
from tests.conftest import MINUTE, NOW
from tests.support.leases import evict, read, run, write
from tests.support.storage.slow_work import SlowStore, VirtualTime
from tests.support.storage.state import assert_nothing_left

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("guarded UPDATEs and deletions of claims")]
HOUR = timedelta(hours=1)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    return VirtualTime(monkeypatch)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> SlowStore:
    """Store of this test, which is fast until its `pace` is set."""
    store = SlowStore()
    monkeypatch.setattr("sandboxes.storage.FilesystemStore", lambda root: store)
    return store


def prune(now: datetime) -> None:
    assert pruning.remove_orphans(now=now).failures == []


def list_local_copies() -> list[str]:
    return sorted(path.name for path in (settings.STATE_DIR / "snapshots").glob("*/*/*"))


def test_a_workspace_stored_for_hours_survives_a_prune_before_each_piece_and_before_its_row(
    grant: Callable[..., Lease], store: SlowStore, time: VirtualTime, at_checkpoint: Callable[..., None]
) -> None:
    lease = grant(ttl=24 * HOUR)
    sandbox = write(lease, "large")

    def advance() -> None:
        time.advance()
        prune(time.now)

    store.pace = advance
    at_checkpoint("keys claimed", lambda: prune(time.now + 2 * MINUTE))
    at_checkpoint("objects stored", lambda: prune(time.now))
    assert eviction.evict(sandbox.pk, now=NOW)
    assert time.elapsed > HOUR
    store.pace = lambda: None
    [snapshot] = Snapshot.objects.all()
    assert store.has(f"{snapshot.key}/workspace") and list_local_copies() == ["workspace"]
    assert not ObjectUpload.objects.exists()
    assert read(lease, now=time.now) == "large"


def test_data_in_several_objects_survives_a_prune_between_the_first_object_and_the_rows(
    grant: Callable[..., Lease], store: SlowStore, time: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "max_value_bytes", 50 << 10)

    def advance() -> None:
        time.advance(timedelta(minutes=2))
        prune(time.now)

    store.pace = advance
    # One after the other: the virtual time is that of one thread.
    monkeypatch.setattr("sandboxes.state.changes.run_parallel", lambda act, jobs: [act(job) for job in jobs])
    lease = grant(ttl=24 * HOUR, environment_type="run")
    script = "; ".join(f"echo {letter * 16_000} >/data/{letter}" for letter in "abc")
    result = run(lease, "sh", "-c", script)
    assert (result.exit_code, result.stderr) == (0, b"")
    assert time.elapsed > HOUR
    store.pace = lambda: None
    keys = [*DataObject.objects.values_list("key", flat=True)]
    assert len(keys) == 3 and all(store.has(key) for key in keys)
    assert not DataEvent.objects.exists() and not ObjectUpload.objects.exists()


def test_an_upload_whose_claim_ended_between_the_last_byte_and_the_row_records_nothing_and_is_repeated(
    grant: Callable[..., Lease], store: SlowStore, time: VirtualTime, at_checkpoint: Callable[..., None]
) -> None:
    lease = grant(ttl=24 * HOUR)
    sandbox = write(lease)
    at_checkpoint("objects stored", lambda: prune(NOW + 2 * HOUR))
    assert not eviction.evict(sandbox.pk, now=NOW)
    sandbox.refresh_from_db()
    assert "made no progress" in sandbox.last_error and not Snapshot.objects.exists()
    assert [*store.list("snapshots/")] == []
    evict(lease, now=NOW + MINUTE)
    assert read(lease, now=NOW + 2 * MINUTE) == "kept"
    assert_nothing_left()


@pytest.mark.parametrize("mode", ["standard", "journaled"])
def test_an_artifact_stored_for_hours_survives_a_prune_before_each_piece_and_before_its_index_entry(
    grant: Callable[..., Lease], store: SlowStore, time: VirtualTime, settings: LazySettings, mode: str
) -> None:
    settings.STORAGE_MODE = mode
    lease = grant(ttl=24 * HOUR)
    stores, claims = lease_stores.open_stores(lease.agent_did, lease.pk), uploads.ContentUploads(lambda: time.now)

    def prune_artifacts() -> None:
        prune(time.now)
        assert stores.prune(claims=claims, now=time.now).failures == []

    def advance() -> None:
        time.advance()
        prune_artifacts()

    store.pace = advance
    with store.after("upload", lambda key: prune_artifacts()):
        stores.artifacts.put("report", io.BytesIO(b"x" * 20_000), claims=claims, now=NOW)
    assert time.elapsed > HOUR and not ObjectUpload.objects.exists()
    store.pace = lambda: None
    target = io.BytesIO()
    assert stores.artifacts.fetch("report", target) and target.getvalue() == b"x" * 20_000


def test_an_artifact_whose_claim_ended_meanwhile_is_refused_and_can_be_put_again(
    grant: Callable[..., Lease], store: SlowStore, time: VirtualTime
) -> None:
    lease = grant(ttl=24 * HOUR)
    stores, claims = lease_stores.open_stores(lease.agent_did, lease.pk), uploads.ContentUploads(lambda: time.now)

    def give_up(key: str) -> None:
        later = NOW + 2 * HOUR
        prune(later)
        assert stores.prune(claims=claims, now=later).count == 1

    with store.after("upload", give_up), pytest.raises(StoreError, match="made no progress"):
        stores.artifacts.put("report", io.BytesIO(b"x"), claims=claims, now=NOW)
    assert stores.artifacts.read("report") is None and not ObjectUpload.objects.exists()
    stores.artifacts.put("report", io.BytesIO(b"y"), claims=claims, now=NOW + MINUTE)
    target = io.BytesIO()
    assert stores.artifacts.fetch("report", target) and target.getvalue() == b"y"


def build_key() -> str:
    return f"agents/did:plc:x/{NOW:%Y%m%dT%H%M%SZ}-{uuid.uuid4().hex}.tar"


def test_a_row_committed_between_the_two_lookups_of_the_prune_is_seen(store: SlowStore) -> None:
    data, key = AgentData.objects.create(agent_did="did:plc:x", created_at=NOW, changed_at=NOW), build_key()
    store.set(key, b"tar")
    row = DataObject(data=data, key=key, size_bytes=3, at=NOW)
    pending = [lambda: uploads.insert_objects([row])]

    def commit_after_first(execute: Callable[..., Any], *arguments: Any) -> Any:
        result = execute(*arguments)
        if pending:
            pending.pop()()
        return result

    with uploads.claim_keys([key], clock=lambda: NOW), connection.execute_wrapper(commit_after_first):
        assert [*pruning.find_orphans(pruning.DATA_OBJECTS, NOW + 2 * HOUR)] == []
    assert [*DataObject.objects.all()] == [row]
    assert [*pruning.find_orphans(pruning.DATA_OBJECTS, NOW + 2 * HOUR)] == []


def test_the_object_of_a_crashed_upload_is_kept_until_its_claim_ends(
    grant: Callable[..., Lease], store: SlowStore, crash_at: Callable[[str], AbstractContextManager[None]]
) -> None:
    sandbox = write(grant(ttl=24 * HOUR))
    with crash_at("objects stored"):
        eviction.evict(sandbox.pk, now=NOW)
    [claim] = ObjectUpload.objects.all()
    assert timedelta(0) <= claim.deadline_at - NOW - claims.CLAIM_TTL < MINUTE
    for now, is_kept in ((claim.deadline_at, True), (claim.deadline_at + timedelta(seconds=1), False)):
        assert pruning.remove_orphans(now=now, grace=timedelta(0)).failures == []
        assert ([*store.list("snapshots/")] == [claim.key], bool(list_local_copies())) == (is_kept, is_kept)


def test_the_object_of_a_worker_that_lost_its_sandbox_to_another_is_removed_later(
    grant: Callable[..., Lease], store: SlowStore, time: VirtualTime
) -> None:
    """Another worker stores the state under another key while the first one is silent."""
    lease = grant(ttl=24 * HOUR)
    sandbox = write(lease)
    hangs = iter([2 * claims.CLAIM_TTL])
    store.pace = lambda: time.advance(next(hangs, timedelta(0)))
    assert not eviction.evict(sandbox.pk, now=NOW)
    store.pace = lambda: None
    assert Snapshot.objects.count() == 1 and not ObjectUpload.objects.exists()
    assert_nothing_left()
    assert read(lease, now=time.now) == "kept"


def test_orphans_are_removed_page_by_page(db: None, store: SlowStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "KEY_BATCH_SIZE", 2)
    keys = sorted(build_key() for _ in range(5))
    for key in keys:
        store.set(key, b"")
    pages = iter([[keys[0], keys[1]], [keys[2], keys[3]], StoreError("memory", "page", "away")])

    def list_pages(prefix: str = "") -> Iterator[str]:
        for page in pages if prefix == "agents/" else ():
            if isinstance(page, StoreError):
                raise page
            yield from page

    monkeypatch.setattr(store, "list", list_pages)
    result = pruning.remove_orphans(now=NOW + 2 * HOUR)
    assert len(result.failures) == 1 and {*store.values} == {keys[4]}

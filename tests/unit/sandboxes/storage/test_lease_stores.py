"""Chat history, artifacts, audit log and session index of a lease, in both modes on two backends."""

import io
import itertools
import os
from collections.abc import Callable, Collection
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes import storage
from sandboxes.storage import filesystem
from sandboxes.storage.base import KeyValueStore, StoreError, StoreRefused
from sandboxes.storage.filesystem import FilesystemStore
from sandboxes.storage.memory import MemoryStore
from sandboxes.stores import lease_stores
from sandboxes.stores.artifacts import Artifact
from sandboxes.stores.events import EventStore
from sandboxes.stores.lease_stores import PRUNE_MIN_KEYS, LeaseStores
from sandboxes.stores.limits import ORPHAN_GRACE_PERIOD, PruneResult, RetentionBounds, StoreLimits, parse_stamped_key
from tests.conftest import NOW, SimulatedCrash, die, run_in_threads
from tests.support.storage.stores import CLAIMS, MemoryClaims

pytestmark = pytest.mark.usefixtures("no_fsync")
DID, LEASE = "did:plc:ada", UUID(int=7)
SECOND, HOUR = timedelta(seconds=1), timedelta(hours=1)
SMALL_LIMITS = StoreLimits(
    max_event_bytes=100, max_events=5, max_artifact_bytes=1000, max_artifacts=3, max_session_bytes=100, max_sessions=2
)  # fmt: skip
MODES = ("standard", "journaled")


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def open_again(store: KeyValueStore, mode: str) -> Callable[..., LeaseStores]:
    """Open the stores of a lease as another process would."""

    def make(lease: UUID = LEASE, **options: Any) -> LeaseStores:
        return LeaseStores(store, DID, lease, journaled=mode == "journaled", **options)

    return make


@pytest.fixture
def stores(open_again: Callable[..., LeaseStores]) -> LeaseStores:
    return open_again(limits=SMALL_LIMITS)


# --- events -------------------------------------------------------------------------------------------------------


@pytest.fixture
def events(stores: LeaseStores) -> EventStore:
    return stores.chat  # the audit log is another instance


def append_events(events: EventStore, count: int, *, at: datetime = NOW) -> list[str]:
    """Append events one second apart. Return their ids."""
    return [events.append({"n": n}, now=at + n * SECOND).id for n in range(count)]


def numbers(events: EventStore, **options: Any) -> list[int]:
    return [event.document["n"] for event in events.page(**options)[0]]


def test_event_is_stored_unchanged_and_separately(stores: LeaseStores, open_again, now: datetime) -> None:
    document = {"role": "user", "content": ["ä", None, 1.5, {"a": [True, "\0"]}], "more": {}}
    event = stores.chat.append(document, now=now, actor="key abc")
    assert (event.document, event.at, event.actor) == (document, now, "key abc")
    assert open_again().chat.read(event.id) == event
    assert open_again().chat.page() == ([event], False)
    assert (stores.audit.page(), stores.audit.read(event.id)) == (([], False), None)


def test_leases_are_separate(stores: LeaseStores, open_again, now: datetime) -> None:
    stores.chat.append({"n": 1}, now=now)
    stores.artifacts.put("a", io.BytesIO(b"1"), claims=CLAIMS, now=now)
    stores.sessions.put("s", {}, now=now)
    other = open_again(UUID(int=8))
    assert [other.chat.page(), other.artifacts.page(), other.sessions.page()] == [([], False)] * 3


@pytest.mark.parametrize("newest_first", [True, False])
def test_pages_cover_all_events_in_order(events: EventStore, newest_first: bool) -> None:
    append_events(events, 4)
    for limit in (1, 2, 3, 4, 100):
        numbers_seen: list[int] = []
        last, more = None, True
        while more:
            page, more = events.page(after=last, newest_first=newest_first, limit=limit)
            assert 1 <= len(page) <= limit
            numbers_seen += [event.document["n"] for event in page]
            last = page[-1].stamp
        assert numbers_seen == ([3, 2, 1, 0] if newest_first else [0, 1, 2, 3])


def test_later_events_come_after_the_last_event_seen(events: EventStore) -> None:
    append_events(events, 2)
    last = events.page(newest_first=False)[0][-1].stamp
    assert events.page(after=last, newest_first=False) == ([], False)
    for n in range(20):  # the same time
        events.append({"n": n}, now=NOW + HOUR)
    assert numbers(events, after=last, newest_first=False, limit=20) == [*range(20)]


def test_malformed_id_finds_no_event(events: EventStore) -> None:
    append_events(events, 1)
    for event_id in ("", "x", "../secret", "\ud800", "a-b-c", "1" * 600, "0" * 18 + "-" + "0" * 16 + "-1"):
        assert events.read(event_id) is None


def test_oversized_event_is_refused(events: EventStore, now: datetime) -> None:
    events.append({"n": "x" * (100 - len('{"n":""}'))}, now=now)
    with pytest.raises(StoreRefused, match="this event has 101 bytes; the limit is 100"):
        events.append({"n": "x" * (101 - len('{"n":""}'))}, now=now)
    assert len(events.page()[0]) == 1


def test_prune_by_age_count_and_size_removes_the_oldest(events: EventStore) -> None:
    append_events(events, 6)
    size = len(b'{"actor":"","said":{"n":0}}')
    assert events.prune(RetentionBounds()) == PruneResult()
    assert events.prune(RetentionBounds(since=NOW + 2 * SECOND)) == PruneResult(2, 2 * size)
    assert events.prune(RetentionBounds(max_count=3)) == PruneResult(1, size)
    assert events.prune(RetentionBounds(max_total_bytes=3 * size)) == PruneResult()
    assert events.prune(RetentionBounds(max_total_bytes=3 * size - 1)) == PruneResult(1, size)
    assert numbers(events) == [5, 4]
    assert events.prune(RetentionBounds(max_count=0)) == PruneResult(2, 2 * size)
    assert events.page() == ([], False)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50))),
    st.none() | st.integers(0, 50), st.none() | st.integers(0, 20), st.none() | st.integers(0, 500),
)  # fmt: skip
def test_surplus_is_minimal(
    present: list[tuple[int, int]], since: int | None, max_count: int | None, max_total_bytes: int | None
) -> None:
    ordered = sorted((NOW + at * SECOND, size) for at, size in present)
    bounds = RetentionBounds(None if since is None else NOW + since * SECOND, max_count, max_total_bytes)

    def within(rest: list[tuple[datetime, int]]) -> bool:
        return (
            (bounds.since is None or all(at >= bounds.since for at, _ in rest))
            and (max_count is None or len(rest) <= max_count)
            and (max_total_bytes is None or sum(size for _, size in rest) <= max_total_bytes)
        )

    surplus = bounds.count_surplus(ordered)
    assert within(ordered[surplus:])
    assert not any(within(ordered[fewer:]) for fewer in range(surplus))


def test_standard_mode_writes_no_event_or_artifact_key_twice(now: datetime) -> None:
    store = MemoryStore()
    stores = LeaseStores(store, DID, LEASE, journaled=False)
    for n in range(5):
        stores.chat.append({"n": n}, now=now)
        stores.artifacts.put("same", io.BytesIO(b"%d" % n), claims=CLAIMS, now=now)
    written = [key for method, key in store.calls if method in ("set", "upload")]
    assert len(written) == len({*written}) == 15


def test_journaled_history_uses_one_file_per_process(tmp_path: Path) -> None:
    store = FilesystemStore(tmp_path)
    append_events(LeaseStores(store, DID, LEASE, journaled=True).chat, 5)
    assert store.size() == 1


def test_prune_compacts_a_journal_of_many_segments() -> None:
    store = MemoryStore()
    chat = LeaseStores(store, DID, LEASE, journaled=True).chat
    append_events(chat, 40)
    assert chat.prune(RetentionBounds(max_count=1000)) == PruneResult()
    assert numbers(chat, newest_first=False) == [*range(40)]
    assert len([key for key in store.list() if "/open/" not in key]) == 1


# --- artifacts ----------------------------------------------------------------------------------------------------


def put(stores: LeaseStores, name: str, content: bytes = b"content", **options: Any) -> Artifact:
    return stores.artifacts.put(name, io.BytesIO(content), **{"now": NOW, "claims": CLAIMS, **options})[0]


def content(stores: LeaseStores, name: str) -> bytes | None:
    target = io.BytesIO()
    return target.read() if stores.artifacts.fetch(name, target) else None


def content_keys(store: KeyValueStore) -> list[str]:
    return [key for key in store.list() if "/content/" in key]


def test_artifact_is_stored_unchanged(stores: LeaseStores, open_again, now: datetime) -> None:
    source = io.BytesIO(b"skipped" + bytes(range(256)))
    source.seek(7)
    stored, replaced = stores.artifacts.put("map.png", source, claims=CLAIMS, now=now, media_type="image/png", actor="key abc")
    assert not replaced
    fields = (stored.name, stored.media_type, stored.size, stored.at, stored.actor)
    assert fields == ("map.png", "image/png", 256, now, "key abc")
    assert stored.sha256 == "40aff2e9d2d8922e47afd4648e6967497158785fbd1da870e7110266bf944880"
    assert open_again().artifacts.read("map.png") == stored
    assert content(open_again(), "map.png") == bytes(range(256))


def test_artifact_and_content_are_replaced(stores: LeaseStores, store: KeyValueStore, now: datetime) -> None:
    put(stores, "a", b"")
    assert content(stores, "a") == b""
    assert stores.artifacts.put("a", io.BytesIO(b"newer"), claims=CLAIMS, now=now)[1]
    assert content(stores, "a") == b"newer"
    assert [artifact.size for artifact in stores.artifacts.page()[0]] == [5]
    assert [parse_stamped_key(key)[1] for key in content_keys(store)] == [5]


def test_artifact_is_removed_with_its_content(stores: LeaseStores, store: KeyValueStore, now: datetime) -> None:
    put(stores, "a")
    put(stores, "b", b"stays")
    assert stores.artifacts.remove("a", now=now)
    assert not stores.artifacts.remove("a", now=now)
    assert (stores.artifacts.read("a"), content(stores, "a"), content(stores, "b")) == (None, None, b"stays")
    assert len(content_keys(store)) == 1
    put(stores, "a", b"back")
    assert content(stores, "a") == b"back"


def test_artifacts_are_listed_by_name(stores: LeaseStores) -> None:
    for name in ("b", "a-1", "a", "a.", "B", "a:1"):
        put(stores, name)
    names: list[str] = []
    more = True
    while more:
        page, more = stores.artifacts.page(after=names[-1] if names else "", limit=4)
        names += [artifact.name for artifact in page]
    assert names == ["B", "a", "a-1", "a.", "a:1", "b"]


def test_invalid_artifact_name_is_refused_and_finds_nothing(stores: LeaseStores, store: KeyValueStore, now: datetime) -> None:
    put(stores, "a")
    keys = [*store.list()]
    for name in ("", "/", "a/b", "..", ".hidden", "-", "a b", "ä", "a\0", "a\n", "\ud800", "x" * 129):
        with pytest.raises(StoreRefused, match="an artifact's name has"):
            put(stores, name)
        assert stores.artifacts.read(name) is None
        assert not stores.artifacts.remove(name, now=now)
    assert [*store.list()] == keys


def test_longest_names_fit_into_a_key(store: KeyValueStore, mode: str, now: datetime) -> None:
    stores = LeaseStores(store, "did:plc:" + "a" * 247, LEASE, journaled=mode == "journaled")
    put(stores, "x" * 128)
    stores.sessions.put("x" * 128, {}, now=now)
    append_events(stores.chat, 1)
    assert content(stores, "x" * 128) == b"content"


def test_media_type_is_validated(stores: LeaseStores) -> None:
    for kind in ("text/plain", "text/plain; charset=utf-8", 'a/b;c="d e"', "application/vnd.x+json"):
        assert put(stores, "a", media_type=kind).media_type == kind
    for kind in ("", "text", "text/", "/plain", "text/plain\r\nX: y", "text/plain;", "ä/b", "a/b" + "c" * 200):
        with pytest.raises(StoreRefused, match="is not a media type"):
            put(stores, "a", media_type=kind)


def test_oversized_artifact_is_refused(stores: LeaseStores) -> None:
    put(stores, "a", b"x" * 1000)
    with pytest.raises(StoreRefused, match="this artifact has 1001 bytes; the limit is 1000"):
        put(stores, "a", b"x" * 1001)
    assert content(stores, "a") == b"x" * 1000


def test_corrupt_or_missing_content_raises_store_error(stores: LeaseStores, store: KeyValueStore) -> None:
    put(stores, "a")
    [key] = content_keys(store)
    store.set(key, b"CONTENT")
    with pytest.raises(StoreError, match="does not match its digest"):
        content(stores, "a")
    store.remove(key)
    with pytest.raises(StoreError, match="the content is missing"):
        content(stores, "a")


def test_prune_removes_the_oldest_artifacts(stores: LeaseStores, store: KeyValueStore, now: datetime) -> None:
    for n in range(5):
        put(stores, f"a{n}", b"x" * 10, now=now + n * SECOND)
    put(stores, "a0", b"y" * 10, now=now + 9 * SECOND)  # now the newest version
    assert stores.artifacts.prune(RetentionBounds(), claims=CLAIMS, now=now) == PruneResult()
    bounds = RetentionBounds(max_count=4, max_total_bytes=30)
    assert stores.artifacts.prune(bounds, claims=CLAIMS, now=now) == PruneResult(2, 20)
    assert [artifact.name for artifact in stores.artifacts.page()[0]] == ["a0", "a3", "a4"]
    assert len(content_keys(store)) == 3
    assert stores.artifacts.prune(RetentionBounds(since=now + 4 * SECOND), claims=CLAIMS, now=now) == PruneResult(1, 10)


@pytest.fixture
def hooked(memory_store: MemoryStore, mode: str) -> LeaseStores:
    """Stores of a lease in a store with hooks."""
    return LeaseStores(memory_store, DID, LEASE, journaled=mode == "journaled")


@pytest.mark.parametrize("method", ["upload", "set", "remove"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_put_crash_at_any_step_leaves_old_or_new_content(
    hooked: LeaseStores, memory_store: MemoryStore, method: str, when: str, now: datetime
) -> None:
    """The artifact has the old or the new content; unreferenced content is removed later."""
    put(hooked, "a", b"old")
    with getattr(memory_store, when)(method, die), pytest.raises(SimulatedCrash):
        put(hooked, "a", b"new", now=now + SECOND)
    assert content(hooked, "a") in (b"old", b"new")
    hooked.artifacts.prune(RetentionBounds(), claims=CLAIMS, now=now + SECOND)
    assert content(hooked, "a") in (b"old", b"new")
    hooked.artifacts.prune(RetentionBounds(), claims=CLAIMS, now=now + ORPHAN_GRACE_PERIOD + 2 * SECOND)
    assert [memory_store.values[key] for key in content_keys(memory_store)] == [content(hooked, "a")]


def test_content_uploaded_before_its_index_entry_is_not_pruned(hooked: LeaseStores, memory_store, now: datetime) -> None:
    with memory_store.after("upload", lambda key: hooked.artifacts.prune(RetentionBounds(max_count=0), claims=CLAIMS, now=now)):
        put(hooked, "a")
    assert content(hooked, "a") == b"content"


def prune_late(stores: LeaseStores, claims: MemoryClaims = CLAIMS) -> None:
    stores.artifacts.prune(RetentionBounds(), claims=claims, now=NOW + 2 * ORPHAN_GRACE_PERIOD)


def test_content_whose_upload_took_longer_than_the_grace_period_is_not_pruned(hooked: LeaseStores, memory_store) -> None:
    with memory_store.after("upload", lambda key: prune_late(hooked)):
        put(hooked, "a")
    assert content(hooked, "a") == b"content"


def test_an_entry_written_between_the_claims_and_the_index_is_seen(hooked: LeaseStores, memory_store, mode: str) -> None:
    class EndedClaims(MemoryClaims):
        def find(self, keys: Collection[str]) -> set[str]:
            [other.artifacts.index.put(entry) for entry in waiting]
            return super().find(keys)

    waiting: list[Artifact] = []
    other = LeaseStores(memory_store, DID, LEASE, journaled=mode == "journaled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooked.artifacts.index, "put", waiting.append)
        put(hooked, "a")
    assert hooked.artifacts.read("a") is None and len(waiting) == 1
    prune_late(hooked, EndedClaims())
    assert content(hooked, "a") == b"content"


def test_an_upload_whose_claim_was_lost_is_not_in_the_index(hooked: LeaseStores, memory_store) -> None:
    put(hooked, "a", b"old")

    def give_up(key: str) -> None:
        CLAIMS.keys.clear()
        prune_late(hooked)

    with memory_store.after("upload", give_up), pytest.raises(StoreError, match="lost"):
        put(hooked, "a", b"new", now=NOW + SECOND)
    assert content(hooked, "a") == b"old"
    put(hooked, "a", b"newer", now=NOW + 2 * SECOND)
    assert content(hooked, "a") == b"newer" and len(content_keys(memory_store)) == 1


def test_reads_contain_an_artifact_replaced_meanwhile(hooked: LeaseStores, memory_store: MemoryStore, now: datetime) -> None:
    put(hooked, "a", b"old")
    put(hooked, "b")
    versions = iter([b"new", b"newer"])

    def replace(key: str) -> None:
        hook.close()
        put(hooked, "a", next(versions), now=now + SECOND)

    hook = memory_store.before("download", replace)
    assert content(hooked, "a") == b"new"
    hook = memory_store.before("get", replace)
    assert [artifact.name for artifact in hooked.artifacts.page()[0]] == ["a", "b"]


def test_fetch_retries_if_the_listing_shows_no_version(tmp_path: Path, now: datetime, monkeypatch) -> None:
    stores = LeaseStores(FilesystemStore(tmp_path), DID, LEASE, journaled=False)
    put(stores, "a", b"old")
    scanned, once = filesystem._scan_directory, iter([1])

    def replaced_meanwhile(directory: Path) -> list[os.DirEntry[str]]:
        """Simulate a scan that sees neither a name added before its position nor one removed after it."""
        found = scanned(directory)
        if directory.name == "a":
            for _ in once:
                put(stores, "a", b"new", now=now + SECOND)
        return [entry for entry in found if os.path.exists(entry.path)]

    monkeypatch.setattr(filesystem, "_scan_directory", replaced_meanwhile)
    assert content(stores, "a") == b"new"


def test_compacted_artifact_journal_keeps_removals(now: datetime) -> None:
    store = MemoryStore()
    stores = LeaseStores(store, DID, LEASE, journaled=True)
    for n in range(30):
        put(stores, f"a{n % 10}", b"%d" % n, now=now + n * SECOND)
    stores.artifacts.remove("a3", now=now + HOUR)
    for later in (timedelta(0), 2 * HOUR, 4 * HOUR):
        stores.artifacts.prune(RetentionBounds(), claims=CLAIMS, now=now + later)
        for n in range(20):  # enough for another compaction
            put(stores, "b", b"%d" % n, now=now + HOUR + n * SECOND)
        names = {artifact.name: content(stores, artifact.name) for artifact in stores.artifacts.page()[0]}
        assert names == {f"a{n % 10}": b"%d" % n for n in range(20, 30) if n != 23} | {"b": b"19"}


def test_threads_replace_one_artifact_concurrently(open_again, now: datetime) -> None:
    def act(index: int) -> None:
        for n in range(5):
            put(open_again(), "a", b"%d-%d" % (index, n), now=now + n * SECOND)
            assert (content(open_again(), "a") or b"").partition(b"-")[1] == b"-"

    with run_in_threads(3) as run:
        assert run(act) == [None] * 3
    assert (content(open_again(), "a") or b"").endswith(b"-4")


# --- sessions -----------------------------------------------------------------------------------------------------


def test_session_has_the_last_document(stores: LeaseStores, open_again, now: datetime) -> None:
    stores.sessions.put("s1", {"title": "first"}, now=now)
    last = stores.sessions.put("s1", {"title": "ä", "turns": 3}, now=now + SECOND, actor="key abc")
    assert (last.document, last.at, last.actor) == ({"title": "ä", "turns": 3}, now + SECOND, "key abc")
    assert open_again().sessions.read("s1") == last
    assert open_again().sessions.page() == ([last], False)
    assert open_again().sessions.read("s2") is None


def test_sessions_are_listed_by_id(stores: LeaseStores, now: datetime) -> None:
    for name in ("b", "a", "c"):
        stores.sessions.put(name, {}, now=now)
    pages = [stores.sessions.page(limit=2), stores.sessions.page(after="b", limit=2)]
    assert [([session.id for session in page], more) for page, more in pages] == [(["a", "b"], True), (["c"], False)]


def test_invalid_session_is_refused(stores: LeaseStores, now: datetime) -> None:
    for name in ("", "a/b", "..", "a b", "\0", "\ud800", "x" * 129):
        with pytest.raises(StoreRefused, match="a session's id has"):
            stores.sessions.put(name, {}, now=now)
        assert stores.sessions.read(name) is None
    with pytest.raises(StoreRefused, match="this session has 108 bytes; the limit is 100"):
        stores.sessions.put("s", {"n": "x" * 100}, now=now)


def test_prune_removes_the_least_recently_written_sessions(stores: LeaseStores, now: datetime) -> None:
    for n, name in enumerate("abc"):
        stores.sessions.put(name, {}, now=now + n * SECOND)
    stores.sessions.put("a", {}, now=now + 9 * SECOND)
    assert stores.sessions.prune(RetentionBounds(max_count=2)) == PruneResult(1, 2)
    assert [session.id for session in stores.sessions.page()[0]] == ["a", "c"]


# --- pruning ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def configured_store(store: KeyValueStore, mode: str, settings, monkeypatch: pytest.MonkeyPatch) -> KeyValueStore:
    """Configure this store and mode for open_stores and prune_stores."""
    settings.STORAGE_MODE = mode
    monkeypatch.setattr(storage, "get_store", lambda: store)
    return store


def fill(lease: UUID, did: str = DID) -> None:
    stores = lease_stores.open_stores(did, lease)
    append_events(stores.chat, 2)
    append_events(stores.audit, 1)
    put(stores, "a")
    stores.sessions.put("s", {}, now=NOW)


def test_prune_removes_only_the_stores_of_ended_leases(configured_store: KeyValueStore, mode: str, now: datetime) -> None:
    leases = [uuid4() for _ in range(3)]
    for lease in leases:
        fill(lease)
    keys = [*configured_store.list()]
    assert any("/chat/journal/" in key for key in keys) == (mode == "journaled")
    ended_keys = [key for key in keys if key.startswith(f"stores/{DID}/{leases[0].hex}/")]
    assert 0 < len(ended_keys) == len([key for key in keys if leases[0].hex in key])
    for key in ("stores", "stores/x/y/z", "agents/did:plc:ada/x"):
        configured_store.set(key, b"no key of a lease")
    before = [*configured_store.list()]
    assert lease_stores.prune_stores(now=now, claims=CLAIMS, find_ended=lambda _: {leases[0]}).count == len(ended_keys)
    assert [*configured_store.list()] == [key for key in before if key not in ended_keys]
    assert lease_stores.prune_stores(now=now, claims=CLAIMS, find_ended=lambda _: {leases[0]}) == PruneResult()


def test_find_ended_is_called_in_batches(memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch, now: datetime) -> None:
    monkeypatch.setattr(storage, "get_store", lambda: memory_store)
    for n in range(250):
        memory_store.set(f"stores/did:plc:a{n % 7}/{UUID(int=n).hex}/sessions/s", b"{}")
    batch_sizes: list[int] = []

    def find_ended(leases: Any) -> Any:
        batch_sizes.append(len(leases))
        return leases

    assert lease_stores.prune_stores(now=now, claims=CLAIMS, find_ended=find_ended).count == 250
    assert batch_sizes == [100, 100, 50]
    assert memory_store.is_empty()


def test_prune_enforces_the_limits_of_live_leases(configured_store: KeyValueStore, now: datetime) -> None:
    stores = LeaseStores(configured_store, DID, LEASE, journaled=False, limits=SMALL_LIMITS)
    for n in range(PRUNE_MIN_KEYS):
        stores.sessions.put(f"s{n}", {}, now=now + n * SECOND)
    assert lease_stores.prune_stores(now=now, claims=CLAIMS, find_ended=lambda _: []) == PruneResult()  # few and small: skipped
    assert stores.prune(claims=CLAIMS, now=now).count == PRUNE_MIN_KEYS - 2
    append_events(lease_stores.open_stores(DID, LEASE).chat, PRUNE_MIN_KEYS)
    put(lease_stores.open_stores(DID, LEASE), "large", b"x" * (1 << 20))
    assert lease_stores.prune_stores(now=now, claims=CLAIMS, find_ended=lambda _: []) == PruneResult()  # in its limits
    assert len(lease_stores.open_stores(DID, LEASE).chat.page(limit=100)[0]) == PRUNE_MIN_KEYS


def test_failing_lease_does_not_stop_the_prune(monkeypatch: pytest.MonkeyPatch, now: datetime) -> None:
    store = MemoryStore()
    monkeypatch.setattr(storage, "get_store", lambda: store)
    leases = [UUID(int=n) for n in (1, 2)]
    for lease in leases:
        fill(lease)
    store.fail("remove", StoreError("memory", "remove", "away"), times=1)
    pruned = lease_stores.prune_stores(now=now, claims=CLAIMS, find_ended=lambda leases: leases)
    assert pruned.failures == [f"{leases[0]}: memory: remove: away"]
    assert not [key for key in store.list() if leases[1].hex in key]
    assert lease_stores.prune_stores(now=now, claims=CLAIMS, find_ended=lambda leases: leases).failures == []
    assert store.is_empty()


def test_sizes_in_keys_match_the_values(store: KeyValueStore, mode: str, open_again) -> None:
    """Stores that list no sizes rely on the size in the key."""
    stores = open_again()
    append_events(stores.chat, 3)
    put(stores, "a", b"12345")
    sized = [entry for entry in store.entries() if "/content/" in entry.key or "/events/" in entry.key]
    assert sized
    assert all(parse_stamped_key(entry.key)[1] == entry.size for entry in sized)


def test_append_during_prune_loses_nothing(open_again, now: datetime) -> None:
    counter = itertools.count()

    def act(index: int) -> int:
        chat, pruned = open_again().chat, 0
        for _ in range(30):
            if index == 0:
                pruned += chat.prune(RetentionBounds(max_count=10)).count
            else:
                chat.append({"n": next(counter)}, now=now)
        return pruned

    with run_in_threads(3) as run:
        pruned = sum(run(act)[:1])
    events, _ = open_again().chat.page(limit=100)
    assert len({event.document["n"] for event in events}) == len(events) == 60 - pruned

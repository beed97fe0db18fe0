"""Chat history, artifacts, audit log and session index of a lease, in both modes, on two backends."""

import io
import itertools
import os
from collections.abc import Callable, Iterator
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
from tests.conftest import NOW, SimulatedCrash, run_in_threads

DID, LEASE = "did:plc:ada", UUID(int=7)
SECOND, HOUR = timedelta(seconds=1), timedelta(hours=1)
SMALL = StoreLimits(
    max_event_bytes=100, max_events=5, max_artifact_bytes=1000, max_artifacts=3, max_session_bytes=100, max_sessions=2
)  # fmt: skip
MODES = ("standard", "journaled")


@pytest.fixture(params=["filesystem", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> KeyValueStore:
    return MemoryStore() if request.param == "memory" else FilesystemStore(tmp_path / "store")


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def again(store: KeyValueStore, mode: str) -> Callable[..., LeaseStores]:
    """The stores of the lease, as another process sees them."""

    def make(lease: UUID = LEASE, **options: Any) -> LeaseStores:
        return LeaseStores(store, DID, lease, journaled=mode == "journaled", **options)

    return make


@pytest.fixture
def of(again: Callable[..., LeaseStores]) -> LeaseStores:
    return again(limits=SMALL)


# --- events -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["chat", "audit"])
def events(request: pytest.FixtureRequest, of: LeaseStores) -> EventStore:
    found: EventStore = getattr(of, request.param)
    return found


def say(events: EventStore, count: int, *, at: datetime = NOW) -> list[str]:
    """So many events, a second apart; their ids."""
    return [events.append({"n": n}, now=at + n * SECOND).id for n in range(count)]


def numbers(events: EventStore, **options: Any) -> list[int]:
    return [event.document["n"] for event in events.page(**options)[0]]


def test_an_event_is_kept_as_it_was_said(of: LeaseStores, again, now: datetime) -> None:
    said = {"role": "user", "content": ["ä", None, 1.5, {"a": [True, "\0"]}], "more": {}}
    event = of.chat.append(said, now=now, actor="key abc")
    assert (event.document, event.at, event.actor) == (said, now, "key abc")
    assert again().chat.read(event.id) == event
    assert again().chat.page() == ([event], False)


def test_chat_and_audit_are_apart(of: LeaseStores, now: datetime) -> None:
    event = of.chat.append({"n": 1}, now=now)
    assert of.audit.page() == ([], False)
    assert of.audit.read(event.id) is None


def test_leases_are_apart(of: LeaseStores, again, now: datetime) -> None:
    of.chat.append({"n": 1}, now=now)
    of.artifacts.put("a", io.BytesIO(b"1"), now=now)
    of.sessions.put("s", {}, now=now)
    other = again(UUID(int=8))
    assert [other.chat.page(), other.artifacts.page(), other.sessions.page()] == [([], False)] * 3


@pytest.mark.parametrize("newest_first", [True, False])
@pytest.mark.parametrize("limit", [1, 2, 3, 4, 100])
def test_pages_follow_each_other(events: EventStore, newest_first: bool, limit: int) -> None:
    say(events, 4)
    seen: list[int] = []
    behind, more = None, True
    while more:
        page, more = events.page(after=behind, newest_first=newest_first, limit=limit)
        assert 1 <= len(page) <= limit
        seen += [event.document["n"] for event in page]
        behind = page[-1].stamp
    assert seen == ([3, 2, 1, 0] if newest_first else [0, 1, 2, 3])


def test_what_comes_later_is_behind_the_last_event_one_saw(events: EventStore) -> None:
    say(events, 2)
    last = events.page(newest_first=False)[0][-1].stamp
    assert events.page(after=last, newest_first=False) == ([], False)
    say(events, 1, at=NOW + HOUR)
    assert numbers(events, after=last, newest_first=False) == [0]


def test_events_of_one_moment_stay_in_order(events: EventStore, now: datetime) -> None:
    for n in range(20):
        events.append({"n": n}, now=now)
    assert numbers(events, newest_first=False, limit=20) == [*range(20)]


@pytest.mark.parametrize("event_id", ["", "x", "../secret", "\ud800", "a-b-c", "1" * 600, "0" * 18 + "-" + "0" * 16 + "-1"])
def test_what_is_no_id_finds_no_event(events: EventStore, event_id: str) -> None:
    say(events, 1)
    assert events.read(event_id) is None


def test_an_event_that_is_too_large_is_refused(events: EventStore, now: datetime) -> None:
    events.append({"n": "x" * (100 - len('{"n":""}'))}, now=now)
    with pytest.raises(StoreRefused, match="this event has 101 bytes; the limit is 100"):
        events.append({"n": "x" * (101 - len('{"n":""}'))}, now=now)
    assert len(events.page()[0]) == 1


def test_pruning_by_age_count_and_size_takes_the_oldest(events: EventStore) -> None:
    say(events, 6)
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
def test_just_so_many_go_that_the_rest_is_within_bounds(
    present: list[tuple[int, int]], since: int | None, most: int | None, max_total_bytes: int | None
) -> None:
    ordered = sorted((NOW + at * SECOND, size) for at, size in present)
    bounds = RetentionBounds(None if since is None else NOW + since * SECOND, most, max_total_bytes)

    def within(rest: list[tuple[datetime, int]]) -> bool:
        return (
            (bounds.since is None or all(at >= bounds.since for at, _ in rest))
            and (most is None or len(rest) <= most)
            and (max_total_bytes is None or sum(size for _, size in rest) <= max_total_bytes)
        )

    gone = bounds.surplus(ordered)
    assert within(ordered[gone:])
    assert not any(within(ordered[fewer:]) for fewer in range(gone))


def test_threads_say_things_at_once(again, now: datetime) -> None:
    with run_in_threads(4) as run:
        run(lambda index: [again().chat.append({"n": index}, now=now) for _ in range(10)])
    found, more = again().chat.page(limit=100)
    assert (sorted(event.document["n"] for event in found), more) == (sorted([*range(4)] * 10), False)


def test_no_key_of_events_and_artifacts_is_written_twice_in_standard_mode(now: datetime) -> None:
    store = MemoryStore()
    of = LeaseStores(store, DID, LEASE, journaled=False)
    for n in range(5):
        of.chat.append({"n": n}, now=now)
        of.artifacts.put("same", io.BytesIO(b"%d" % n), now=now)
    written = [key for method, key in store.calls if method in ("set", "upload")]
    assert len(written) == len({*written}) == 15


def test_a_journaled_history_takes_one_file_a_process(tmp_path: Path, now: datetime) -> None:
    store = FilesystemStore(tmp_path)
    say(LeaseStores(store, DID, LEASE, journaled=True).chat, 5)
    assert store.size() == 1


def test_pruning_a_journal_of_many_pieces_merges_them(now: datetime) -> None:
    store = MemoryStore()
    chat = LeaseStores(store, DID, LEASE, journaled=True).chat
    say(chat, 40)
    assert chat.prune(RetentionBounds(max_count=1000)) == PruneResult()
    assert numbers(chat, newest_first=False) == [*range(40)]
    assert len([key for key in store.list() if "/open/" not in key]) == 1


# --- artifacts ----------------------------------------------------------------------------------------------------


def put(of: LeaseStores, name: str, content: bytes = b"content", **options: Any) -> Artifact:
    return of.artifacts.put(name, io.BytesIO(content), **{"now": NOW, **options})[0]


def content(of: LeaseStores, name: str) -> bytes | None:
    target = io.BytesIO()
    return target.read() if of.artifacts.fetch(name, target) else None


def test_an_artifact_is_kept_as_it_was(of: LeaseStores, again, now: datetime) -> None:
    source = io.BytesIO(b"skipped" + bytes(range(256)))
    source.seek(7)
    stored, replaced = of.artifacts.put("map.png", source, now=now, media_type="image/png", actor="key abc")
    assert not replaced
    assert (stored.name, stored.media_type, stored.size, stored.at, stored.actor) == (
        "map.png",
        "image/png",
        256,
        now,
        "key abc",
    )
    assert stored.sha256 == "40aff2e9d2d8922e47afd4648e6967497158785fbd1da870e7110266bf944880"
    assert again().artifacts.read("map.png") == stored
    assert content(again(), "map.png") == bytes(range(256))


def test_an_empty_artifact_is_one(of: LeaseStores) -> None:
    put(of, "empty", b"")
    assert content(of, "empty") == b""


def test_a_new_artifact_replaces_the_old_one_and_its_content(of: LeaseStores, store: KeyValueStore, now: datetime) -> None:
    put(of, "a", b"old")
    assert of.artifacts.put("a", io.BytesIO(b"newer"), now=now)[1]
    assert content(of, "a") == b"newer"
    assert [artifact.size for artifact in of.artifacts.page()[0]] == [5]
    assert [parse_stamped_key(key)[1] for key in store.list() if "/content/" in key] == [5]


def test_an_artifact_that_was_removed_is_gone_with_its_content(of: LeaseStores, store: KeyValueStore, now: datetime) -> None:
    put(of, "a")
    put(of, "b", b"stays")
    assert of.artifacts.remove("a", now=now)
    assert not of.artifacts.remove("a", now=now)
    assert (of.artifacts.read("a"), content(of, "a"), content(of, "b")) == (None, None, b"stays")
    assert len([key for key in store.list() if "/content/" in key]) == 1
    put(of, "a", b"back")
    assert content(of, "a") == b"back"


def test_artifacts_are_listed_by_name(of: LeaseStores) -> None:
    for name in ("b", "a-1", "a", "a.", "B", "a:1"):
        put(of, name)
    seen: list[str] = []
    more = True
    while more:
        page, more = of.artifacts.page(after=seen[-1] if seen else "", limit=4)
        seen += [artifact.name for artifact in page]
    assert seen == ["B", "a", "a-1", "a.", "a:1", "b"]


@pytest.mark.parametrize("name", ["", "/", "a/b", "..", ".hidden", "-", "a b", "ä", "a\0", "a\n", "\ud800", "x" * 129])
def test_a_wrong_name_is_refused_and_finds_nothing(of: LeaseStores, store: KeyValueStore, now: datetime, name: str) -> None:
    put(of, "a")
    keys = [*store.list()]
    with pytest.raises(StoreRefused, match="an artifact's name has"):
        put(of, name)
    assert of.artifacts.read(name) is None
    assert not of.artifacts.remove(name, now=now)
    assert [*store.list()] == keys


def test_the_longest_names_fit_into_a_key(store: KeyValueStore, mode: str, now: datetime) -> None:
    of = LeaseStores(store, "did:plc:" + "a" * 247, LEASE, journaled=mode == "journaled")
    put(of, "x" * 128)
    of.sessions.put("x" * 128, {}, now=now)
    say(of.chat, 1)
    assert content(of, "x" * 128) == b"content"


@pytest.mark.parametrize("kind", ["text/plain", "text/plain; charset=utf-8", 'a/b;c="d e"', "application/vnd.x+json"])
def test_media_types(of: LeaseStores, kind: str) -> None:
    assert put(of, "a", media_type=kind).media_type == kind


@pytest.mark.parametrize("kind", ["", "text", "text/", "/plain", "text/plain\r\nX: y", "text/plain;", "ä/b", "a/b" + "c" * 200])
def test_what_is_no_media_type_is_refused(of: LeaseStores, kind: str) -> None:
    with pytest.raises(StoreRefused, match="is not a media type"):
        put(of, "a", media_type=kind)


def test_an_artifact_that_is_too_large_is_refused(of: LeaseStores) -> None:
    put(of, "a", b"x" * 1000)
    with pytest.raises(StoreRefused, match="this artifact has 1001 bytes; the limit is 1000"):
        put(of, "a", b"x" * 1001)
    assert content(of, "a") == b"x" * 1000


def test_content_that_is_not_what_was_stored_is_an_error(of: LeaseStores, store: KeyValueStore) -> None:
    put(of, "a")
    (key,) = (key for key in store.list() if "/content/" in key)
    store.set(key, b"CONTENT")
    with pytest.raises(StoreError, match="does not match its digest"):
        content(of, "a")


def test_pruning_artifacts_takes_the_oldest(of: LeaseStores, store: KeyValueStore, now: datetime) -> None:
    for n in range(5):
        put(of, f"a{n}", b"x" * 10, now=now + n * SECOND)
    put(of, "a0", b"y" * 10, now=now + 9 * SECOND)  # now the newest
    assert of.artifacts.prune(RetentionBounds(), now=now) == PruneResult()
    assert of.artifacts.prune(RetentionBounds(max_count=4, max_total_bytes=30), now=now) == PruneResult(2, 20)
    assert [artifact.name for artifact in of.artifacts.page()[0]] == ["a0", "a3", "a4"]
    assert len([key for key in store.list() if "/content/" in key]) == 3
    assert of.artifacts.prune(RetentionBounds(since=now + 4 * SECOND), now=now) == PruneResult(1, 10)


@pytest.mark.parametrize("journaled", [False, True], ids=MODES)
@pytest.mark.parametrize("method", ["upload", "set", "remove"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_put_may_die_at_each_step(journaled: bool, method: str, when: str, now: datetime) -> None:
    """The name has the old content or the new one; what nobody names is removed later."""
    store = MemoryStore()
    of = LeaseStores(store, DID, LEASE, journaled=journaled)
    put(of, "a", b"old")

    def die(key: str) -> None:
        raise SimulatedCrash()

    with getattr(store, when)(method, die), pytest.raises(SimulatedCrash):
        put(of, "a", b"new", now=now + SECOND)
    assert content(of, "a") in (b"old", b"new")
    of.artifacts.prune(RetentionBounds(), now=now + SECOND)
    assert content(of, "a") in (b"old", b"new")
    of.artifacts.prune(RetentionBounds(), now=now + ORPHAN_GRACE_PERIOD + 2 * SECOND)
    assert [store.values[key] for key in store.list() if "/content/" in key] == [content(of, "a")]


def test_content_that_is_about_to_get_its_name_is_left_alone(mode: str, now: datetime) -> None:
    store = MemoryStore()
    of = LeaseStores(store, DID, LEASE, journaled=mode == "journaled")
    with store.after("upload", lambda key: of.artifacts.prune(RetentionBounds(max_count=0), now=now) and None):
        put(of, "a")
    assert content(of, "a") == b"content"


def test_an_artifact_that_is_replaced_while_it_is_read_is_read_anew(mode: str, now: datetime) -> None:
    store = MemoryStore()
    of = LeaseStores(store, DID, LEASE, journaled=mode == "journaled")
    put(of, "a", b"old")
    once: Iterator[int] = iter([1])
    with store.before("download", lambda key: [put(of, "a", b"new", now=now + SECOND) for _ in once] and None):
        assert content(of, "a") == b"new"


def test_an_artifact_that_is_replaced_while_its_directory_is_read_is_there(tmp_path: Path, now: datetime, monkeypatch) -> None:
    of = LeaseStores(FilesystemStore(tmp_path), DID, LEASE, journaled=False)
    put(of, "a", b"old")
    scanned, once = filesystem._scan_directory, iter([1])

    def replaced_meanwhile(directory: Path) -> list[os.DirEntry[str]]:
        """What comes in front of where the reader is it does not see, nor what goes behind that."""
        found = scanned(directory)
        if directory.name == "a":
            for _ in once:
                put(of, "a", b"new", now=now + SECOND)
        return [entry for entry in found if os.path.exists(entry.path)]

    monkeypatch.setattr(filesystem, "_scan_directory", replaced_meanwhile)
    assert content(of, "a") == b"new"


def test_an_artifact_that_is_replaced_while_all_are_listed_is_listed(mode: str, now: datetime) -> None:
    store = MemoryStore()
    of = LeaseStores(store, DID, LEASE, journaled=mode == "journaled")
    put(of, "a", b"old"), put(of, "b")
    once: Iterator[int] = iter([1])
    with store.before("get", lambda key: [put(of, "a", b"newer", now=now + SECOND) for _ in once] and None):
        listed = of.artifacts.page()[0]
    assert [artifact.name for artifact in listed] == ["a", "b"]


def test_content_that_is_lost_is_an_error(of: LeaseStores, store: KeyValueStore) -> None:
    put(of, "a")
    store.remove_many([key for key in store.list() if "/content/" in key])
    with pytest.raises(StoreError, match="the content is missing"):
        content(of, "a")


def test_many_artifacts_in_a_journal_are_merged_and_what_went_stays_gone(now: datetime) -> None:
    store = MemoryStore()
    of = LeaseStores(store, DID, LEASE, journaled=True)
    for n in range(30):
        put(of, f"a{n % 10}", b"%d" % n, now=now + n * SECOND)
    of.artifacts.remove("a3", now=now + HOUR)
    for later in (timedelta(0), 2 * HOUR, 4 * HOUR):
        of.artifacts.prune(RetentionBounds(), now=now + later)
        for n in range(20):  # enough to be worth another compaction
            put(of, "b", b"%d" % n, now=now + HOUR + n * SECOND)
        names = {artifact.name: content(of, artifact.name) for artifact in of.artifacts.page()[0]}
        assert names == {f"a{n % 10}": b"%d" % n for n in range(20, 30) if n != 23} | {"b": b"19"}


def test_threads_replace_one_artifact(again, now: datetime) -> None:
    def act(index: int) -> None:
        for n in range(5):
            put(again(), "a", b"%d-%d" % (index, n), now=now + n * SECOND)
            assert (content(again(), "a") or b"").partition(b"-")[1] == b"-"

    with run_in_threads(3) as run:
        assert run(act) == [None] * 3
    assert (content(again(), "a") or b"").endswith(b"-4")


# --- sessions -----------------------------------------------------------------------------------------------------


def test_a_session_is_the_last_document_that_was_put(of: LeaseStores, again, now: datetime) -> None:
    of.sessions.put("s1", {"title": "first"}, now=now)
    last = of.sessions.put("s1", {"title": "ä", "turns": 3}, now=now + SECOND, actor="key abc")
    assert (last.document, last.at, last.actor) == ({"title": "ä", "turns": 3}, now + SECOND, "key abc")
    assert again().sessions.read("s1") == last
    assert again().sessions.page() == ([last], False)
    assert again().sessions.read("s2") is None


def test_sessions_are_listed_by_id(of: LeaseStores, now: datetime) -> None:
    for name in ("b", "a", "c"):
        of.sessions.put(name, {}, now=now)
    first, more = of.sessions.page(limit=2)
    assert ([session.id for session in first], more) == (["a", "b"], True)
    rest, more = of.sessions.page(after="b", limit=2)
    assert ([session.id for session in rest], more) == (["c"], False)


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "\0", "\ud800", "x" * 129])
def test_a_wrong_session_id_is_refused_and_finds_nothing(of: LeaseStores, now: datetime, name: str) -> None:
    with pytest.raises(StoreRefused, match="a session's id has"):
        of.sessions.put(name, {}, now=now)
    assert of.sessions.read(name) is None


def test_a_session_that_is_too_large_is_refused(of: LeaseStores, now: datetime) -> None:
    with pytest.raises(StoreRefused, match="this session has 108 bytes; the limit is 100"):
        of.sessions.put("s", {"n": "x" * 100}, now=now)


def test_pruning_sessions_takes_those_not_touched_for_longest(of: LeaseStores, now: datetime) -> None:
    for n, name in enumerate("abc"):
        of.sessions.put(name, {}, now=now + n * SECOND)
    of.sessions.put("a", {}, now=now + 9 * SECOND)
    assert of.sessions.prune(RetentionBounds(max_count=2)) == PruneResult(1, 2)
    assert [session.id for session in of.sessions.page()[0]] == ["a", "c"]


# --- pruning all of it --------------------------------------------------------------------------------------------


@pytest.fixture
def everywhere(store: KeyValueStore, mode: str, settings, monkeypatch: pytest.MonkeyPatch) -> KeyValueStore:
    """`stores.of` and `stores.prune` work on this store, in this mode."""
    settings.STORAGE_MODE = mode
    monkeypatch.setattr(storage, "get_store", lambda: store)
    return store


def fill(lease: UUID, did: str = DID) -> None:
    of = lease_stores.open_stores(did, lease)
    say(of.chat, 2)
    say(of.audit, 1)
    put(of, "a")
    of.sessions.put("s", {}, now=NOW)


def test_the_stores_of_a_lease_are_where_the_settings_say(everywhere: KeyValueStore, mode: str) -> None:
    fill(LEASE)
    keys = [*everywhere.list()]
    assert keys
    assert all(key.startswith(f"stores/{DID}/{LEASE.hex}/") for key in keys)
    assert any("/chat/journal/" in key for key in keys) == (mode == "journaled")


def test_nothing_is_left_of_leases_that_are_over_and_all_of_the_others(everywhere: KeyValueStore, now: datetime) -> None:
    leases = [uuid4() for _ in range(3)]
    for lease in leases:
        fill(lease)
    everywhere.set("stores", b"not of a lease")
    everywhere.set("stores/x/y/z", b"nor this")
    everywhere.set("agents/did:plc:ada/x", b"nor this")
    before = [*everywhere.list()]
    theirs = [key for key in before if leases[0].hex in key]
    assert lease_stores.prune_stores(now=now, find_ended=lambda some: {leases[0]}).count == len(theirs)
    assert [*everywhere.list()] == [key for key in before if key not in theirs]
    assert lease_stores.prune_stores(now=now, find_ended=lambda some: {leases[0]}) == PruneResult()


def test_leases_are_asked_about_in_batches(everywhere: KeyValueStore, now: datetime) -> None:
    for n in range(250):
        everywhere.set(f"stores/did:plc:a{n % 7}/{UUID(int=n).hex}/sessions/s", b"{}")
    asked: list[int] = []

    def over(some: Any) -> Any:
        asked.append(len(some))
        return some

    assert lease_stores.prune_stores(now=now, find_ended=over).count == 250
    assert asked == [100, 100, 50]
    assert everywhere.is_empty()


def test_a_live_lease_is_brought_within_its_limits(everywhere: KeyValueStore, now: datetime) -> None:
    of = LeaseStores(everywhere, DID, LEASE, journaled=False, limits=SMALL)
    for n in range(PRUNE_MIN_KEYS):
        of.sessions.put(f"s{n}", {}, now=now + n * SECOND)
    assert lease_stores.prune_stores(now=now, find_ended=lambda some: []) == PruneResult()  # few and small: not looked at
    assert of.prune(now=now).count == PRUNE_MIN_KEYS - 2
    say(lease_stores.open_stores(DID, LEASE).chat, PRUNE_MIN_KEYS)
    put(lease_stores.open_stores(DID, LEASE), "large", b"x" * (1 << 20))
    assert lease_stores.prune_stores(now=now, find_ended=lambda some: []) == PruneResult()  # looked at, and within its limits
    assert len(lease_stores.open_stores(DID, LEASE).chat.page(limit=100)[0]) == PRUNE_MIN_KEYS


def test_a_lease_that_fails_does_not_hold_up_the_others(settings, monkeypatch: pytest.MonkeyPatch, now: datetime) -> None:
    store = MemoryStore()
    monkeypatch.setattr(storage, "get_store", lambda: store)
    leases = [UUID(int=n) for n in (1, 2)]
    for lease in leases:
        fill(lease)
    store.fail("remove", StoreError("memory", "remove", "away"), times=1)
    pruned = lease_stores.prune_stores(now=now, find_ended=lambda some: some)
    assert pruned.failures == [f"{leases[0]}: memory: remove: away"]
    assert not [key for key in store.list() if leases[1].hex in key]
    assert lease_stores.prune_stores(now=now, find_ended=lambda some: some).failures == []
    assert store.is_empty()


def test_every_listed_size_is_the_size(store: KeyValueStore, mode: str, again) -> None:
    """What a key says of its value's size is true: some stores tell nothing else."""
    of = again()
    say(of.chat, 3)
    put(of, "a", b"12345")
    sized = [entry for entry in store.entries() if "/content/" in entry.key or "/events/" in entry.key]
    assert sized
    assert all(parse_stamped_key(entry.key)[1] == entry.size for entry in sized)


def test_appending_goes_on_while_the_rest_is_pruned(again, now: datetime) -> None:
    counter = itertools.count()

    def act(index: int) -> int:
        chat, gone = again().chat, 0
        for _ in range(30):
            if index == 0:
                gone += chat.prune(RetentionBounds(max_count=10)).count
            else:
                chat.append({"n": next(counter)}, now=now)
        return gone

    with run_in_threads(3) as run:
        gone = sum(run(act)[:1])
    assert len(again().chat.page(limit=100)[0]) == 60 - gone

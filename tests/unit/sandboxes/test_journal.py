"""The journal: an acknowledged record is never lost, whatever crashes, whoever appends or compacts at the same time."""

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxes.storage.base import MAX_PAGE_SIZE, KeyValueStore, Page, StoreError, StoreRefused
from sandboxes.storage.filesystem import FilesystemStore
from sandboxes.storage.memory import MemoryStore
from sandboxes.stores.journal import (
    MIN_RECORD_BYTES,
    WRITER,
    CompactionResult,
    Journal,
    Record,
    Stamp,
    Writer,
    decode_records,
    encode_record,
)
from tests.conftest import NOW, SimulatedCrash, run_in_threads

SECOND = timedelta(seconds=1)
MICROSECOND = timedelta(microseconds=1)
ROOT = Path(__file__).resolve().parents[3]


class Staged(KeyValueStore):
    """Passes every call on, after `before(call number)`; with `tear`, of what is appended only so many bytes arrive."""

    name = "staged"

    def __init__(self, inner: KeyValueStore) -> None:
        self.inner, self.supports_append = inner, inner.supports_append
        self.calls: list[str] = []
        self.before: Callable[[int], None] = lambda call: None
        self.tear: int | None = None

    def _step(self, method: str) -> None:
        self.calls.append(method)
        self.before(len(self.calls))

    def get(self, key: str) -> bytes | None:
        self._step("get")
        return self.inner.get(key)

    def set(self, key: str, value: bytes) -> None:
        self._step("set")
        self.inner.set(key, value)

    def remove(self, key: str) -> None:
        self._step("remove")
        self.inner.remove(key)

    def has(self, key: str) -> bool:
        self._step("has")
        return self.inner.has(key)

    def page(self, prefix: str = "", *, cursor: str = "", limit: int = MAX_PAGE_SIZE) -> Page:
        self._step("page")
        return self.inner.page(prefix, cursor=cursor, limit=limit)

    def upload(self, key: str, source: BinaryIO) -> None:
        self._step("upload")
        self.inner.upload(key, source)

    def download(self, key: str, target: BinaryIO, *, start: int = 0, length: int | None = None) -> bool:
        self._step("download")
        return self.inner.download(key, target, start=start, length=length)

    def append(self, key: str, data: bytes, *, sync: bool = True) -> None:
        self._step("append")
        if self.tear is not None and self.tear < len(data):
            self.inner.append(key, data[: self.tear], sync=sync)
            raise SimulatedCrash()
        self.inner.append(key, data, sync=sync)


KINDS = ("filesystem", "memory")  # appends to segments, and writes one object for each append


def made(kind: str, root: Path) -> KeyValueStore:
    return MemoryStore() if kind == "memory" else FilesystemStore(root)


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> KeyValueStore:
    return made(request.param, tmp_path / "store")


@pytest.fixture
def files(tmp_path: Path) -> FilesystemStore:
    return FilesystemStore(tmp_path / "store")


def journal(store: KeyValueStore, **options: Any) -> Journal:
    """The journal, as one process more sees it."""
    return Journal(store, "j", writer=Writer(), **options)


def said(store: KeyValueStore) -> list[bytes]:
    return [record.payload for record in journal(store).replay().records]


def only_segment(store: KeyValueStore) -> str:
    (key,) = store.list("j/log/")
    return key


def dies_before(call: int) -> Callable[[int], None]:
    def before(at: int) -> None:
        if at == call:
            raise SimulatedCrash()

    return before


def test_an_empty_journal_replays_to_nothing(store: KeyValueStore) -> None:
    assert said(store) == []


def test_records_are_replayed_as_they_were_appended(store: KeyValueStore, now: datetime) -> None:
    written = journal(store)
    payloads = [b"", b"one", b"\0" * 100, bytes(range(256)) * 1000]
    stamps = [*written.append(payloads[0], now=now), *written.append(*payloads[1:], now=now)]
    assert journal(store).replay().records == [Record(*each) for each in zip(stamps, payloads, strict=True)]
    assert written.append(now=now) == []


def test_records_of_several_writers_are_in_the_order_of_their_times(store: KeyValueStore, now: datetime) -> None:
    first, second = journal(store), journal(store)
    first.append(b"2", now=now + SECOND)
    second.append(b"1", now=now)
    first.append(b"4", now=now + 3 * SECOND)
    second.append(b"3", now=now + 2 * SECOND)
    assert said(store) == [b"1", b"2", b"3", b"4"]


def test_journals_under_one_prefix_do_not_mix(store: KeyValueStore, now: datetime) -> None:
    Journal(store, "j").append(b"mine", now=now)
    Journal(store, "jj").append(b"other", now=now)
    Journal(store, "j/x").append(b"below", now=now)
    assert said(store) == [b"mine"]


def test_one_process_appends_to_one_segment(files: FilesystemStore, now: datetime) -> None:
    for number in range(5):
        Journal(files, "j").append(b"%d" % number, now=now)
    assert only_segment(files) == f"j/log/00000000/{WRITER.name}"
    assert said(files) == [b"0", b"1", b"2", b"3", b"4"]


# --- the port's append --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [True, False])
def test_what_is_appended_is_at_the_end_of_the_value(files: FilesystemStore, sync: bool) -> None:
    for data in (b"one", b"", b"two"):
        files.append("a/b", data, sync=sync)
    files.set("c", b"set and ")
    files.append("c", b"appended", sync=sync)
    assert (files.get("a/b"), files.get("c"), [*files.list()]) == (b"onetwo", b"set and appended", ["a/b", "c"])


def test_a_store_that_cannot_append_says_so() -> None:
    assert not MemoryStore.supports_append
    with pytest.raises(StoreRefused):
        MemoryStore().append("a", b"x")


def test_an_append_that_fails_is_an_error_of_the_store(files: FilesystemStore) -> None:
    files.set("a", b"x")
    files.root = files.root / "a.value"  # a file where a directory would have to be
    with pytest.raises(StoreError, match="append of 'b'"):
        files.append("b", b"x")


def test_appending_and_removing_at_once_fails_nobody(files: FilesystemStore) -> None:
    def act(index: int) -> None:
        for n in range(50):
            if index:
                files.append(f"deep/down/{index}", b"%d" % n)
            else:
                files.remove("deep/down/1")

    with run_in_threads(3) as run:
        assert run(act) == [None] * 3
    assert files.get("deep/down/2") == b"".join(b"%d" % n for n in range(50))


# --- torn tails ---------------------------------------------------------------------------------------------------


def test_a_segment_cut_at_any_byte_keeps_exactly_the_records_before(files: FilesystemStore, now: datetime) -> None:
    written = journal(files)
    written.append(b"first", now=now)
    written.append(b"second", now=now)
    whole = files.get(only_segment(files)) or b""
    written.append(b"the last one", now=now)
    key = only_segment(files)
    full = files.get(key) or b""
    for length in range(len(whole), len(full)):
        files.set(key, full[:length])
        found = journal(files).replay()
        assert [record.payload for record in found.records] == [b"first", b"second"]
        assert [(torn.key, torn.offset, torn.tail) for torn in found.torn] == (
            [(key, len(whole), full[len(whole) : length])] if length > len(whole) else []
        )
    files.set(key, full)
    assert said(files) == [b"first", b"second", b"the last one"]


@pytest.mark.parametrize(
    "tail", [b"\0" * 64, b"\xff" * 64, b"\0", encode_record(Record(Stamp(1, "00" * 8, 1), b"x"))[:-1] + b"y"]
)
def test_what_is_no_record_is_not_taken_for_one(files: FilesystemStore, now: datetime, tail: bytes) -> None:
    journal(files).append(b"whole", now=now)
    files.append(only_segment(files), tail)
    found = journal(files).replay()
    assert [record.payload for record in found.records] == [b"whole"]
    assert [torn.tail for torn in found.torn] == [tail]


@given(st.binary(max_size=200))
def test_any_bytes_at_all_can_be_read(data: bytes) -> None:
    assert sum(MIN_RECORD_BYTES + len(record.payload) for record in decode_records(data)) <= len(data)


@given(st.lists(st.binary(max_size=50), max_size=5), st.data())
def test_one_changed_byte_costs_its_own_record_and_those_behind_it(payloads: list[bytes], data: st.DataObject) -> None:
    frames = [encode_record(Record(Stamp(at, "ab" * 8, at), payload)) for at, payload in enumerate(payloads)]
    whole = bytearray(b"".join(frames))
    if not whole:
        return
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    hit = next(index for index in range(len(frames)) if at < sum(map(len, frames[: index + 1])))
    assert [record.payload for record in decode_records(bytes(whole))] == payloads[:hit]


def test_replay_goes_on_behind_a_torn_segment(files: FilesystemStore, now: datetime) -> None:
    for number in (1, 2, 3):
        journal(files).append(b"%d" % number, now=now + number * SECOND)
    for key in list(files.list("j/log/")):
        files.append(key, b"half a rec")
    found = journal(files).replay()
    assert ([record.payload for record in found.records], len(found.torn)) == ([b"1", b"2", b"3"], 3)


@pytest.mark.parametrize("arrived", range(40))
def test_after_a_torn_append_its_process_goes_on_in_a_new_segment(files: FilesystemStore, now: datetime, arrived: int) -> None:
    staged = Staged(files)
    written = journal(staged)
    written.append(b"before", now=now)
    staged.tear = arrived
    with pytest.raises(SimulatedCrash):
        written.append(b"torn, as it is", now=now)
    staged.tear = None
    written.append(b"after", now=now)
    assert said(files) == [b"before", b"after"]
    assert len(journal(files).replay().torn) == (arrived > 0)


def test_an_append_that_the_store_refuses_is_not_acknowledged(store: KeyValueStore, now: datetime) -> None:
    def away(call: int) -> None:
        raise StoreError("staged", "any", "away")

    staged = Staged(store)
    written = journal(staged)
    staged.before = away
    with pytest.raises(StoreError):
        written.append(b"lost", now=now)
    staged.before = lambda call: None
    written.append(b"kept", now=now)
    assert said(store) == [b"kept"]


# --- compaction ---------------------------------------------------------------------------------------------------


def filled(store: KeyValueStore, now: datetime, *, with_snapshot: bool = True) -> list[bytes]:
    """Six records of three writers, two of them in a snapshot already."""
    writers = [journal(store) for _ in range(3)]
    writers[0].append(b"0", now=now)
    writers[1].append(b"1", now=now + SECOND)
    if with_snapshot:
        writers[2].compact()
    for number in range(2, 6):
        writers[number % 3].append(b"%d" % number, now=now + number * SECOND)
    return [b"%d" % number for number in range(6)]


def test_compaction_leaves_one_object_with_the_same_records(store: KeyValueStore, now: datetime) -> None:
    expected = filled(store, now)
    before = journal(store).replay()
    assert journal(store).compact() == CompactionResult()
    assert journal(store).replay() == before
    assert said(store) == expected
    assert [len([*store.list(f"j/{kind}/")]) for kind in ("log", "snap", "torn")] == [0, 1, 0]


def test_compaction_drops_what_it_is_told_to(store: KeyValueStore, now: datetime) -> None:
    filled(store, now)
    done = journal(store).compact(lambda records: records[4:])
    assert done is not None
    assert [record.payload for record in done.dropped] == [b"0", b"1", b"2", b"3"]
    assert said(store) == [b"4", b"5"]


def test_a_journal_without_records_can_be_compacted(store: KeyValueStore) -> None:
    assert journal(store).compact() == CompactionResult()
    assert said(store) == []


def steps_of(store: KeyValueStore, now: datetime) -> int:
    """How many calls a compaction of the `filled` journal makes."""
    filled(store, now)
    staged = Staged(store)
    journal(staged).compact()
    return len(staged.calls)


@pytest.mark.parametrize("kind", KINDS)
def test_a_compaction_may_die_before_each_of_its_steps(kind: str, tmp_path: Path, now: datetime) -> None:
    for call in range(1, steps_of(made(kind, tmp_path / "counted"), now) + 1):
        store = made(kind, tmp_path / str(call))
        expected = filled(store, now)
        staged = Staged(store)
        staged.before = dies_before(call)
        with pytest.raises(SimulatedCrash):
            journal(staged).compact()
        assert said(store) == expected
        journal(store).append(b"6", now=now + 6 * SECOND)
        assert said(store) == [*expected, b"6"]
        journal(store).compact()  # and the next one cleans up
        assert said(store) == [*expected, b"6"]
        assert [len([*store.list(f"j/{kind}/")]) for kind in ("log", "snap")] == [0, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_crashed_compaction_brings_back_nothing_once_its_snapshot_is_there(kind: str, tmp_path: Path, now: datetime) -> None:
    seen = []
    for call in range(1, steps_of(made(kind, tmp_path / "counted"), now) + 1):
        store = made(kind, tmp_path / str(call))
        filled(store, now)
        staged = Staged(store)
        staged.before = dies_before(call)
        with pytest.raises(SimulatedCrash):
            journal(staged).compact(lambda records: records[4:])
        seen.append(len(said(store)))
    assert seen == sorted(seen, reverse=True)
    assert {*seen} == {6, 2}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inside", ["append", "compact"])
@pytest.mark.parametrize("rival", ["append", "compact", "twice"])
def test_a_rival_may_act_before_each_step(kind: str, inside: str, rival: str, tmp_path: Path, now: datetime) -> None:
    """A whole append or compaction, or two of them, by another process in the middle of ours."""
    for call in range(1, 40):
        store = made(kind, tmp_path / str(call))
        expected = filled(store, now)
        staged = Staged(store)

        def intrude(at: int, call: int = call, store: KeyValueStore = store) -> None:
            if at == call:
                if rival == "append":
                    journal(store).append(b"rival", now=now + 8 * SECOND)
                else:
                    for _ in range(2 if rival == "twice" else 1):
                        journal(store).compact()

        staged.before = intrude
        if inside == "append":
            journal(staged).append(b"ours", now=now + 7 * SECOND)
            expected += [b"ours"]
        else:
            journal(staged).compact()
        if len(staged.calls) < call:
            assert call > 3
            return
        assert said(store) == expected + [b"rival"] * (rival == "append")
        journal(store).compact()
        assert said(store) == expected + [b"rival"] * (rival == "append")
    raise AssertionError("it does not end")


@pytest.mark.parametrize("with_snapshot", [True, False])
def test_two_compactions_may_overlap_at_every_pair_of_steps(with_snapshot: bool, now: datetime) -> None:
    """The first one stands still before one of its steps, until the second has come to one of its own."""
    steps = steps_of(MemoryStore(), now)
    for stands, comes_to in itertools.product(range(1, steps + 1), repeat=2):
        store = MemoryStore()
        expected = filled(store, now, with_snapshot=with_snapshot)
        first, second = Staged(store), Staged(store)
        standing, go = threading.Event(), threading.Event()

        def stand(call: int, at: int = stands, standing: threading.Event = standing, go: threading.Event = go) -> None:
            if call == at:
                standing.set()
                assert go.wait(30)

        first.before = stand
        rival = threading.Thread(target=journal(first).compact)
        rival.start()
        assert standing.wait(30)

        def resume(call: int, at: int = comes_to, go: threading.Event = go, rival: threading.Thread = rival) -> None:
            if call == at:
                go.set()
                rival.join(30)

        second.before = resume
        journal(second).compact()
        go.set()
        rival.join(30)
        assert said(store) == expected, (stands, comes_to)


def test_an_append_that_a_compaction_overtakes_is_written_again(files: FilesystemStore, now: datetime) -> None:
    """The writer looks for the generation, and only then, all at once, there is a new one and the old one is gone."""
    staged = Staged(files)
    journal(files).append(b"old", now=now)
    staged.before = lambda call: journal(files).compact() and None if call == 2 else None
    (stamp,) = journal(staged).append(b"late", now=now + SECOND)
    assert staged.calls == ["page", "append", "page", "append", "page"]
    assert said(files) == [b"old", b"late"]
    assert journal(files).replay().records[-1].stamp == stamp


def test_a_replay_that_a_compaction_overtakes_starts_again(store: KeyValueStore, now: datetime) -> None:
    expected = filled(store, now)
    staged = Staged(store)
    staged.before = lambda call: journal(store).compact() and None if call == 4 else None
    assert [record.payload for record in Journal(staged, "j").replay().records] == expected


def test_a_replay_that_is_overtaken_for_ever_gives_up(store: KeyValueStore, now: datetime) -> None:
    filled(store, now)
    staged = Staged(store)
    staged.before = lambda call: journal(store).compact() and None if staged.calls[-1] == "get" else None
    with pytest.raises(StoreError, match="kept replacing"):
        Journal(staged, "j").replay()


def test_what_cannot_be_read_is_set_aside_by_compaction(files: FilesystemStore, now: datetime) -> None:
    written = journal(files)
    written.append(b"1", now=now)
    end = len(files.get(only_segment(files)) or b"")
    written.append(b"2", now=now)
    data = bytearray(files.get(only_segment(files)) or b"")
    data[end + 20] ^= 1
    files.set(only_segment(files), bytes(data))
    done = journal(files).compact()
    assert done is not None
    assert [torn.tail for torn in done.torn] == [bytes(data[end:])]
    assert [files.get(key) for key in files.list("j/torn/")] == [bytes(data[end:])]
    assert said(files) == [b"1"]


# --- many at once -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one_process", [True, False], ids=["one writer", "a writer each"])
def test_threads_append_while_others_compact(store: KeyValueStore, now: datetime, one_process: bool) -> None:
    shared = Writer()
    done: list[bytes] = []

    def act(index: int) -> None:
        mine = Journal(store, "j", writer=shared if one_process else Writer(), sync=False)
        for number in range(25):
            if index == 0:
                mine.compact()
            else:
                payload = b"%d-%d" % (index, number)
                mine.append(payload, now=now + number * SECOND)
                done.append(payload)

    with run_in_threads(4) as run:
        assert run(act) == [None] * 4
    found = said(store)
    assert sorted(found) == sorted(done)
    for index in (1, 2, 3):
        prefix = b"%d-" % index
        assert [each for each in found if each.startswith(prefix)] == [b"%d-%d" % (index, number) for number in range(25)]


CHILD = """
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from sandboxes.storage.filesystem import FilesystemStore
from sandboxes.storage.memory import MemoryStore
from sandboxes.stores.journal import Journal

root, name, count = sys.argv[1:]
journal = Journal(FilesystemStore(Path(root)), "j")
now = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
for number in range(int(count)):
    journal.append(f"{name}-{number}".encode(), now=now + timedelta(seconds=number))
    print(number, flush=True)
"""


@pytest.fixture
def child(files: FilesystemStore) -> Iterator[Callable[[str, int], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(name: str, count: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CHILD, str(files.root), name, str(count)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout
        process.stdout.close()


def test_two_processes_append_while_a_third_compacts(files: FilesystemStore, child) -> None:
    both = [child(name, 60) for name in ("a", "b")]
    while any(process.poll() is None for process in both):
        journal(files).compact()
    assert [process.returncode for process in both] == [0, 0]
    expected = [f"{name}-{number}".encode() for number in range(60) for name in ("a", "b")]
    found = said(files)
    assert sorted(found) == sorted(expected)
    for name in (b"a", b"b"):
        mine = [each for each in found if each.startswith(name)]
        assert mine == [each for each in expected if each.startswith(name)]


def test_what_a_killed_process_had_acknowledged_is_there(files: FilesystemStore, child) -> None:
    process = child("a", 100_000)
    acknowledged = [int(process.stdout.readline()) for _ in range(20)]
    os.kill(process.pid, signal.SIGKILL)
    acknowledged += [int(line) for line in process.communicate()[0].splitlines()]
    found = said(files)
    assert len(acknowledged) <= len(found) <= len(acknowledged) + 1
    assert found == [f"a-{number}".encode() for number in range(len(found))]


def _name(queue: Any) -> None:
    queue.put(WRITER.name)


def test_the_child_of_a_fork_is_another_writer() -> None:
    fork = multiprocessing.get_context("fork")
    queue = fork.Queue()
    process = fork.Process(target=_name, args=(queue,))
    process.start()
    name = queue.get(timeout=30)
    process.join()
    assert name != WRITER.name


# --- everything together ------------------------------------------------------------------------------------------

at_call = st.none() | st.integers(1, 14)
supports_append = st.tuples(st.just("append"), st.integers(0, 2), st.integers(1, 3))
acts = supports_append | st.tuples(st.just("compact"), st.integers(0, 2), st.just(0))


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    script=st.lists(st.tuples(acts, at_call, acts, at_call, st.none() | st.integers(0, 120)), max_size=12),
)
def test_any_order_of_appends_compactions_and_crashes(kind: str, script: list[Any]) -> None:
    """Each act is done by one of three processes. In the middle of it another act may happen, it may crash before any of
    its calls, and an append may arrive in part."""
    with tempfile.TemporaryDirectory(prefix="lh-journal-") as root:
        store = made(kind, Path(root))
        processes = [Writer() for _ in range(3)]
        acknowledged: set[int] = set()
        attempted = 0

        def act(on: KeyValueStore, what: tuple[str, int, int]) -> None:
            nonlocal attempted
            verb, process, count = what
            mine = Journal(on, "j", sync=False, writer=processes[process])
            if verb == "compact":
                mine.compact()
                return
            numbers = range(attempted, attempted + count)
            attempted += count
            mine.append(*[b"%d" % number for number in numbers], now=NOW + numbers[0] * MICROSECOND)
            acknowledged.update(numbers)

        for what, intruded_at, intruder, dies_at, tear in script:
            staged = Staged(store)
            if intruder[1] == what[1]:
                intruder = (intruder[0], (intruder[1] + 1) % 3, intruder[2])  # its own lock would keep it out

            def before(call: int, at: int | None = intruded_at, rival: Any = intruder, dies: int | None = dies_at) -> None:
                if call == at:
                    act(store, rival)
                if call == dies:
                    raise SimulatedCrash()

            staged.before, staged.tear = before, tear
            try:
                act(staged, what)
            except SimulatedCrash:
                processes[what[1]] = Writer()  # whoever comes after it
            found = [int(payload) for payload in said(store)]
            assert found == sorted({*found})
            assert acknowledged <= {*found} <= {*range(attempted)}

"""Journal durability under crashes, torn writes, concurrent appends and concurrent compactions."""

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
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxes.storage.base import KeyValueStore, StoreError, StoreRefused
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

pytestmark = pytest.mark.usefixtures("no_fsync")
SECOND = timedelta(seconds=1)
MICROSECOND = timedelta(microseconds=1)
ROOT = Path(__file__).resolve().parents[4]


def _recorded(method: str) -> Callable[..., Any]:
    def call(proxy: "StoreProxy", *args: Any, **options: Any) -> Any:
        proxy.calls.append(method)
        proxy.before(len(proxy.calls))
        return getattr(proxy.inner, method)(*args, **options)

    return call


class StoreProxy(KeyValueStore):
    """Store proxy that calls `before(call number)` first. With `tear`, only so many bytes of an append are stored."""

    name = "staged"
    get, set, remove, has = map(_recorded, ("get", "set", "remove", "has"))
    page, upload, download = map(_recorded, ("page", "upload", "download"))

    def __init__(self, inner: KeyValueStore, before: Callable[[int], object] = lambda call: None) -> None:
        self.inner, self.supports_append = inner, inner.supports_append
        self.calls: list[str] = []
        self.before = before
        self.tear: int | None = None

    def append(self, key: str, data: bytes, *, sync: bool = True) -> None:
        torn = self.tear is not None and self.tear < len(data)
        _recorded("append")(self, key, data[: self.tear] if torn else data, sync=sync)
        if torn:
            raise SimulatedCrash


KINDS = ("filesystem", "memory")  # segments that are appended to, and one object per append


def make_store(kind: str, root: Path) -> KeyValueStore:
    return MemoryStore() if kind == "memory" else FilesystemStore(root)


@pytest.fixture
def files(tmp_path: Path) -> FilesystemStore:
    return FilesystemStore(tmp_path / "store")


def journal(store: KeyValueStore, **options: Any) -> Journal:
    """Open the journal as another process would."""
    return Journal(store, "j", writer=Writer(), **options)


def read_payloads(store: KeyValueStore) -> list[bytes]:
    return [record.payload for record in journal(store).replay().records]


def only_segment(store: KeyValueStore) -> str:
    (key,) = store.list("j/log/")
    return key


def test_records_are_replayed_as_they_were_appended(store: KeyValueStore, now: datetime) -> None:
    writer = journal(store)
    payloads = [b"", b"one", b"\0" * 100, bytes(range(256)) * 1000]
    stamps = [*writer.append(payloads[0], now=now), *writer.append(*payloads[1:], now=now)]
    assert journal(store).replay().records == [Record(*each) for each in zip(stamps, payloads, strict=True)]
    assert writer.append(now=now) == []


def test_records_of_several_writers_are_ordered_by_time(store: KeyValueStore, now: datetime) -> None:
    first, second = journal(store), journal(store)
    first.append(b"2", now=now + SECOND)
    second.append(b"1", now=now)
    first.append(b"4", now=now + 3 * SECOND)
    second.append(b"3", now=now + 2 * SECOND)
    assert read_payloads(store) == [b"1", b"2", b"3", b"4"]


def test_journals_under_one_prefix_do_not_mix(store: KeyValueStore, now: datetime) -> None:
    Journal(store, "j").append(b"mine", now=now)
    Journal(store, "jj").append(b"other", now=now)
    Journal(store, "j/x").append(b"below", now=now)
    assert read_payloads(store) == [b"mine"]


def test_one_process_appends_to_one_segment(files: FilesystemStore, now: datetime) -> None:
    for number in range(5):
        Journal(files, "j").append(b"%d" % number, now=now)
    assert only_segment(files) == f"j/log/00000000/{WRITER.name}"
    assert read_payloads(files) == [b"0", b"1", b"2", b"3", b"4"]


# --- the port's append --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [True, False])
def test_append_adds_to_the_end_of_the_value(files: FilesystemStore, sync: bool) -> None:
    for data in (b"one", b"", b"two"):
        files.append("a/b", data, sync=sync)
    files.set("c", b"set and ")
    files.append("c", b"appended", sync=sync)
    assert (files.get("a/b"), files.get("c"), [*files.list()]) == (b"onetwo", b"set and appended", ["a/b", "c"])


def test_append_is_refused_without_support_and_fails_with_store_error(files: FilesystemStore) -> None:
    assert not MemoryStore.supports_append
    with pytest.raises(StoreRefused):
        MemoryStore().append("a", b"x")
    files.set("a", b"x")
    files.root = files.root / "a.value"  # a file in the place of a directory
    with pytest.raises(StoreError, match="append of 'b'"):
        files.append("b", b"x")


def test_concurrent_append_and_remove_succeed(files: FilesystemStore) -> None:
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


def test_segment_cut_at_any_byte_keeps_the_complete_records(files: FilesystemStore, now: datetime) -> None:
    writer = journal(files)
    writer.append(b"first", now=now)
    writer.append(b"second", now=now)
    complete = files.get(only_segment(files)) or b""
    writer.append(b"the last one", now=now)
    key = only_segment(files)
    full = files.get(key) or b""
    for length in range(len(complete), len(full)):
        files.set(key, full[:length])
        result = journal(files).replay()
        assert [record.payload for record in result.records] == [b"first", b"second"]
        assert [(torn.key, torn.offset, torn.tail) for torn in result.torn] == (
            [(key, len(complete), full[len(complete) : length])] if length > len(complete) else []
        )
    files.set(key, full)
    assert read_payloads(files) == [b"first", b"second", b"the last one"]


@pytest.mark.parametrize(
    "tail", [b"\0" * 64, b"\xff" * 64, b"\0", b"half a rec", encode_record(Record(Stamp(1, "00" * 8, 1), b"x"))[:-1] + b"y"]
)
def test_invalid_tail_of_every_segment_is_torn(files: FilesystemStore, now: datetime, tail: bytes) -> None:
    for number in (1, 2, 3):
        journal(files).append(b"%d" % number, now=now + number * SECOND)
    for key in [*files.list("j/log/")]:
        files.append(key, tail)
    result = journal(files).replay()
    assert [record.payload for record in result.records] == [b"1", b"2", b"3"]
    assert [torn.tail for torn in result.torn] == [tail] * 3


@given(st.binary(max_size=200))
def test_any_bytes_can_be_decoded(data: bytes) -> None:
    assert sum(MIN_RECORD_BYTES + len(record.payload) for record in decode_records(data)) <= len(data)


@given(st.lists(st.binary(max_size=50), max_size=5), st.data())
def test_corrupt_byte_loses_its_record_and_the_following(payloads: list[bytes], data: st.DataObject) -> None:
    frames = [encode_record(Record(Stamp(at, "ab" * 8, at), payload)) for at, payload in enumerate(payloads)]
    whole = bytearray(b"".join(frames))
    if not whole:
        return
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    first_damaged = next(index for index in range(len(frames)) if at < sum(map(len, frames[: index + 1])))
    assert [record.payload for record in decode_records(bytes(whole))] == payloads[:first_damaged]


def test_process_continues_in_a_new_segment_after_a_torn_append(tmp_path: Path, now: datetime) -> None:
    for arrived in range(40):
        files = FilesystemStore(tmp_path / str(arrived))
        proxy = StoreProxy(files)
        writer = journal(proxy)
        writer.append(b"before", now=now)
        proxy.tear = arrived
        with pytest.raises(SimulatedCrash):
            writer.append(b"torn, as it is", now=now)
        proxy.tear = None
        writer.append(b"after", now=now)
        assert read_payloads(files) == [b"before", b"after"]
        assert len(journal(files).replay().torn) == (arrived > 0)


def test_append_that_the_store_rejects_is_not_acknowledged(store: KeyValueStore, now: datetime) -> None:
    def fail(call: int) -> None:
        raise StoreError("staged", "any", "away")

    proxy = StoreProxy(store, fail)
    writer = journal(proxy)
    with pytest.raises(StoreError):
        writer.append(b"lost", now=now)
    proxy.before = lambda call: None
    writer.append(b"kept", now=now)
    assert read_payloads(store) == [b"kept"]


# --- compaction ---------------------------------------------------------------------------------------------------


def fill(store: KeyValueStore, now: datetime, *, with_snapshot: bool = True) -> list[bytes]:
    """Append six records by three writers; a snapshot contains two of them."""
    writers = [journal(store) for _ in range(3)]
    writers[0].append(b"0", now=now)
    writers[1].append(b"1", now=now + SECOND)
    if with_snapshot:
        writers[2].compact()
    for number in range(2, 6):
        writers[number % 3].append(b"%d" % number, now=now + number * SECOND)
    return [b"%d" % number for number in range(6)]


def count_objects(store: KeyValueStore, *kinds: str) -> list[int]:
    return [len([*store.list(f"j/{kind}/")]) for kind in kinds]


def test_compaction_leaves_one_object_with_the_selected_records(store: KeyValueStore, now: datetime) -> None:
    assert journal(store).compact() == CompactionResult()  # of an empty journal
    expected = fill(store, now)
    before = journal(store).replay()
    assert journal(store).compact() == CompactionResult()
    assert journal(store).replay() == before
    assert read_payloads(store) == expected
    assert count_objects(store, "log", "snap", "torn") == [0, 1, 0]
    result = journal(store).compact(lambda records: records[4:])
    assert result is not None
    assert [record.payload for record in result.dropped] == [b"0", b"1", b"2", b"3"]
    assert read_payloads(store) == [b"4", b"5"]


def count_steps(store: KeyValueStore, now: datetime) -> int:
    """Return the number of store calls of a compaction of the `filled` journal."""
    fill(store, now)
    proxy = StoreProxy(store)
    journal(proxy).compact()
    return len(proxy.calls)


def crash_compaction(store: KeyValueStore, call: int, now: datetime, *select: Any) -> list[bytes]:
    """Fill a journal and crash before this store call of a compaction. Return all payloads."""

    def before(at: int) -> None:
        if at == call:
            raise SimulatedCrash

    payloads = fill(store, now)
    with pytest.raises(SimulatedCrash):
        journal(StoreProxy(store, before)).compact(*select)
    return payloads


@pytest.mark.parametrize("kind", KINDS)
def test_compaction_crash_before_any_step_loses_nothing(kind: str, tmp_path: Path, now: datetime) -> None:
    remaining = []
    for call in range(1, count_steps(make_store(kind, tmp_path / "counted"), now) + 1):
        store = make_store(kind, tmp_path / str(call))
        expected = crash_compaction(store, call, now)
        assert read_payloads(store) == expected
        journal(store).append(b"6", now=now + 6 * SECOND)
        assert read_payloads(store) == [*expected, b"6"]
        journal(store).compact()  # the next compaction cleans up
        assert read_payloads(store) == [*expected, b"6"]
        assert count_objects(store, "log", "snap") == [0, 1]
        store = make_store(kind, tmp_path / f"{call} dropping")
        crash_compaction(store, call, now, lambda records: records[4:])
        remaining.append(len(read_payloads(store)))
    # Dropped records stay dropped once the snapshot is written.
    assert remaining == sorted(remaining, reverse=True)
    assert {*remaining} == {6, 2}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", ["append", "compact"])
@pytest.mark.parametrize("rival", ["append", "compact", "twice"])
def test_concurrent_operation_before_any_step_loses_nothing(
    kind: str, operation: str, rival: str, tmp_path: Path, now: datetime
) -> None:
    """Another process appends, compacts or compacts twice between two store calls of an append or a compaction."""
    for call in range(1, 40):
        store = make_store(kind, tmp_path / str(call))
        expected = fill(store, now)

        def act_as_rival(at: int, call: int = call, store: KeyValueStore = store) -> None:
            if at == call:
                if rival == "append":
                    journal(store).append(b"rival", now=now + 8 * SECOND)
                else:
                    for _ in range(2 if rival == "twice" else 1):
                        journal(store).compact()

        proxy = StoreProxy(store, act_as_rival)
        if operation == "append":
            [stamp] = journal(proxy).append(b"ours", now=now + 7 * SECOND)
            assert stamp in [record.stamp for record in journal(store).replay().records]
            expected += [b"ours"]
        else:
            journal(proxy).compact()
        if len(proxy.calls) < call:
            assert call > 3
            return
        assert read_payloads(store) == expected + [b"rival"] * (rival == "append")
        journal(store).compact()
        assert read_payloads(store) == expected + [b"rival"] * (rival == "append")
    raise AssertionError("more than 40 store calls")


@pytest.mark.parametrize("with_snapshot", [True, False])
def test_two_compactions_overlap_at_every_pair_of_steps(with_snapshot: bool, now: datetime) -> None:
    """The first compaction pauses before one of its steps until the second has reached one of its own."""
    steps = count_steps(MemoryStore(), now)
    for paused_at, resumed_at in itertools.product(range(1, steps + 1), repeat=2):
        store = MemoryStore()
        expected = fill(store, now, with_snapshot=with_snapshot)
        paused, go = threading.Event(), threading.Event()

        def pause(call: int, at: int = paused_at, paused: threading.Event = paused, go: threading.Event = go) -> None:
            if call == at:
                paused.set()
                assert go.wait(30)

        rival = threading.Thread(target=journal(StoreProxy(store, pause)).compact)
        rival.start()
        assert paused.wait(30)

        def resume(call: int, at: int = resumed_at, go: threading.Event = go, rival: threading.Thread = rival) -> None:
            if call == at:
                go.set()
                rival.join(30)

        journal(StoreProxy(store, resume)).compact()
        go.set()
        rival.join(30)
        assert read_payloads(store) == expected, (paused_at, resumed_at)


def test_replay_overtaken_by_a_compaction_restarts_but_not_forever(store: KeyValueStore, now: datetime) -> None:
    expected = fill(store, now)
    proxy = StoreProxy(store, lambda call: journal(store).compact() if call == 4 else None)
    assert [record.payload for record in Journal(proxy, "j").replay().records] == expected
    proxy.before = lambda call: journal(store).compact() if proxy.calls[-1] == "get" else None
    with pytest.raises(StoreError, match="kept replacing"):
        Journal(proxy, "j").replay()


def test_compaction_saves_the_unreadable_tail(files: FilesystemStore, now: datetime) -> None:
    writer = journal(files)
    writer.append(b"1", now=now)
    end = len(files.get(only_segment(files)) or b"")
    writer.append(b"2", now=now)
    data = bytearray(files.get(only_segment(files)) or b"")
    data[end + 20] ^= 1
    files.set(only_segment(files), bytes(data))
    result = journal(files).compact()
    assert result is not None
    assert [torn.tail for torn in result.torn] == [bytes(data[end:])]
    assert [files.get(key) for key in files.list("j/torn/")] == [bytes(data[end:])]
    assert read_payloads(files) == [b"1"]


# --- concurrency --------------------------------------------------------------------------------------------------------


def test_threads_append_while_others_compact(store: KeyValueStore, now: datetime) -> None:
    shared = Writer()
    done: list[bytes] = []

    def act(index: int) -> None:
        own_journal = Journal(store, "j", writer=shared, sync=False)
        for number in range(25):
            if index == 0:
                own_journal.compact()
            else:
                payload = b"%d-%d" % (index, number)
                own_journal.append(payload, now=now + number * SECOND)
                done.append(payload)

    with run_in_threads(4) as run:
        assert run(act) == [None] * 4
    payloads = read_payloads(store)
    assert sorted(payloads) == sorted(done)
    for index in (1, 2, 3):
        prefix = b"%d-" % index
        assert [each for each in payloads if each.startswith(prefix)] == [b"%d-%d" % (index, number) for number in range(25)]


CHILD_SCRIPT = """
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
        command = [sys.executable, "-c", CHILD_SCRIPT, str(files.root), name, str(count)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout
        process.stdout.close()


def test_two_processes_append_while_a_third_compacts(files: FilesystemStore, child) -> None:
    children = [child(name, 60) for name in ("a", "b")]
    for _ in children[0].stdout:  # a line for each record
        journal(files).compact()
    assert [process.wait(60) for process in children] == [0, 0]
    expected = [f"{name}-{number}".encode() for number in range(60) for name in ("a", "b")]
    payloads = read_payloads(files)
    assert sorted(payloads) == sorted(expected)
    for name in (b"a", b"b"):
        own_journal = [each for each in payloads if each.startswith(name)]
        assert own_journal == [each for each in expected if each.startswith(name)]


def test_records_acknowledged_by_a_killed_process_survive(files: FilesystemStore, child) -> None:
    process = child("a", 100_000)
    acknowledged = [int(process.stdout.readline()) for _ in range(20)]
    os.kill(process.pid, signal.SIGKILL)
    acknowledged += [int(line) for line in process.communicate()[0].splitlines()]
    payloads = read_payloads(files)
    assert len(acknowledged) <= len(payloads) <= len(acknowledged) + 1
    assert payloads == [f"a-{number}".encode() for number in range(len(payloads))]


def _name(queue: Any) -> None:
    queue.put(WRITER.name)


def test_forked_child_is_another_writer() -> None:
    fork = multiprocessing.get_context("fork")
    queue = fork.Queue()
    process = fork.Process(target=_name, args=(queue,))
    process.start()
    name = queue.get(timeout=30)
    process.join()
    assert name != WRITER.name


# --- random schedules ---------------------------------------------------------------------------------------------------

optional_call = st.none() | st.integers(1, 14)
append_actions = st.tuples(st.just("append"), st.integers(0, 2), st.integers(1, 3))
actions = append_actions | st.tuples(st.just("compact"), st.integers(0, 2), st.just(0))


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    script=st.lists(st.tuples(actions, optional_call, actions, optional_call, st.none() | st.integers(0, 120)), max_size=12),
)
def test_any_order_of_appends_compactions_and_crashes(kind: str, script: list[Any]) -> None:
    """Each action runs in one of three processes. Another action may run between two store calls, the process may crash before
    any store call, and an append may be stored in part."""
    with tempfile.TemporaryDirectory(prefix="lh-journal-") as root:
        store = make_store(kind, Path(root))
        processes = [Writer() for _ in range(3)]
        acknowledged: set[int] = set()
        attempted = 0

        def act(on: KeyValueStore, action: tuple[str, int, int]) -> None:
            nonlocal attempted
            verb, process, count = action
            own_journal = Journal(on, "j", sync=False, writer=processes[process])
            if verb == "compact":
                own_journal.compact()
                return
            numbers = range(attempted, attempted + count)
            attempted += count
            own_journal.append(*[b"%d" % number for number in numbers], now=NOW + numbers[0] * MICROSECOND)
            acknowledged.update(numbers)

        for action, rival_at, rival_action, crash_at, tear in script:
            if rival_action[1] == action[1]:  # the writer's lock would block an action of the same process
                rival_action = (rival_action[0], (rival_action[1] + 1) % 3, rival_action[2])

            def before(call: int, at: int | None = rival_at, rival: Any = rival_action, dies: int | None = crash_at) -> None:
                if call == at:
                    act(store, rival)
                if call == dies:
                    raise SimulatedCrash()

            proxy = StoreProxy(store, before)
            proxy.tear = tear
            try:
                act(proxy, action)
            except SimulatedCrash:
                processes[action[1]] = Writer()  # the restarted process
            payloads = [int(payload) for payload in read_payloads(store)]
            assert payloads == sorted({*payloads})
            assert acknowledged <= {*payloads} <= {*range(attempted)}

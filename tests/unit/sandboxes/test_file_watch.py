"""Comparison of listings by a watch, and the sandboxes that it lists."""

import pytest

from sandboxes import file_watch
from sandboxes.file_watch import FileChange, FileWatch, WatchGap, compare
from sandboxes.models import Sandbox, SandboxState
from sandboxes.providers.base import WORKSPACE, FileStat, SandboxSpec
from sandboxes.providers.errors import Missing, TooLarge, Unavailable
from sandboxes.providers.memory import File, MemoryProvider


def stat(kind: str = "file", stamp: str = "1", **fields) -> FileStat:
    return FileStat(**{"kind": kind, "mode": 0o644, "size": 1, "mtime": 1, "stamp": stamp} | fields)


def names(changes) -> list[tuple[str, str]]:
    return [(change.kind, change.path) for change in changes]


def test_changes_are_ordered_deletions_creations_modifications() -> None:
    old = {"a": stat("directory"), "a/b": stat(), "same": stat(), "changed": stat(), "kind": stat()}
    new = {"same": stat(), "changed": stat(stamp="2"), "kind": stat("link"), "n": stat("directory"), "n/m": stat()}
    assert names(compare(old, new, by_stamp=True)) == [
        ("deleted", "kind"), ("deleted", "a/b"), ("deleted", "a"), ("created", "kind"), ("created", "n"), ("created", "n/m"),
        ("modified", "changed"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "is_modified"),
    [({}, False), ({"size": 2}, True), ({"mode": 0}, True), ({"mtime": 2}, True), ({"target": "x"}, True)],
)
def test_restored_files_are_compared_without_their_stamps(change: dict[str, object], is_modified: bool) -> None:
    changes = names(compare({"a": stat()}, {"a": stat(stamp="2", **change)}, by_stamp=False))
    assert changes == ([("modified", "a")] if is_modified else [])


def test_the_time_of_a_restored_directory_is_no_change() -> None:
    old, new = {"d": stat("directory")}, {"d": stat("directory", stamp="2", mtime=5)}
    assert names(compare(old, new, by_stamp=False)) == []


@pytest.fixture
def memory() -> MemoryProvider:
    return MemoryProvider()


@pytest.fixture
def sandbox(memory: MemoryProvider) -> Sandbox:
    ref = memory.create(SandboxSpec(name="watched", owner="o"))
    return Sandbox(ref=ref, state=SandboxState.WAITING, incarnation=1, prepared=True)


def watch_workspace(memory: MemoryProvider, sandbox: Sandbox, under: str = "") -> FileWatch:
    entries = memory.manifest(sandbox.ref, WORKSPACE, under=under)
    return FileWatch(WORKSPACE, under, entries, sandbox.incarnation)


def test_each_change_is_reported_once(memory: MemoryProvider, sandbox: Sandbox) -> None:
    memory.write_file(sandbox.ref, "/workspace/a", b"1")
    watch = watch_workspace(memory, sandbox)
    assert list(watch.poll(sandbox, memory)) == []
    memory.write_file(sandbox.ref, "/workspace/a", b"2")
    memory.write_file(sandbox.ref, "/workspace/d/b", b"1")
    assert names(watch.poll(sandbox, memory)) == [("created", "d"), ("created", "d/b"), ("modified", "a")]
    assert list(watch.poll(sandbox, memory)) == []


@pytest.mark.parametrize(
    "fields",
    [{"state": state} for state in ("cold", "evicting", "suspended", "starting", "waking")]
    + [{"frozen": True}, {"prepared": False}],
)
def test_only_an_awake_sandbox_is_listed(memory: MemoryProvider, sandbox: Sandbox, fields: dict[str, object]) -> None:
    watch = watch_workspace(memory, sandbox)
    memory.calls.clear()
    for name, value in fields.items():
        setattr(sandbox, name, value)
    assert all(isinstance(each, file_watch.WatchSleep) for each in watch.poll(sandbox, memory))
    assert memory.calls == []


@pytest.mark.parametrize("error", [Missing("gone"), Unavailable("suspended")])
def test_a_listing_that_fails_is_repeated(memory: MemoryProvider, sandbox: Sandbox, error: Exception) -> None:
    watch = watch_workspace(memory, sandbox)
    memory.write_file(sandbox.ref, "/workspace/a", b"1")
    with memory.fail("manifest", error):
        assert list(watch.poll(sandbox, memory)) == []
    assert names(watch.poll(sandbox, memory)) == [("created", "a")]


def test_a_replaced_sandbox_is_a_gap_and_unchanged_files_are_not_reported(memory: MemoryProvider, sandbox: Sandbox) -> None:
    memory.files(sandbox.ref)["/workspace/a"] = File(b"1", mtime_ns=10**9)
    watch = watch_workspace(memory, sandbox)
    sandbox.incarnation = 2
    memory.files(sandbox.ref)["/workspace/a"] = File(b"1", mtime_ns=10**9)
    memory.write_file(sandbox.ref, "/workspace/b", b"1")
    gap, created = watch.poll(sandbox, memory)
    assert gap == WatchGap()
    assert isinstance(created, FileChange)
    assert (created.kind, created.path) == ("created", "b")
    memory.files(sandbox.ref)["/workspace/a"] = File(b"2", mtime_ns=10**9)
    assert names(watch.poll(sandbox, memory)) == [("modified", "a")]  # by its stamp again


def test_a_removed_directory_has_no_entries_until_it_exists_again(memory: MemoryProvider, sandbox: Sandbox) -> None:
    memory.write_file(sandbox.ref, "/workspace/d/a", b"1")
    watch = watch_workspace(memory, sandbox, "d")
    memory.remove_files(sandbox.ref, WORKSPACE, ["d", "d/a"])
    assert names(watch.poll(sandbox, memory)) == [("deleted", "d/a")]
    memory.write_file(sandbox.ref, "/workspace/d/b", b"1")
    assert names(watch.poll(sandbox, memory)) == [("created", "d/b")]


def test_too_many_entries_are_an_error(memory: MemoryProvider, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_watch, "MAX_ENTRIES", 1)
    watch = watch_workspace(memory, sandbox)
    for name in "ab":
        memory.write_file(sandbox.ref, f"/workspace/{name}", b"1")
    with pytest.raises(TooLarge):
        list(watch.poll(sandbox, memory))


def test_the_pause_follows_the_duration_of_a_listing(
    memory: MemoryProvider, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, times = watch_workspace(memory, sandbox), iter([0.0, 0.5, 10.0, 10.001])
    monkeypatch.setattr(file_watch.time, "monotonic", lambda: next(times))
    list(watch.poll(sandbox, memory))
    assert watch.pause_seconds == 10.0
    list(watch.poll(sandbox, memory))
    assert watch.pause_seconds == file_watch.INTERVAL_SECONDS

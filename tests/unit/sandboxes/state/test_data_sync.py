"""Synchronization of an agent's /data between its sandboxes: pull, persist, conflicts, store failures, crashes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import PurePosixPath

import pytest

from leases import execution, leasing
from leases.models import Lease
from sandboxes.errors import DataFull, SandboxBusy, StoreUnavailable
from sandboxes.models import Attachment
from sandboxes.models.state import AgentData, DataEvent, DataFile, DataObject, DataSize
from sandboxes.providers.base import DATA
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import Entry, File, Folder, Link, MemoryProvider
from sandboxes.runs.operations import Command
from sandboxes.state import data_sync, pruning
from sandboxes.state.changes import digest_manifest
from sandboxes.storage import get_store
from sandboxes.storage.base import StoreError
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW, SimulatedCrash
from tests.support.storage.state import LATER, assert_nothing_left, sandbox_of, sh

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("hand-written SQL")]


def write(lease: Lease, path: str, text: str, *, now=NOW) -> None:
    sh(lease, f"echo {text} >{DATA}/{path}", now=now)


def read(lease: Lease, path: str, *, now=NOW) -> str:
    return sh(lease, f"cat {DATA}/{path}", now=now)


def sandbox_files(lease: Lease, memory: MemoryProvider):
    """Return the files of the lease's sandbox, to inspect or modify."""
    return memory.files(sandbox_of(lease).ref)


def edit(lease: Lease, memory: MemoryProvider, changes: Mapping[str, Entry | str | None]) -> None:
    """Change files as a program that runs after its command has ended: by text or entry, or None to remove the path."""
    files = sandbox_files(lease, memory)
    for path, entry in changes.items():
        if entry is None:
            del files[f"{DATA}/{path}"]
        else:
            files[f"{DATA}/{path}"] = File(f"{entry}\n".encode()) if isinstance(entry, str) else entry


def read_tree(lease: Lease, memory: MemoryProvider) -> dict[str, Entry | str]:
    """Return the text of files, links, and directories that are empty or have an unusual mode."""
    tree = {
        path.removeprefix(f"{DATA}/"): entry.content.decode().strip() if isinstance(entry, File) else entry
        for path, entry in sandbox_files(lease, memory).items()
        if path.startswith(f"{DATA}/") and not path.startswith(f"{DATA}/skills")
    }
    parents = {str(parent) for path in tree for parent in PurePosixPath(path).parents}
    return {path: entry for path, entry in tree.items() if entry != Folder() or path not in parents}


def mark_unsaved(lease: Lease) -> None:
    """Record what another process does that cannot store the changes in the lease's sandbox."""
    attachment = data_sync.find_current(sandbox_of(lease))
    assert attachment
    data_sync.mark_unsaved(attachment, StoreError("memory", "upload", "down"), now=NOW)


def stored_row(path: str) -> DataFile:
    return DataFile.objects.get(path=path)


def live_paths() -> set[str]:
    rows = DataFile.objects.filter(removed=False).exclude(path__startswith="skills/catan/")
    return {row.path for row in rows if row.kind != "directory"}


def test_files_follow_the_agent_into_other_sandboxes(one: Lease, two: Lease, grant: Callable[..., Lease]) -> None:
    write(one, "memory/note.md", "hello")
    assert read(two, "memory/note.md") == "hello"
    leasing.release(one.pk, now=NOW)
    leasing.release(two.pk, now=NOW)
    passes.destroy_due(now=NOW + MINUTE)
    assert read(grant(environment="other"), "memory/note.md") == "hello"


def test_data_is_not_visible_to_other_agents(one: Lease, grant: Callable[..., Lease]) -> None:
    write(one, "note", "hello")
    assert "No such file" in read(grant(agent="did:plc:bob", environment="game-9"), "note")


def test_exec_without_changes_costs_one_manifest(one: Lease, memory: MemoryProvider) -> None:
    write(one, "note", "hello")
    objects, memory.calls = set(get_store().list()), []
    assert read(one, "note") == "hello"
    assert [verb for verb, _ in memory.calls] == ["exec", "manifest"]
    assert set(get_store().list()) == objects


def test_first_run_of_a_sandbox_lists_the_data_once(one: Lease, grant: Callable[..., Lease], memory: MemoryProvider) -> None:
    write(one, "note", "hello")
    other = grant(environment="other")
    execution.ensure_sandbox_ready(other.pk, now=NOW)
    memory.calls = []
    assert read(other, "note") == "hello"
    before_exec = [verb for verb, _ in memory.calls[: [verb for verb, _ in memory.calls].index("exec")]]
    assert before_exec == ["put_files", "manifest"]  # put_and_list_files


@pytest.mark.parametrize("is_changed", [False, True])
def test_exec_that_states_the_recorded_digest_costs_no_manifest(one: Lease, memory, monkeypatch, is_changed: bool) -> None:
    exec_without_digest = memory.exec

    def exec_with_digest(ref, argv, **more):
        result = exec_without_digest(ref, argv, **more)
        return replace(result, data_digest=digest_manifest(memory.manifest(ref, DATA))) if more["digest_data"] else result

    write(one, "a", "1")
    monkeypatch.setattr(memory, "exec", exec_with_digest)
    memory.calls.clear()
    sh(one, f"echo 2 >{DATA}/a" if is_changed else "true")
    manifest_count = [verb for verb, _ in memory.calls].count("manifest") - 1  # without this test's own
    assert (manifest_count > 0) == is_changed


def test_only_changed_files_are_uploaded(one: Lease, memory: MemoryProvider) -> None:
    sh(one, "true")
    edit(one, memory, {"large": File(b"x" * 300_000)})
    write(one, "small", "1")
    write(one, "small", "2")
    newest = stored_row("small").stored_in
    assert newest and newest.size_bytes < 20_000
    assert stored_row("large").stored_in_id != newest.pk


def test_modes_links_and_removals_are_pulled_by_other_sandboxes(one: Lease, two: Lease, memory: MemoryProvider) -> None:
    sh(one, "true")
    entries = {"run.sh": File(b"#!/bin/sh\n", mode=0o755), "latest": Link("/etc/passwd")}
    edit(one, memory, entries)
    write(one, "note", "hello")
    assert read(two, "note") == "hello"
    assert {path: sandbox_files(two, memory)[f"{DATA}/{path}"] for path in entries} == entries
    edit(one, memory, {"note": None})
    sh(one, "true")
    assert "No such file" in read(two, "note")
    assert stored_row("note").removed


def test_mode_change_uploads_no_content(one: Lease, memory: MemoryProvider) -> None:
    write(one, "tool", "x")
    before = stored_row("tool")
    edit(one, memory, {"tool": File(b"x\n", mode=0o755)})
    sh(one, "true")
    assert stored_row("tool").mode == 0o755 and stored_row("tool").stored_in_id == before.stored_in_id


# --- concurrent changes -----------------------------------------------------------------------------------------------


CONFLICTS = {
    "the last writer wins": (
        {"plan": "first"}, {"plan": "of one"}, {"plan": "of two"},
        {"plan": "of two", ".conflicts/one/plan": "of one"},
    ),
    "identical changes are no conflict": ({}, {"plan": "same"}, {"plan": "same"}, {"plan": "same"}),
    "an edit wins over a file that was only touched": (
        {"plan": "first"}, {"plan": "second"}, {"plan": File(b"first\n", mtime_ns=10**9)}, {"plan": "second"},
    ),
    "an edit wins over a later removal": ({"plan": "first"}, {"plan": "second"}, {"plan": None}, {"plan": "second"}),
    "an edit wins over an earlier removal": ({"plan": "first"}, {"plan": None}, {"plan": "second"}, {"plan": "second"}),
    "a file replaces an unseen directory": (
        {}, {"plan": Folder(), "plan/deep": "one"}, {"plan": "two"},
        {"plan": "two", ".conflicts/one/plan/deep": "one"},
    ),
    "a directory replaces an unseen file": (
        {}, {"plan": "one"}, {"plan": Folder(), "plan/deep": "two"},
        {"plan/deep": "two", ".conflicts/one/plan": "one"},
    ),
    "a new file wins over a link that replaced its directory": (
        {"d": Folder(), "d/old": "old"}, {"d/old": None, "d": Link("elsewhere")}, {"d/new": "new"},
        {"d/new": "new", ".conflicts/one/d": Link("elsewhere")},
    ),
    "a removed directory is restored for a new file": (
        {"d": Folder(), "d/old": "old"}, {"d/new": "new"}, {"d/old": None, "d": None}, {"d/new": "new"},
    ),
    "a file named like the conflicts directory": (
        {}, {"plan": "one"}, {".conflicts": "mine", "plan": "two"},
        {".conflicts": "mine", "plan": "two", ".conflicts.2/one/plan": "one"},
    ),
    "a directory replaces a file, stored together with a pull": (
        {"a": "hello"}, {"more": "of it"}, {"a": Folder()}, {"a": Folder(), "more": "of it"},
    ),
    "a directory's mode, stored together with a pull": (
        {"a": Folder(), "a/b": "hello"}, {"more": "of it"}, {"a": Folder(mode=0o700)},
        {"a": Folder(mode=0o700), "a/b": "hello", "more": "of it"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("base", "ones", "twos", "merged"), CONFLICTS.values(), ids=CONFLICTS)
def test_concurrent_changes_are_merged(one: Lease, two: Lease, memory: MemoryProvider, base, ones, twos, merged) -> None:
    """Both sandboxes have `base`, and change files before they see the other's changes. One is stored first."""
    sh(one, "true")
    edit(one, memory, base)
    sh(one, "true")
    sh(two, "true")
    edit(one, memory, ones)
    edit(two, memory, twos)
    for lease in (one, two, one, two):
        sh(lease, "true")
    expected = {path.replace("/one/", f"/{one.pk}/"): entry for path, entry in merged.items()}
    assert read_tree(one, memory) == read_tree(two, memory) == expected
    assert live_paths() == {path for path, entry in expected.items() if not isinstance(entry, Folder)}
    replaced = {path.partition("/one/")[2] for path in merged if "/one/" in path}
    events = DataEvent.objects.values_list("kind", "path", "holder", "agent_did")
    assert {*events} == {("conflict", path, two.pk, one.agent_did) for path in replaced}


def test_repeated_conflicts_keep_every_replaced_version(one: Lease, two: Lease, memory: MemoryProvider) -> None:
    for number in (1, 2):
        write(one, "plan", f"one-{number}")
        sh(two, "true")
        edit(two, memory, {"plan": f"two-{number}"})
        write(one, "plan", f"lost-{number}")
        sh(two, "true")
        sh(one, "true")
    assert read(one, "plan") == "two-2"
    assert read(one, f".conflicts/{one.pk}/plan") == "lost-1"
    assert read(one, f".conflicts/{one.pk}.2/plan") == "lost-2"


@pytest.mark.parametrize("left", [File(b"two\n", mtime_ns=10**9), None], ids=["changed", "removed"])
def test_change_right_after_pull_is_detected(one: Lease, two: Lease, memory, left: File | None) -> None:
    sh(two, "true")
    write(one, "plan", "one")
    with memory.after("put_files", lambda ref: edit(two, memory, {"plan": left})):
        sh(two, "true")
    assert read(one, "plan") == ("two" if left else f"cat: {DATA}/plan: No such file or directory")


def test_use_during_a_pull_of_another_process_is_refused(one: Lease, two: Lease, monkeypatch: pytest.MonkeyPatch) -> None:
    sh(two, "true")
    write(one, "plan", "one")
    Attachment.objects.filter(sandbox__holder=two.pk).update(pull_until=NOW + MINUTE)
    monkeypatch.setattr(data_sync, "PULL_WAIT_TIMEOUT", timedelta(0))
    with pytest.raises(SandboxBusy, match="still writing"):
        sh(two, "true")


def test_pull_restarts_when_its_object_is_removed_meanwhile(one: Lease, two: Lease, memory) -> None:
    write(one, "plan", "first")
    sh(two, "true")
    write(one, "plan", "second")
    newer = ["third"]

    def store_newer(ref: str) -> None:
        if newer:
            write(one, "plan", newer.pop())
            assert pruning.remove_orphans(now=LATER).counts["outdated data"]  # includes the object with "second"

    with memory.after("manifest", store_newer):
        assert read(two, "plan") == "third"


# --- store failures ---------------------------------------------------------------------------------------------------


def test_failed_scan_prevents_eviction_and_destroy(one: Lease, two: Lease, memory: MemoryProvider) -> None:
    sh(one, "true")
    edit(one, memory, {"late": "late"})
    with memory.fail("manifest", Unavailable("busy")):
        assert passes.evict_idle(now=NOW + 10 * MINUTE).failures
    assert sandbox_of(one).state == "waiting"
    assert passes.evict_idle(now=NOW + 20 * MINUTE).counts == {"put to sleep": 1}
    assert read(two, "late", now=NOW + 21 * MINUTE) == "late"
    leasing.release(two.pk, now=NOW + 22 * MINUTE)
    with memory.fail("manifest", Unavailable("busy")):
        assert passes.destroy_due(now=NOW + 23 * MINUTE).failures
    assert passes.destroy_due(now=NOW + 24 * MINUTE).counts == {"destroyed": 1}


@pytest.mark.parametrize("names", [["note"], ["note", "more"]], ids=["one object", "two objects"])
def test_corrupt_object_is_reported_and_nothing_runs(one: Lease, two: Lease, names: list[str]) -> None:
    for name in names:
        write(one, name, f"hello {name}")
        stored = stored_row(name).stored_in
        assert stored
        get_store().set(stored.key, get_store().get(stored.key).replace(b"hello", b"HELLO"))
    with pytest.raises(StoreUnavailable, match="does not match its digest"):
        sh(two, "true")
    assert DataEvent.objects.get(kind="corrupt").path in names


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "files", "message"),
    [
        ({"DATA_MOST_BYTES": 100_000}, {"large": File(b"x" * 200_000)}, "Remove files"),
        ({"DATA_MOST_FILES": 10}, {str(n): File(b"") for n in range(20)}, "more than 10"),
    ],
    ids=["bytes", "files"],
)
def test_exec_is_refused_while_data_exceeds_a_limit(one: Lease, memory, settings, limit, files, message: str) -> None:
    sh(one, "true")
    for name, value in limit.items():
        setattr(settings, name, value)
    edit(one, memory, files)
    sh(one, "true")
    assert DataEvent.objects.get(kind="full") and live_paths() == set()
    with pytest.raises(DataFull, match=message):
        sh(one, "true")

    def remove(provider, sandbox):
        for path in files:
            provider.remove_file(sandbox.ref, f"{DATA}/{path}")

    execution.call_in_sandbox(one.pk, Command(argv=["remove"], kind="file", timeout=MINUTE), remove, now=NOW)
    sh(one, "true")
    assert Attachment.objects.get().unsaved_since is None


def test_data_above_the_limit_does_not_prevent_destroy(one: Lease, memory: MemoryProvider, settings) -> None:
    sh(one, "true")
    settings.DATA_MOST_BYTES = 1000
    edit(one, memory, {"large": File(b"x" * 200_000)})
    sh(one, "true")
    leasing.release(one.pk, now=NOW)
    assert passes.destroy_due(now=NOW + MINUTE).counts == {"destroyed": 1}
    assert DataEvent.objects.filter(kind="dropped").exists()


@pytest.mark.parametrize("path", ["x" * 1001, "not\udcff-text"])
def test_unstorable_path_is_skipped_and_reported(one: Lease, memory: MemoryProvider, path: str) -> None:
    sh(one, "true")
    edit(one, memory, {path: "1", "good": "2"})
    sh(one, "true")
    sh(one, "true")
    assert live_paths() == {"good"}
    assert "Not stored" in DataEvent.objects.get(kind="left_out").detail


def test_first_use_of_a_type_seeds_its_skill(one: Lease, two: Lease, memory: MemoryProvider) -> None:
    sh(one, "true")
    assert f"{DATA}/skills/catan/prompt.md" in sandbox_files(one, memory)
    assert f"{DATA}/skills/rpg/prompt.md" not in sandbox_files(one, memory)
    assert stored_row("skills/catan/prompt.md").size_bytes
    edit(one, memory, {"skills/catan/prompt.md": None})
    sh(one, "true")
    sh(two, "true")
    assert f"{DATA}/skills/catan/prompt.md" not in sandbox_files(two, memory)  # a removed skill is not seeded again


def test_many_objects_are_repacked(one: Lease, two: Lease, memory: MemoryProvider) -> None:
    for number in range(40):
        write(one, f"note-{number}", str(number))
    assert DataObject.objects.count() < 33
    assert set(get_store().list("agents/")) == set(DataObject.objects.values_list("key", flat=True))
    sh(two, "true")
    assert read_tree(two, memory) == {f"note-{number}": str(number) for number in range(40)}


@pytest.mark.parametrize(("size", "left"), [(1, 8), (1 << 20, 1)], ids=["small", "large"])
def test_outdated_objects_are_removed(size: int, left: int, one: Lease, memory: MemoryProvider) -> None:
    sh(one, "true")
    for number in range(20):
        edit(one, memory, {"note": File(bytes([number]) * size)})
        sh(one, "true")
    pointed = {*DataFile.objects.filter(removed=False, kind="file").values_list("stored_in__key", flat=True)}
    assert pointed <= {*get_store().list("agents/")}
    assert len({*get_store().list("agents/")} - pointed) < left
    assert_nothing_left()


def test_failure_during_a_scan_without_changes_is_not_forgotten(one: Lease, memory, at_checkpoint) -> None:
    """The scan finds nothing unsaved, and another command changes a file before this is recorded."""
    sh(one, "true")
    mark_unsaved(one)
    attachment = data_sync.find_current(sandbox_of(one))

    def write_without_store(ref: str) -> None:
        if f"{DATA}/late" not in memory.files(ref):
            edit(one, memory, {"late": "late"})
            mark_unsaved(one)

    with memory.after("manifest", write_without_store):
        data_sync.persist(attachment, sandbox_of(one), memory, now=NOW)
    assert live_paths() == {"late"} and Attachment.objects.get().unsaved_since is None


def test_pull_that_another_process_disturbs_can_be_repeated_at_once(one: Lease, two: Lease, memory, monkeypatch) -> None:
    sh(two, "true")
    write(one, "plan", "one")
    monkeypatch.setattr(data_sync, "PULL_WAIT_TIMEOUT", timedelta(0))

    with memory.after("put_files", lambda ref: mark_unsaved(two)), pytest.raises(StoreUnavailable, match="meanwhile"):
        sh(two, "true")
    assert read(two, "plan") == "one"


# --- crashes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["data stored", "data recorded", "run answered"])
def test_crash_during_persist_loses_no_data_and_leaves_no_objects(step: str, one: Lease, two: Lease, at_checkpoint) -> None:
    write(one, "note", "old")
    at_checkpoint(step)
    with pytest.raises(SimulatedCrash):
        write(one, "note", "new")
    passes.recover_stalled(now=LATER)
    assert read(two, "note", now=LATER) == ("new" if step == "data recorded" else "old")
    assert read(one, "note", now=LATER) == "new"
    assert read(two, "note", now=LATER) == "new"
    assert not DataEvent.objects.filter(kind="conflict").exists()
    assert_nothing_left()


@pytest.mark.parametrize("step", ["pull decided", "pulled"])
def test_crash_during_pull_is_repaired_by_the_next_use(step: str, one: Lease, two: Lease, at_checkpoint, memory) -> None:
    write(one, "note", "good")
    sh(one, f"echo more >{DATA}/more")
    at_checkpoint(step)
    with pytest.raises(SimulatedCrash):
        read(two, "note")
    edit(two, memory, {"note": "half wri"})  # a partial write
    passes.recover_stalled(now=LATER)
    assert read(two, "note", now=LATER) == "good"
    assert read(one, "note", now=LATER) == "good"
    assert not DataEvent.objects.exists()


@pytest.mark.parametrize(
    ("sweep", "step"),
    [("evict", step) for step in ("data stored", "data recorded", "objects stored", "persisted", "process gone")]
    + [("destroy", step) for step in ("data stored", "data recorded", "destroy answered")],
)
def test_crash_while_a_sandbox_ends_keeps_the_data(
    sweep: str, step: str, one: Lease, two: Lease, at_checkpoint, memory: MemoryProvider
) -> None:
    sh(one, "true")
    edit(one, memory, {"late": "late"})
    at_checkpoint(step)
    if sweep == "evict":
        with pytest.raises(SimulatedCrash):
            passes.evict_idle(now=NOW + 10 * MINUTE)
        passes.recover_stalled(now=LATER)
    else:
        leasing.release(one.pk, now=NOW)
        with pytest.raises(SimulatedCrash):
            passes.destroy_due(now=NOW + MINUTE)
        passes.destroy_due(now=LATER)
    assert sandbox_of(one).state == ("cold" if sweep == "evict" else "destroyed")
    assert read(two, "late", now=LATER) == "late"
    if sweep == "evict":
        assert read(one, "late", now=LATER) == "late"
    assert_nothing_left()


def test_prune_keeps_young_and_foreign_objects(db: None) -> None:
    key = f"agents/did:plc:x/{NOW:%Y%m%dT%H%M%SZ}-{'0' * 32}.tar"
    get_store().set(key, b"its row is not committed yet")
    get_store().set("agents/did:plc:x/files/note", b"another key format")
    assert pruning.remove_orphans(now=NOW + timedelta(minutes=59)).counts == {}
    assert pruning.remove_orphans(now=NOW + timedelta(minutes=61)).counts == {"orphaned data": 1}
    assert set(get_store().list("agents/did:plc:x/")) == {"agents/did:plc:x/files/note"}


@pytest.fixture
def mounted(db: None) -> AgentData:
    """An agent's mounted data in the bucket."""
    data = AgentData.objects.create(agent_did="did:plc:x", keeping="mount", created_at=NOW, changed_at=NOW)
    for name, content in {"": b"", "a": b"12345", "deep/": b"", "deep/b": b"123"}.items():
        get_store().set(f"agents/did:plc:x/files/{name}", content)
    get_store().set("agents/did:plc:xy/files/c", b"of another")
    return data


def sizes() -> list[tuple[str, int]]:
    return [*DataSize.objects.order_by("pk").values_list("agent_did", "size_bytes")]


def test_mounted_data_is_measured_for_metering(mounted: AgentData) -> None:
    assert pruning.measure_mounted(now=NOW).counts == pruning.measure_mounted(now=LATER).counts == {"measured": 1}
    mounted.refresh_from_db()
    assert (mounted.files, mounted.size_bytes, sizes()) == (2, 8, [("did:plc:x", 8)])
    get_store().remove("agents/did:plc:x/files/a")
    pruning.measure_mounted(now=LATER)
    assert sizes() == [("did:plc:x", 8), ("did:plc:x", 3)]


def test_synced_data_is_not_measured(mounted: AgentData, at_checkpoint) -> None:
    at_checkpoint("data listed", lambda: AgentData.objects.update(keeping="sync"))
    assert pruning.measure_mounted(now=NOW).counts == pruning.measure_mounted(now=NOW).counts == {}
    assert sizes() == []


def test_failed_measurement_keeps_the_last_size(mounted: AgentData, monkeypatch: pytest.MonkeyPatch) -> None:
    pruning.measure_mounted(now=NOW)

    def fail(prefix: str = "") -> None:
        raise StoreError("store", "page", "down", key=prefix)

    monkeypatch.setattr(get_store(), "entries", fail)
    result = pruning.measure_mounted(now=LATER)
    assert (result.counts, len(result.failures), sizes()) == ({}, 1, [("did:plc:x", 8)])

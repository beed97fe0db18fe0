"""Synchronization of an agent's /data between its sandboxes: pull, persist, conflicts, store failures, crashes."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db.models import F

from leases import execution, leasing
from leases.models import Lease
from sandboxes import sweeps
from sandboxes.errors import DataFull, StoreUnavailable
from sandboxes.models import Attachment, Run, Sandbox
from sandboxes.models.state import AgentData, DataEvent, DataFile, DataObject, DataSize
from sandboxes.pool import find_by_holder
from sandboxes.providers.base import DATA, Unavailable
from sandboxes.providers.memory import File, Folder, Link, MemoryProvider
from sandboxes.runs import Command
from sandboxes.state import pruning
from sandboxes.storage import get_store
from sandboxes.storage.base import StoreError
from tests.conftest import MINUTE, NOW, SimulatedCrash

pytestmark = pytest.mark.django_db
LATER = NOW + timedelta(hours=1)  # every deadline has passed, no lease has


@pytest.fixture
def one(grant: Callable[..., Lease]) -> Lease:
    return grant(environment="game-1")


@pytest.fixture
def two(grant: Callable[..., Lease]) -> Lease:
    """A second sandbox of the same agent."""
    return grant(environment="game-2")


def sh(lease: Lease, line: str, *, now=NOW) -> str:
    _, result = execution.exec_command(lease.pk, Command(argv=["sh", "-c", line], timeout=MINUTE), now=now)
    return result.stdout.decode() + result.stderr.decode()


def write(lease: Lease, path: str, text: str, *, now=NOW) -> None:
    sh(lease, f"echo {text} >{DATA}/{path}", now=now)


def read(lease: Lease, path: str, *, now=NOW) -> str:
    return sh(lease, f"cat {DATA}/{path}", now=now).strip()


def sandbox_files(lease: Lease, memory: MemoryProvider):
    """Return the files of the lease's sandbox, to inspect or modify."""
    sandbox = find_by_holder(lease.pk)
    assert sandbox
    return memory.files(sandbox.ref)


def stored_row(path: str) -> DataFile:
    return DataFile.objects.get(path=path)


def live_paths() -> set[str]:
    return {row.path for row in DataFile.objects.filter(removed=False) if row.kind != "directory"} - {"skills/catan/prompt.md"}


def test_files_follow_the_agent_into_other_sandboxes(one: Lease, two: Lease) -> None:
    write(one, "memory/note.md", "hello")
    assert read(two, "memory/note.md") == "hello"
    leasing.release(one.pk, now=NOW)
    leasing.release(two.pk, now=NOW)
    sweeps.destroy_due(now=NOW + MINUTE)
    third = leasing.acquire(
        leasing.LeaseRequest(agent_did=one.agent_did, environment_id="other", environment_type="catan", pool=one.pool.name),
        now=NOW,
    )[0]
    assert read(third, "memory/note.md") == "hello"


def test_data_is_not_visible_to_other_agents(one: Lease, grant: Callable[..., Lease]) -> None:
    write(one, "note", "hello")
    assert "No such file" in read(grant(agent="did:plc:bob", environment="game-9"), "note")


def test_exec_without_changes_costs_one_manifest(one: Lease, memory: MemoryProvider) -> None:
    write(one, "note", "hello")
    objects, memory.calls = set(get_store().list()), []
    assert read(one, "note") == "hello"
    assert [verb for verb, _ in memory.calls] == ["exec", "manifest"]
    assert set(get_store().list()) == objects


def test_only_changed_files_are_uploaded(one: Lease, memory: MemoryProvider) -> None:
    sh(one, "true")
    sandbox_files(one, memory)[f"{DATA}/large"] = File(b"x" * 300_000)
    write(one, "small", "1")
    write(one, "small", "2")
    newest = stored_row("small").stored_in
    assert newest and newest.size_bytes < 20_000
    assert stored_row("large").stored_in_id != newest.pk


def test_removal_is_pulled_by_other_sandboxes(one: Lease, two: Lease, memory: MemoryProvider) -> None:
    write(one, "note", "hello")
    assert read(two, "note") == "hello"
    del sandbox_files(one, memory)[f"{DATA}/note"]
    sh(one, "true")
    assert "No such file" in read(two, "note")
    assert stored_row("note").removed


def test_modes_and_links_are_preserved(one: Lease, two: Lease, memory: MemoryProvider) -> None:
    sh(one, "true")
    files = sandbox_files(one, memory)
    files[f"{DATA}/run.sh"], files[f"{DATA}/latest"] = File(b"#!/bin/sh\n", mode=0o755), Link("/etc/passwd")
    sh(one, "true")
    sh(two, "true")
    files_of_two = sandbox_files(two, memory)
    assert files_of_two[f"{DATA}/run.sh"] == files[f"{DATA}/run.sh"]
    assert files_of_two[f"{DATA}/latest"] == Link("/etc/passwd")


def test_mode_change_uploads_no_content(one: Lease, memory: MemoryProvider) -> None:
    write(one, "tool", "x")
    before = stored_row("tool")
    files = sandbox_files(one, memory)
    files[f"{DATA}/tool"] = File(b"x\n", mode=0o755)
    sh(one, "true")
    assert stored_row("tool").mode == 0o755 and stored_row("tool").stored_in_id == before.stored_in_id


# --- concurrent changes -----------------------------------------------------------------------------------------------


def test_last_writer_wins_and_the_other_version_is_kept_as_conflict(one: Lease, two: Lease, memory) -> None:
    write(one, "plan", "first")
    assert read(two, "plan") == "first"
    sandbox_files(two, memory)[f"{DATA}/plan"] = File(b"of two\n")  # by a program that is still running
    write(one, "plan", "of one")
    sh(two, "true")
    assert read(one, "plan") == read(two, "plan") == "of two"
    assert read(one, f".conflicts/{one.pk}/plan") == "of one"
    event = DataEvent.objects.get(kind="conflict")
    assert (event.path, event.holder, event.agent_did) == ("plan", two.pk, one.agent_did)


def test_identical_concurrent_changes_are_no_conflict(one: Lease, two: Lease, memory: MemoryProvider) -> None:
    sh(two, "true")
    sandbox_files(two, memory)[f"{DATA}/plan"] = File(b"same\n")
    write(one, "plan", "same")
    sh(two, "true")
    assert not DataEvent.objects.exists() and read(one, "plan") == "same"


def test_edit_wins_over_later_removal(one: Lease, two: Lease, memory: MemoryProvider) -> None:
    write(one, "plan", "first")
    assert read(two, "plan") == "first"
    del sandbox_files(two, memory)[f"{DATA}/plan"]
    write(one, "plan", "second")
    sh(two, "true")
    assert read(two, "plan") == read(one, "plan") == "second"


def test_edit_wins_over_earlier_removal(one: Lease, two: Lease, memory: MemoryProvider) -> None:
    write(one, "plan", "first")
    assert read(two, "plan") == "first"
    del sandbox_files(one, memory)[f"{DATA}/plan"]
    sandbox_files(two, memory)[f"{DATA}/plan"] = File(b"second\n")
    sh(one, "true")
    sh(two, "true")
    assert read(one, "plan") == "second"


def test_repeated_conflicts_keep_every_replaced_version(one: Lease, two: Lease, memory: MemoryProvider) -> None:
    for number in (1, 2):
        write(one, "plan", f"one-{number}")
        sh(two, "true")
        sandbox_files(two, memory)[f"{DATA}/plan"] = File(f"two-{number}\n".encode())
        write(one, "plan", f"lost-{number}")
        sh(two, "true")
        sh(one, "true")
    assert read(one, "plan") == "two-2"
    assert read(one, f".conflicts/{one.pk}/plan") == "lost-1"
    assert read(one, f".conflicts/{one.pk}.2/plan") == "lost-2"


def test_file_replaces_unseen_directory_whose_files_become_conflict_copies(one: Lease, two: Lease, memory) -> None:
    sh(two, "true")
    sandbox_files(two, memory)[f"{DATA}/plan"] = File(b"two\n")
    write(one, "plan/deep", "one")
    sh(two, "true")
    assert read(one, "plan") == read(two, "plan") == "two"
    assert read(two, f".conflicts/{one.pk}/plan/deep") == "one"
    assert live_paths() == {"plan", f".conflicts/{one.pk}/plan/deep"}


def test_directory_replaces_unseen_file_which_becomes_a_conflict_copy(one: Lease, two: Lease, memory) -> None:
    sh(two, "true")
    files = sandbox_files(two, memory)
    files[f"{DATA}/plan"], files[f"{DATA}/plan/deep"] = Folder(), File(b"two\n")
    write(one, "plan", "one")
    sh(two, "true")
    assert read(one, "plan/deep") == read(two, "plan/deep") == "two"
    assert read(two, f".conflicts/{one.pk}/plan") == "one"


def test_new_file_in_directory_wins_over_link_that_replaced_the_directory(one: Lease, two: Lease, memory) -> None:
    write(one, "d/old", "old")
    sh(two, "true")
    files = sandbox_files(one, memory)
    del files[f"{DATA}/d/old"]
    files[f"{DATA}/d"] = Link("elsewhere")
    sandbox_files(two, memory)[f"{DATA}/d/new"] = File(b"new\n")
    sh(one, "true")
    sh(two, "true")
    sh(two, "true")
    assert read(one, "d/new") == read(two, "d/new") == "new"
    assert sandbox_files(one, memory)[f"{DATA}/.conflicts/{one.pk}/d"] == Link("elsewhere")


def test_removed_directory_is_restored_for_a_concurrent_new_file(one: Lease, two: Lease, memory) -> None:
    write(one, "d/old", "old")
    sh(two, "true")
    files = sandbox_files(one, memory)
    del files[f"{DATA}/d/old"], files[f"{DATA}/d"]
    sandbox_files(two, memory)[f"{DATA}/d/new"] = File(b"new\n")
    sh(two, "true")
    for lease in (one, two):
        sh(lease, "true")
    assert read(one, "d/new") == "new"
    assert f"{DATA}/d/old" not in sandbox_files(one, memory) and f"{DATA}/d/old" not in sandbox_files(two, memory)


def test_file_named_like_the_conflicts_directory_does_not_lose_conflict_copies(
    one: Lease, two: Lease, memory: MemoryProvider
) -> None:
    sh(two, "true")
    files = sandbox_files(two, memory)
    files[f"{DATA}/.conflicts"], files[f"{DATA}/plan"] = File(b"mine\n"), File(b"two\n")
    write(one, "plan", "one")
    sh(two, "true")
    for lease in (one, two):
        assert read(lease, ".conflicts") == "mine"
        assert read(lease, "plan") == "two"
        assert read(lease, f".conflicts.2/{one.pk}/plan") == "one"


@pytest.mark.parametrize("entry", [Folder(), Folder(mode=0o700)], ids=["for a file", "with another mode"])
def test_directory_change_is_stored_together_with_a_pull(entry: Folder, one: Lease, two: Lease, memory: MemoryProvider) -> None:
    write(one, "a", "hello") if entry.mode == 0o755 else write(one, "a/b", "hello")
    sh(two, "true")
    sandbox_files(two, memory)[f"{DATA}/a"] = entry
    write(one, "more", "of it")
    sh(two, "true")
    sh(one, "true")
    files = sandbox_files(one, memory)[f"{DATA}/a"]
    assert isinstance(files, Folder) and files.mode == entry.mode


@pytest.mark.parametrize("left", [b"two\n", None], ids=["changed", "removed"])
def test_change_right_after_pull_is_detected(one: Lease, two: Lease, memory, left) -> None:
    sh(two, "true")
    write(one, "plan", "one")

    def change(ref: str) -> None:
        if left:
            memory.files(ref)[f"{DATA}/plan"] = File(left, mtime=1)
        else:
            del memory.files(ref)[f"{DATA}/plan"]

    with memory.after("put_files", change):
        sh(two, "true")
    assert read(one, "plan") == ("two" if left else f"cat: {DATA}/plan: No such file or directory")


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


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """broken("upload") makes this method of the store fail from now on; broken() makes all methods work again."""
    originals = {name: getattr(type(get_store()), name) for name in ("upload", "download", "remove")}

    def break_methods(*names: str) -> None:
        for name, method in originals.items():
            monkeypatch.setattr(type(get_store()), name, method)
        for name in names:

            def fail(*args: object, _name: str = name, **more: object) -> None:
                raise StoreError("filesystem", _name, "out of order")

            monkeypatch.setattr(type(get_store()), name, fail)

    return break_methods


def test_unsaved_changes_are_stored_by_a_later_sweep(one: Lease, two: Lease, broken) -> None:
    sh(one, "true")
    broken("upload")
    write(one, "note", "hello")  # the command has run: its result stands
    assert Attachment.objects.get(sandbox__holder=one.pk).unsaved_since
    assert Run.objects.filter(outcome="ok", note__contains="not stored yet").count() == 1
    assert pruning.persist_unsaved(now=NOW + MINUTE).failures
    broken()
    assert pruning.persist_unsaved(now=NOW + 2 * MINUTE).counts == {"stored": 1}
    assert pruning.persist_unsaved(now=NOW + 3 * MINUTE).counts == {}
    assert read(two, "note") == "hello"


def test_sandbox_is_not_destroyed_before_its_data_is_stored(one: Lease, two: Lease, broken, memory: MemoryProvider) -> None:
    sh(one, "true")
    broken("upload")
    write(one, "note", "hello")
    leasing.release(one.pk, now=NOW + MINUTE)
    assert sweeps.destroy_due(now=NOW + 2 * MINUTE).failures
    sandbox = Sandbox.objects.get(holder=one.pk)
    assert sandbox.state == "destroying" and "out of order" in sandbox.last_error and memory.files(sandbox.ref)
    broken()
    assert sweeps.destroy_due(now=LATER).counts == {"destroyed": 1}
    assert read(two, "note", now=LATER) == "hello"


def test_sandbox_is_not_evicted_while_its_data_cannot_be_stored(one: Lease, broken) -> None:
    broken("upload")
    write(one, "note", "hello")
    assert sweeps.evict_idle(now=NOW + 10 * MINUTE).failures
    assert Sandbox.objects.get(holder=one.pk).state == "waiting"


def test_sandbox_is_not_evicted_while_its_data_cannot_be_scanned(one: Lease, two: Lease, memory: MemoryProvider) -> None:
    sh(one, "true")
    sandbox_files(one, memory)[f"{DATA}/late"] = File(b"late\n")  # by a background program, after its command has ended
    with memory.fail("manifest", Unavailable("busy")):
        assert sweeps.evict_idle(now=NOW + 10 * MINUTE).failures
    assert Sandbox.objects.get(holder=one.pk).state == "waiting"
    assert sweeps.evict_idle(now=NOW + 20 * MINUTE).counts == {"put to sleep": 1}
    assert read(two, "late", now=NOW + 21 * MINUTE) == "late"


def test_command_is_not_run_without_its_data(one: Lease, two: Lease, broken, memory: MemoryProvider) -> None:
    write(one, "note", "hello")
    broken("download")
    with pytest.raises(StoreUnavailable):
        sh(two, "echo ran >/workspace/ran")
    assert "/workspace/ran" not in sandbox_files(two, memory)
    broken()
    assert read(two, "note") == "hello"


def test_corrupt_object_is_reported_and_nothing_runs(one: Lease, two: Lease) -> None:
    write(one, "note", "hello")
    stored = stored_row("note").stored_in
    assert stored
    get_store().set(stored.key, get_store().get(stored.key).replace(b"hello", b"HELLO"))
    with pytest.raises(StoreUnavailable, match="does not match its digest"):
        sh(two, "true")
    assert DataEvent.objects.get(kind="corrupt").path == "note"


def test_one_of_two_corrupt_objects_is_reported(one: Lease, two: Lease) -> None:
    for name in ("note", "more"):
        write(one, name, f"hello {name}")
        stored = stored_row(name).stored_in
        assert stored
        get_store().set(stored.key, get_store().get(stored.key).replace(b"hello", b"HELLO"))
    with pytest.raises(StoreUnavailable, match="does not match its digest"):
        sh(two, "true")
    assert DataEvent.objects.get(kind="corrupt").path in ("note", "more")


def test_failed_pull_does_not_overwrite_changes_of_the_sandbox(one: Lease, two: Lease, broken, memory: MemoryProvider) -> None:
    write(one, "note", "old")
    sh(two, "true")
    write(one, "note", "new")
    broken("download")
    with pytest.raises(StoreUnavailable):
        sh(two, "true")
    sandbox_files(two, memory)[f"{DATA}/note"] = File(b"two\n")  # programs keep running while the store fails
    broken()
    assert read(two, "note") == read(one, "note") == "two"
    assert read(one, f".conflicts/{one.pk}/note") == "new"


def test_changes_are_stored_before_destroy(one: Lease, two: Lease, memory: MemoryProvider) -> None:
    sh(one, "true")
    sandbox_files(one, memory)[f"{DATA}/late"] = File(b"late\n")  # by a background program, after its command has ended
    leasing.release(one.pk, now=NOW)
    sweeps.destroy_due(now=NOW + MINUTE)
    assert read(two, "late") == "late"


# --- limits -----------------------------------------------------------------------------------------------------------


def test_exec_is_refused_while_data_exceeds_the_byte_limit(one: Lease, memory: MemoryProvider, settings) -> None:
    sh(one, "true")
    settings.DATA_MOST_BYTES = 100_000
    sandbox_files(one, memory)[f"{DATA}/large"] = File(b"x" * 200_000)
    sh(one, "true")
    assert DataEvent.objects.get(kind="full") and not DataFile.objects.filter(path="large").exists()
    with pytest.raises(DataFull, match="Remove files"):
        sh(one, "true")
    sandbox = find_by_holder(one.pk)
    assert sandbox

    def remove(provider, sandbox):
        provider.remove_file(sandbox.ref, f"{DATA}/large")

    execution.call_in_sandbox(one.pk, Command(argv=["remove"], kind="file", timeout=MINUTE), remove, now=NOW)
    sh(one, "true")
    assert Attachment.objects.get().unsaved_since is None


def test_exec_is_refused_while_data_exceeds_the_file_limit(one: Lease, memory: MemoryProvider, settings) -> None:
    sh(one, "true")
    settings.DATA_MOST_FILES = 10
    sandbox_files(one, memory).update({f"{DATA}/{n}": File(b"") for n in range(20)})
    sh(one, "true")
    with pytest.raises(DataFull, match="more than 10"):
        sh(one, "true")


def test_data_above_the_limit_does_not_prevent_destroy(one: Lease, memory: MemoryProvider, settings) -> None:
    sh(one, "true")
    settings.DATA_MOST_BYTES = 1000
    sandbox_files(one, memory)[f"{DATA}/large"] = File(b"x" * 200_000)
    sh(one, "true")
    leasing.release(one.pk, now=NOW)
    assert sweeps.destroy_due(now=NOW + MINUTE).counts == {"destroyed": 1}
    assert DataEvent.objects.filter(kind="dropped").exists()


@pytest.mark.parametrize("path", ["x" * 1001, "not\udcff-text"])
def test_unstorable_path_is_skipped_and_reported(one: Lease, memory: MemoryProvider, path: str) -> None:
    sh(one, "true")
    sandbox_files(one, memory).update({f"{DATA}/{path}": File(b"1"), f"{DATA}/good": File(b"2")})
    sh(one, "true")
    sh(one, "true")
    assert live_paths() == {"good"}
    assert "Not stored" in DataEvent.objects.get(kind="left_out").detail


def test_first_use_of_a_type_seeds_its_skill(one: Lease, memory: MemoryProvider) -> None:
    sh(one, "true")
    assert f"{DATA}/skills/catan/prompt.md" in sandbox_files(one, memory)
    assert f"{DATA}/skills/rpg/prompt.md" not in sandbox_files(one, memory)
    assert stored_row("skills/catan/prompt.md").size_bytes


def test_removed_skill_is_not_seeded_again(one: Lease, two: Lease, memory: MemoryProvider) -> None:
    sh(one, "true")
    del sandbox_files(one, memory)[f"{DATA}/skills/catan/prompt.md"]
    sh(one, "true")
    sh(two, "true")
    assert f"{DATA}/skills/catan/prompt.md" not in sandbox_files(two, memory)


def test_many_objects_are_repacked(one: Lease, two: Lease) -> None:
    for number in range(40):
        write(one, f"note-{number}", str(number))
    assert DataObject.objects.count() < 33
    assert set(get_store().list("agents/")) == set(DataObject.objects.values_list("key", flat=True))
    assert [read(two, f"note-{number}") for number in range(40)] == [str(number) for number in range(40)]


@pytest.mark.parametrize(("size", "left"), [(1, 8), (1 << 20, 1)], ids=["small", "large"])
def test_outdated_objects_are_removed(size: int, left: int, one: Lease, memory: MemoryProvider) -> None:
    sh(one, "true")
    for number in range(20):
        sandbox_files(one, memory)[f"{DATA}/note"] = File(bytes([number]) * size)
        sh(one, "true")
    pointed = {*DataFile.objects.filter(removed=False, kind="file").values_list("stored_in__key", flat=True)}
    assert pointed <= {*get_store().list("agents/")}
    assert len({*get_store().list("agents/")} - pointed) < left
    assert_nothing_left()


# --- crashes ----------------------------------------------------------------------------------------------------------


def die() -> None:
    raise SimulatedCrash


@pytest.mark.parametrize("step", ["data stored", "data recorded", "run answered"])
def test_crash_during_persist_loses_no_data_and_leaves_no_objects(step: str, one: Lease, two: Lease, at_checkpoint) -> None:
    write(one, "note", "old")
    at_checkpoint(step, die)
    with pytest.raises(SimulatedCrash):
        write(one, "note", "new")
    sweeps.recover_stalled(now=LATER)
    assert read(two, "note", now=LATER) == ("new" if step == "data recorded" else "old")
    assert read(one, "note", now=LATER) == "new"
    assert read(two, "note", now=LATER) == "new"
    assert not DataEvent.objects.filter(kind="conflict").exists()
    assert_nothing_left()


@pytest.mark.parametrize("step", ["pull decided", "pulled"])
def test_crash_during_pull_is_repaired_by_the_next_use(step: str, one: Lease, two: Lease, at_checkpoint, memory) -> None:
    write(one, "note", "good")
    sh(one, f"echo more >{DATA}/more")
    at_checkpoint(step, die)
    with pytest.raises(SimulatedCrash):
        read(two, "note")
    sandbox_files(two, memory)[f"{DATA}/note"] = File(b"half wri")  # a partial write
    sweeps.recover_stalled(now=LATER)
    assert read(two, "note", now=LATER) == "good"
    assert read(one, "note", now=LATER) == "good"
    assert not DataEvent.objects.exists()


@pytest.mark.parametrize("step", ["data stored", "data recorded", "objects stored", "persisted", "process gone"])
def test_crash_during_eviction_keeps_the_data(step: str, one: Lease, two: Lease, at_checkpoint, memory) -> None:
    sh(one, "true")
    sandbox_files(one, memory)[f"{DATA}/late"] = File(b"late\n")
    at_checkpoint(step, die)
    with pytest.raises(SimulatedCrash):
        sweeps.evict_idle(now=NOW + 10 * MINUTE)
    sweeps.recover_stalled(now=LATER)
    assert Sandbox.objects.get(holder=one.pk).state == "cold"
    assert read(two, "late", now=LATER) == "late" and read(one, "late", now=LATER) == "late"
    assert_nothing_left()


@pytest.mark.parametrize("step", ["data stored", "data recorded", "destroy answered"])
def test_crash_during_destroy_keeps_the_data(step: str, one: Lease, two: Lease, at_checkpoint, memory) -> None:
    sh(one, "true")
    sandbox_files(one, memory)[f"{DATA}/late"] = File(b"late\n")
    leasing.release(one.pk, now=NOW)
    at_checkpoint(step, die)
    with pytest.raises(SimulatedCrash):
        sweeps.destroy_due(now=NOW + MINUTE)
    sweeps.destroy_due(now=LATER)
    assert Sandbox.objects.get(holder=one.pk).state == "destroyed"
    assert read(two, "late", now=LATER) == "late"
    assert_nothing_left()


def test_failed_final_scan_does_not_prevent_destroy_of_saved_data(one: Lease, memory) -> None:
    write(one, "note", "stored")
    leasing.release(one.pk, now=NOW)
    with memory.fail("manifest", Unavailable("busy")):
        assert sweeps.destroy_due(now=NOW + MINUTE).counts == {"destroyed": 1}


def assert_nothing_left() -> None:
    """After a prune the store contains exactly the objects that rows point to."""
    pruning.remove_orphans(now=LATER + timedelta(days=1), grace=timedelta(0))
    assert set(get_store().list("agents/")) == set(DataObject.objects.values_list("key", flat=True))
    pointed = DataFile.objects.filter(removed=False, kind="file").values_list("stored_in", flat=True)
    assert set(DataObject.objects.values_list("pk", flat=True)) == set(pointed)


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


def test_totals_match_the_stored_files(one: Lease, memory: MemoryProvider) -> None:
    sh(one, "true")
    sandbox_files(one, memory).update({f"{DATA}/a": File(b"12345"), f"{DATA}/deep/b": File(b"123")})
    sh(one, "true")
    data = AgentData.objects.get()
    skill = stored_row("skills/catan/prompt.md").size_bytes
    assert (data.files, data.size_bytes) == (3, 8 + skill)
    assert Attachment.objects.get(data=data, revision=F("data__revision"))

"""A database that lost its last changes: later incarnations and snapshots are kept, and nothing is mixed up.

A rollback to a savepoint loses the changes. The engine, the store and the state directory keep what was done since."""

import io
from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import transaction

from controlplane import schedules
from leases import leasing, snapshots
from leases.models import Lease, LeaseEvent
from sandboxes import installation_marks
from sandboxes.errors import SandboxNotReady
from sandboxes.models import Installation, Run, Sandbox
from sandboxes.models.state import DataEvent, DataFile, Snapshot
from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider
from sandboxes.state import pruning, unrecorded_data, workspace
from sandboxes.storage import get_store
from sandboxes.storage.base import StoreError
from sandboxes.storage.memory import MemoryStore
from sandboxes.sweeps import installation, passes, reconciliation
from tests.conftest import MINUTE, NOW
from tests.support.actors import console_user
from tests.support.leases import evict, get_sandbox, read, run, write

pytestmark = pytest.mark.django_db
LATER = NOW + timedelta(days=3650)  # than the clock of the memory provider


@pytest.fixture
def cold(grant: Callable[..., Lease]) -> Lease:
    """A lease whose sandbox is cold, with `one` in the file."""
    granted: Lease = grant()
    write(granted, "one")
    evict(granted)
    return granted


@pytest.fixture
def lose_changes() -> Callable[[], None]:
    """A function that takes the database back to the time of this fixture: name it after the fixtures of that time."""
    return lose_changes_from_now()


def lose_changes_from_now() -> Callable[[], None]:
    assert not schedules.run_sweep("mark", now=NOW).failures
    before = transaction.savepoint()

    def rollback() -> None:
        transaction.savepoint_rollback(before)

    return rollback


def find_found(lease: Lease) -> list[Snapshot]:
    return list(Snapshot.objects.filter(holder=lease.pk, kind="found"))


def reconcile() -> list[str]:
    return reconciliation.reconcile(now=LATER, grace=MINUTE).failures


def restore_found(lease: Lease) -> str:
    [found] = find_found(lease)
    snapshots.restore_snapshot(lease.pk, found.pk, now=NOW + 5 * MINUTE)
    return read(lease, now=NOW + 6 * MINUTE)


def sh(lease: Lease, line: str, *, now: datetime = NOW) -> str:
    result = run(lease, "sh", "-c", line, now=now)
    assert result.exit_code == 0, result
    return result.stdout.decode().strip()


def list_copies() -> set[str]:
    """Return the paths of the copies in `.conflicts`, below the directory of their sandbox or object."""
    live = DataFile.objects.filter(path__startswith=".conflicts/", removed=False).exclude(kind="directory")
    return {path.split("/", 2)[2] for path in live.values_list("path", flat=True)}


def test_names_of_two_lives_of_one_incarnation_differ(cold: Lease, lose_changes: Callable[[], None]) -> None:
    write(cold, "two")
    first = get_sandbox(cold)
    lose_changes()
    run(cold)
    second = get_sandbox(cold)
    assert (first.pk, first.incarnation) == (second.pk, second.incarnation)
    assert first.name != second.name


def test_wake_leaves_the_later_incarnation_alone_keeps_its_files_and_says_so(
    cold: Lease, lose_changes: Callable[[], None], memory: MemoryProvider
) -> None:
    write(cold, "two")
    later = get_sandbox(cold).ref
    lose_changes()
    assert read(cold, now=NOW + MINUTE) == "one"
    finished = Run.objects.latest("started_at", "pk")
    assert memory.read_file(later, "/workspace/f", limit=9) == b"two\n"
    [found] = find_found(cold)
    assert str(found.pk) in finished.note
    assert "lost" in finished.note
    assert str(found.pk) in DataEvent.objects.get(kind="found").detail
    assert "lost" in LeaseEvent.objects.filter(lease=cold).latest("pk").reason
    assert "lacks changes" in installation_marks.get_installation().mismatch
    read(cold, now=NOW + MINUTE)
    evict(cold, now=NOW + 2 * MINUTE)
    read(cold, now=NOW + 3 * MINUTE)
    assert not Run.objects.exclude(pk=finished.pk).exclude(note="").exists()
    assert restore_found(cold) == "two"


def test_wake_keeps_the_later_snapshot_in_the_store_and_says_so(cold: Lease, lose_changes: Callable[[], None]) -> None:
    write(cold, "two")
    evict(cold)
    lose_changes()
    assert read(cold, now=NOW + MINUTE) == "one"
    finished = Run.objects.latest("started_at", "pk")
    assert str(find_found(cold)[0].pk) in finished.note
    assert restore_found(cold) == "two"


def test_wake_starts_nothing_while_files_of_a_later_incarnation_cannot_be_kept(
    cold: Lease, lose_changes: Callable[[], None], memory: MemoryProvider
) -> None:
    write(cold, "two")
    lose_changes()
    with memory.fail("get_files", Unavailable("cut"), times=1), pytest.raises(SandboxNotReady, match="lost"):
        run(cold)
    assert (get_sandbox(cold).state, find_found(cold)) == ("cold", [])
    assert read(cold) == "one"
    assert len(find_found(cold)) == 1


@pytest.mark.postgres("lengths of columns")
@pytest.mark.parametrize("sleeps", [1, 2], ids=["running again", "stored"])
def test_awake_sandbox_that_is_gone_goes_on_from_the_later_files(
    sleeps: int, grant: Callable[..., Lease], memory: MemoryProvider
) -> None:
    lease = grant()
    write(lease, "one")
    lose_changes = lose_changes_from_now()
    evict(lease)
    write(lease, "two", now=NOW + MINUTE)
    if sleeps > 1:
        evict(lease, now=NOW + MINUTE)
    lose_changes()
    with pytest.raises(SandboxNotReady, match="next use"):
        run(lease, now=NOW + 2 * MINUTE)
    assert read(lease, now=NOW + 3 * MINUTE) == "two"
    assert "lost" in Run.objects.latest("started_at").note
    assert not Sandbox.objects.exclude(lost_at=None).exists()


def test_reconcile_keeps_the_files_of_a_later_incarnation_before_it_destroys_the_sandbox(
    cold: Lease, lose_changes: Callable[[], None], memory: MemoryProvider
) -> None:
    write(cold, "two")
    later = get_sandbox(cold).ref
    lose_changes()
    assert "lacks changes" in schedules.run_sweep("reconcile", now=LATER).failures[0]
    assert later in memory._sandboxes
    installation.confirm(now=NOW, actor=console_user("operator"))
    with memory.fail("get_files", Unavailable("cut"), times=1):
        assert "could not be kept" in reconcile()[0]
    assert later in memory._sandboxes
    assert reconcile() == []
    assert later not in memory._sandboxes
    assert restore_found(cold) == "two"


def test_reconcile_keeps_files_even_if_the_lease_has_had_later_incarnations_since(
    cold: Lease, lose_changes: Callable[[], None]
) -> None:
    write(cold, "two")
    lose_changes()
    installation.confirm(now=NOW, actor=console_user("operator"))
    for content in ("other", "another"):
        write(cold, content)
        evict(cold)
    assert get_sandbox(cold).incarnation == 3
    assert reconcile() == []
    assert restore_found(cold) == "two"


def test_remains_of_a_recorded_incarnation_are_destroyed_without_a_snapshot(
    grant: Callable[..., Lease], memory: MemoryProvider
) -> None:
    lease = grant()
    recorded = write(lease, "one")
    leasing.release(lease.pk, now=NOW)
    passes.destroy_due(now=NOW)
    memory.create(SandboxSpec(recorded.ref, str(lease.pool.owner)))
    memory.create(SandboxSpec(f"leasehold-{recorded.pk.hex}-0", str(lease.pool.owner)))
    assert reconcile() == []
    assert (memory._sandboxes, find_found(lease)) == ({}, [])


@pytest.mark.parametrize("is_stored", [False, True], ids=["not stored", "stored"])
def test_changes_in_data_of_a_later_incarnation_are_kept_beside_the_current_ones(
    is_stored: bool, grant: Callable[..., Lease], memory: MemoryProvider, memory_store: MemoryStore
) -> None:
    lease = grant()
    sh(lease, "echo one >/data/f; echo same >/data/d/same; echo gone >/data/gone; ln -s f /data/link")
    evict(lease)
    lose_changes = lose_changes_from_now()
    run(lease, now=NOW)
    name = get_sandbox(lease).name
    memory.remove_files(name, "/data", ["gone", "link"])
    with nullcontext() if is_stored else memory_store.fail("upload", StoreError("memory", "upload", "disk full")):
        sh(lease, "echo two >/data/f; echo new >/data/d/new; ln -s d /data/link")
    lose_changes()
    assert sh(lease, "cat /data/f /data/gone /data/d/same", now=NOW + MINUTE) == "one\ngone\nsame"
    finished = Run.objects.latest("started_at", "pk")
    assert f"3 files of /data of {name}" in finished.note
    assert f"were kept in /data/.conflicts/{name}." in finished.note
    assert list_copies() == {"d/new", "f", "link"}
    assert sh(lease, f"cat /data/.conflicts/{name}/f /data/.conflicts/{name}/d/new", now=NOW + MINUTE) == "two\nnew"
    installation.confirm(now=NOW, actor=console_user("operator"))
    assert reconcile() == []
    assert name not in memory._sandboxes
    assert list_copies() == {"d/new", "f", "link"}


def test_changes_in_data_of_a_sandbox_that_slept_again_are_kept_from_the_store_once(
    grant: Callable[..., Lease], memory: MemoryProvider
) -> None:
    lease = grant()
    sh(lease, "echo one >/data/f")
    evict(lease)
    lose_changes = lose_changes_from_now()
    sh(lease, "echo two >/data/f")
    evict(lease)
    lose_changes()
    assert sh(lease, "cat /data/f", now=NOW + MINUTE) == "one"
    assert "1 files of an object of /data" in Run.objects.latest("started_at", "pk").note
    [copy] = DataFile.objects.filter(path__startswith=".conflicts/stored-", kind="file")
    assert sh(lease, f"cat /data/{copy.path}", now=NOW + MINUTE) == "two"
    memory.remove_files(get_sandbox(lease).ref, "/data", [copy.path, copy.path.removesuffix("/f"), ".conflicts"])
    run(lease, now=NOW + MINUTE)
    evict(lease, now=NOW + 2 * MINUTE)
    run(lease, now=NOW + 3 * MINUTE)
    assert list_copies() == set()


def test_sandbox_whose_changes_in_data_find_no_room_is_not_destroyed(
    grant: Callable[..., Lease], memory: MemoryProvider, settings
) -> None:
    lease = grant()
    sh(lease, "echo one >/data/f")
    evict(lease)
    lose_changes = lose_changes_from_now()
    sh(lease, "echo two >/data/f")
    later = get_sandbox(lease).ref
    lose_changes()
    limit, settings.DATA_MOST_BYTES = settings.DATA_MOST_BYTES, 7
    assert sh(lease, "cat /data/f", now=NOW + MINUTE) == "one"
    assert "are not kept elsewhere" in Run.objects.latest("started_at", "pk").note
    installation.confirm(now=NOW, actor=console_user("operator"))
    assert "could not be kept" in reconcile()[0]
    assert later in memory._sandboxes
    settings.DATA_MOST_BYTES = limit
    assert reconcile() == []
    assert later not in memory._sandboxes
    assert list_copies() == {"f"}


def test_confirmation_keeps_changes_in_data_of_agents_without_a_wake(
    grant: Callable[..., Lease], memory: MemoryProvider, settings, capsys
) -> None:
    lease = grant()
    sh(lease, "echo one >/data/f")
    evict(lease)
    lose_changes = lose_changes_from_now()
    sh(lease, "echo two >/data/f")
    evict(lease)
    other = grant("did:plc:later", "game-9")  # an agent that the database does not know any more
    sh(other, "echo three >/data/g")
    evict(other)
    lose_changes()
    limit, settings.DATA_MOST_BYTES = settings.DATA_MOST_BYTES, 7
    with pytest.raises(CommandError, match=r"(?s)Nothing was confirmed.*did:plc:ada: "):
        call_command("installation", "confirm", "--yes")
    assert installation_marks.find_mismatch()
    settings.DATA_MOST_BYTES = limit
    call_command("installation", "confirm", "--yes")
    assert "files of agents' data kept as copies" in capsys.readouterr().out
    assert installation_marks.find_mismatch() == ""
    copies = DataFile.objects.filter(path__startswith=".conflicts", kind="file")
    assert {*copies.values_list("data__agent_did", "holder")} == {("did:plc:ada", None), ("did:plc:later", None)}
    assert len(find_found(lease)) == 1
    assert pruning.remove_orphans(now=NOW + timedelta(hours=2)).failures == []
    [copy] = copies.filter(data__agent_did=lease.agent_did)
    assert sh(lease, f"cat /data/f /data/{copy.path}", now=NOW + MINUTE) == "one\ntwo"
    assert "was kept as the snapshot" in Run.objects.latest("started_at", "pk").note


def test_confirmation_may_discard_what_cannot_be_kept(grant: Callable[..., Lease], memory: MemoryProvider, settings) -> None:
    lease = grant()
    sh(lease, "echo one >/data/f")
    evict(lease)
    lose_changes = lose_changes_from_now()
    sh(lease, "echo two >/data/f")
    evict(lease)
    lose_changes()
    settings.DATA_MOST_BYTES = 7
    call_command("installation", "confirm", "--yes", "--discard")
    assert installation_marks.find_mismatch() == "" and list_copies() == set()


def test_object_of_lost_changes_that_is_not_readable_is_an_event(
    grant: Callable[..., Lease], memory: MemoryProvider, memory_store: MemoryStore
) -> None:
    lease = grant()
    sh(lease, "echo one >/data/f")
    evict(lease)
    lose_changes = lose_changes_from_now()
    sh(lease, "echo two >/data/f")
    evict(lease)
    lose_changes()
    [key] = pruning.find_orphans(pruning.DATA_OBJECTS, NOW + MINUTE)
    memory_store.upload(key, io.BytesIO(b"no archive"))
    for _ in range(2):
        assert unrecorded_data.keep_all_from_store(now=NOW + MINUTE).counts.get("files", 0) == 0
    [event] = DataEvent.objects.filter(kind="corrupt")
    assert key in event.detail


def test_first_start_after_the_loss_notices_it_and_keeps_the_evidence(
    cold: Lease, lose_changes: Callable[[], None], grant: Callable[..., Lease]
) -> None:
    write(cold, "two")
    lose_changes()
    assert not installation_marks.has_recorded_mismatch()
    run(grant(environment="another"))
    assert "lacks changes" in installation_marks.get_installation().mismatch
    assert "lacks changes" in schedules.run_sweep("prune", now=NOW).failures[0]


def test_queue_refuses_work_at_once_after_the_loss(cold: Lease, lose_changes: Callable[[], None]) -> None:
    assert installation_marks.find_refusal() == ""
    write(cold, "two")
    lose_changes()
    assert "lacks changes" in installation_marks.find_refusal()
    call_command("installation", "confirm", "--yes")
    assert installation_marks.find_refusal() == ""


@pytest.mark.parametrize("content", [b"", b"[]", b'{"identity": 1}'], ids=["empty", "list", "incomplete"])
def test_note_that_cannot_be_read_is_a_mismatch_until_it_is_confirmed(content: bytes, cold: Lease) -> None:
    (Path(settings.STATE_DIR) / installation_marks.CHANGE_NAME).write_bytes(content)
    assert "cannot be read" in installation_marks.find_mismatch()
    installation.confirm(now=NOW, actor=console_user("operator"))
    assert installation_marks.find_mismatch() == ""


def test_states_of_one_incarnation_are_never_taken_for_a_loss(grant: Callable[..., Lease]) -> None:
    lease = grant()
    for _ in range(2):
        write(lease, "one")
        assert installation_marks.find_mismatch() == ""
        evict(lease)
        assert installation_marks.find_mismatch() == ""
    leasing.release(lease.pk, now=NOW)
    assert installation_marks.find_mismatch() == ""
    assert not Installation.objects.exclude(mismatch="").exists()


def test_found_snapshots_do_not_displace_others(cold: Lease, lose_changes: Callable[[], None], settings) -> None:
    write(cold, "two")
    lose_changes()
    run(cold)
    settings.KEEP_SNAPSHOTS, settings.KEEP_ASKED_SNAPSHOTS = 2, 1
    for number in range(3):
        snapshots.take_snapshot(cold.pk, name=str(number), now=NOW + number * MINUTE)
        write(cold, str(number), now=NOW + number * MINUTE)
        evict(cold, now=NOW + number * MINUTE)
    kinds = [*workspace.find_by_holder(cold.pk).values_list("kind", flat=True)]
    assert sorted(kinds) == ["asked", "found", "sleep", "sleep"]
    assert all(get_store().has(f"{each.key}/workspace") for each in find_found(cold))


def test_confirmation_on_one_host_voids_the_notes_of_others(
    cold: Lease, lose_changes: Callable[[], None], settings, tmp_path: Path
) -> None:
    write(cold, "two")
    lose_changes()
    assert "lacks changes" in installation_marks.find_mismatch()
    other_host, settings.STATE_DIR = settings.STATE_DIR, tmp_path / "of another host"
    installation.confirm(now=NOW, actor=console_user("operator"))
    settings.STATE_DIR = other_host
    assert installation_marks.find_mismatch() == ""
    assert not installation_marks.has_lost_changes()

"""Large outputs of ended runs move from their rows into objects of the store, and are read from there."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from uuid import uuid4

import pytest
from django.conf import settings

from leases.models import Lease
from leases.retention import sweep as retention
from sandboxes.models import ObjectUpload, OutputObject, Run, StoredOutput
from sandboxes.models.runs import LARGE_OUTPUT_BYTES
from sandboxes.providers.memory import MemoryProvider
from sandboxes.providers.memory.programs import ProgramCall, ProgramResult
from sandboxes.state import pruning, run_outputs
from sandboxes.state.run_outputs import MOVE_AFTER, RunOutput
from sandboxes.storage.base import StoreError
from sandboxes.storage.memory import MemoryStore
from sandboxes.sweep_log import SweepResult
from tests.conftest import MINUTE, NOW
from tests.support.leases import run
from tests.support.storage.state import LATER, assert_nothing_left

pytestmark = pytest.mark.django_db
DUE = NOW + MOVE_AFTER + MINUTE


@pytest.fixture(autouse=True)
def store(memory_store: MemoryStore) -> MemoryStore:
    return memory_store


@pytest.fixture
def lease(grant: Callable[..., Lease], memory: MemoryProvider) -> Lease:
    memory.programs["print"] = print_letters
    return grant(ttl=timedelta(days=1))


def print_letters(call: ProgramCall) -> ProgramResult:
    """Print as many letters on stdout, and as many times `e` on stderr, as the arguments say."""
    _, letter, stdout, stderr = call.argv
    return ProgramResult(stdout=letter.encode() * int(stdout), stderr=b"e" * int(stderr))


def print_output(lease: Lease, letter: str, stdout: int, stderr: int = 0, *, now: datetime = NOW) -> Run:
    """Run a command that prints so many letters on stdout and so many times `e` on stderr."""
    run(lease, "print", letter, str(stdout), str(stderr), now=now)
    return Run.objects.latest("started_at", "pk")


def move(now: datetime = DUE) -> SweepResult:
    return run_outputs.move_large_outputs(now=now)


def load(row: Run) -> RunOutput:
    return run_outputs.load_output(Run.objects.get(pk=row.pk))


def count_in_rows() -> int:
    return Run.objects.filter(stdout__isnull=False).count()


def test_large_outputs_move_to_one_object_and_are_read_from_it(lease: Lease, store: MemoryStore) -> None:
    large = LARGE_OUTPUT_BYTES + 1
    rows = [
        print_output(lease, "a", large, 5),
        print_output(lease, "b", 0, large, now=NOW + MINUTE),
        print_output(lease, "c", large, now=NOW + 2 * MINUTE),
    ]
    outputs = [load(row) for row in rows]
    assert [(len(output.stdout), len(output.stderr)) for output in outputs] == [(large, 5), (0, large), (large, 0)]
    assert move(DUE + 2 * MINUTE).counts == {"outputs moved": 3}
    assert count_in_rows() == 0 and [load(row) for row in rows] == outputs
    [stored] = OutputObject.objects.all()
    assert [*store.list("outputs/")] == [stored.key] and stored.size_bytes == 3 * large + 5
    assert (move(DUE + 2 * MINUTE).counts, ObjectUpload.objects.exists()) == ({}, False)
    assert [run_outputs.get_stored_sizes(Run.objects.get(pk=row.pk)) for row in rows] == [(large, 5), (0, large), (large, 0)]


@pytest.mark.parametrize("size", [0, 1, LARGE_OUTPUT_BYTES])
def test_a_small_output_stays_in_its_row(lease: Lease, size: int) -> None:
    row = print_output(lease, "a", size, size)
    assert (move().counts, load(row)) == ({}, RunOutput(b"a" * size, b"e" * size))


def test_the_output_of_an_open_or_young_run_stays_in_its_row(lease: Lease) -> None:
    row = print_output(lease, "a", 2 * LARGE_OUTPUT_BYTES)
    ended_at = Run.objects.get(pk=row.pk).ended_at
    assert ended_at and move(ended_at + MOVE_AFTER - timedelta(seconds=1)).counts == {}
    Run.objects.filter(pk=row.pk).update(ended_at=None, outcome="open")
    assert move().counts == {}


def test_only_the_stored_beginning_moves(lease: Lease, settings) -> None:
    settings.RUN_OUTPUT_KEPT = LARGE_OUTPUT_BYTES + 7
    row = print_output(lease, "a", 5 * LARGE_OUTPUT_BYTES)
    assert move().counts == {"outputs moved": 1}
    assert load(row) == RunOutput(b"a" * settings.RUN_OUTPUT_KEPT, b"")


def test_nothing_moves_while_rows_keep_little_of_any_output(lease: Lease, settings) -> None:
    settings.RUN_OUTPUT_KEPT = LARGE_OUTPUT_BYTES
    print_output(lease, "a", 5 * LARGE_OUTPUT_BYTES)
    assert move().counts == {}


@pytest.mark.parametrize("limit", ["MAX_RUNS_PER_OBJECT", "MAX_OBJECT_BYTES"])
def test_outputs_are_divided_between_objects(lease: Lease, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(run_outputs, limit, 2 if limit == "MAX_RUNS_PER_OBJECT" else 2 * LARGE_OUTPUT_BYTES)
    rows = [print_output(lease, letter, 10_000, now=NOW + index * MINUTE) for index, letter in enumerate("abcde")]
    assert move(DUE + 5 * MINUTE).counts == {"outputs moved": 5}
    assert [object.outputs.count() for object in OutputObject.objects.order_by("at", "pk")].count(2) == 2
    assert [load(row).stdout for row in rows] == [letter.encode() * 10_000 for letter in "abcde"]


@pytest.mark.parametrize("step", ["keys claimed", "outputs stored", "outputs moved"])
def test_a_crash_at_any_step_loses_no_output_and_leaves_no_object(
    lease: Lease, store: MemoryStore, crash_at: Callable[[str], AbstractContextManager[None]], step: str
) -> None:
    row = print_output(lease, "a", 10_000, 3)
    with crash_at(step):
        move()
    assert len([*store.list("outputs/")]) == (0 if step == "keys claimed" else 1)
    assert load(row) == RunOutput(b"a" * 10_000, b"eee")
    assert move().counts == ({} if step == "outputs moved" else {"outputs moved": 1})
    assert load(row) == RunOutput(b"a" * 10_000, b"eee")
    assert_nothing_left()
    assert len([*store.list("outputs/")]) == 1


def test_an_object_is_deleted_after_its_last_run(lease: Lease, store: MemoryStore) -> None:
    first, second = print_output(lease, "a", 10_000), print_output(lease, "b", 10_000, now=NOW + MINUTE)
    assert move(DUE + MINUTE).counts == {"outputs moved": 2}
    Run.objects.get(pk=first.pk).delete()
    assert (move().counts, load(second).stdout) == ({}, b"b" * 10_000)
    Run.objects.get(pk=second.pk).delete()
    assert move().counts == {"objects deleted": 1}
    assert ([*store.list("outputs/")], OutputObject.objects.count(), StoredOutput.objects.count()) == ([], 0, 0)


def test_a_run_deleted_while_its_output_is_stored_gets_no_place(
    lease: Lease, store: MemoryStore, at_checkpoint: Callable[..., None]
) -> None:
    first, second = print_output(lease, "a", 10_000), print_output(lease, "b", 10_000, now=NOW + MINUTE)
    at_checkpoint("outputs stored", lambda: Run.objects.get(pk=first.pk).delete())
    assert move(DUE + MINUTE).counts == {"outputs moved": 1}
    assert load(second).stdout == b"b" * 10_000 and StoredOutput.objects.count() == 1


def test_an_object_whose_runs_were_all_deleted_meanwhile_is_pruned(
    lease: Lease, store: MemoryStore, at_checkpoint: Callable[..., None]
) -> None:
    row = print_output(lease, "a", 10_000)
    at_checkpoint("outputs stored", lambda: Run.objects.get(pk=row.pk).delete())
    assert (move().failures, OutputObject.objects.count(), ObjectUpload.objects.count()) == ([], 0, 0)
    assert len([*store.list("outputs/")]) == 1
    assert pruning.remove_orphans(now=DUE + timedelta(days=1)).counts == {"orphaned outputs": 1}
    assert [*store.list("outputs/")] == []


def test_outputs_that_another_process_moved_meanwhile_keep_their_place(
    lease: Lease, at_checkpoint: Callable[..., None]
) -> None:
    row = print_output(lease, "a", 10_000)
    at_checkpoint("outputs stored", move)
    assert move().failures == []
    assert (StoredOutput.objects.count(), OutputObject.objects.count(), load(row).stdout) == (1, 1, b"a" * 10_000)
    assert_nothing_left()


def test_a_store_that_fails_leaves_the_output_in_its_row(lease: Lease, store: MemoryStore) -> None:
    row = print_output(lease, "a", 10_000)
    with store.fail("set", StoreError("memory", "set", "away")):
        result = move()
    assert (result.counts, len(result.failures), "away" in result.failures[0]) == ({}, 1, True)
    assert (count_in_rows(), load(row).stdout, ObjectUpload.objects.count()) == (1, b"a" * 10_000, 0)
    assert move().counts == {"outputs moved": 1}


@pytest.mark.parametrize("content", [None, b"", b"a" * 9_999])
def test_an_output_that_the_store_does_not_have_completely_is_an_error(
    lease: Lease, store: MemoryStore, content: bytes | None
) -> None:
    row = print_output(lease, "a", 10_000)
    move()
    [key] = store.list("outputs/")
    if content is None:
        store.remove(key)
    else:
        store.set(key, content)
    with pytest.raises(StoreError):
        load(row)


def test_a_run_deleted_between_its_row_and_its_place_is_an_error(lease: Lease) -> None:
    row = print_output(lease, "a", 10_000)
    move()
    read = Run.objects.get(pk=row.pk)
    Run.objects.get(pk=row.pk).delete()
    with pytest.raises(StoreError):
        run_outputs.load_output(read)


def test_retention_deletes_the_place_with_the_run(lease: Lease) -> None:
    row = print_output(lease, "a", 10_000)
    move()
    rows = Run.objects.filter(pk=row.pk)
    retention.handle_batch(retention.ExpiredRows("runs", rows), 10)
    assert (rows.exists(), StoredOutput.objects.exists(), move().counts) == (False, False, {"objects deleted": 1})


def test_an_object_that_is_being_stored_for_hours_is_not_pruned(
    lease: Lease, store: MemoryStore, at_checkpoint: Callable[..., None]
) -> None:
    row = print_output(lease, "a", 10_000)
    at_checkpoint("outputs stored", lambda: pruning.remove_orphans(now=DUE, grace=-timedelta(hours=2)))
    assert move().counts == {"outputs moved": 1}
    assert load(row).stdout == b"a" * 10_000


def test_objects_of_another_format_are_left_alone(store: MemoryStore) -> None:
    names = ["outputs/notes", f"outputs/20200101T000000Z-{uuid4()}", f"outputs/20200101T000000Z-{uuid4().hex}/x"]
    for name in names:
        store.set(name, b"x")
    assert pruning.remove_orphans(now=LATER).failures == []
    assert {*store.list("outputs/")} == {*names}


def test_limits_fit() -> None:
    assert LARGE_OUTPUT_BYTES < settings.RUN_OUTPUT_KEPT

"""Sweep over expired rows: bounded batches in turn, interruption, errors, and the table of all models."""

from datetime import timedelta

import pytest
from django.apps import apps
from django.db import connection
from django.db.models import CASCADE
from django.test.utils import CaptureQueriesContext
from django_q.models import Task

from leases import leasing, sweeps
from leases.environments.models import Environment
from leases.models import Lease
from leases.retention import kinds, sweep
from leases.retention.permanent import REASONS
from leases.retention.sweep import delete_expired
from sandboxes.models import Event
from sandboxes.sweep_log import PASS_TIME_LIMIT
from tests.conftest import NOW, SimulatedCrash

pytestmark = pytest.mark.django_db
A_YEAR_LATER = NOW + timedelta(days=365)


def insert_events(count: int) -> None:
    Event.objects.bulk_create(Event(kind="lease.ended", key=str(number), payload={}, at=NOW) for number in range(count))


def insert_tasks(count: int) -> None:
    Task.objects.bulk_create(
        Task(id=str(number), name="a", func="f", started=NOW, stopped=NOW, success=False) for number in range(count)
    )


def test_every_table_expires_or_is_permanent_with_a_reason() -> None:
    expiring = {expired.rows.model._meta.label for expired in kinds.find_expired(now=NOW) if not expired.cleared}
    tables = {model._meta.label for model in apps.get_models(include_auto_created=True) if not model._meta.proxy}
    assert tables == expiring | REASONS.keys()
    assert not expiring & REASONS.keys()
    assert all(REASONS.values())


def test_kinds_have_different_names() -> None:
    names = [expired.kind for expired in kinds.find_expired(now=NOW)]
    assert len(names) == len({*names})


def test_kinds_whose_rows_others_refer_to_come_after_those_rows() -> None:
    order = [expired.rows.model for expired in kinds.find_expired(now=NOW) if not expired.cleared]
    for position, model in enumerate(order):
        for child, key in kinds.find_protecting_keys(model):
            assert child is model or child not in order or order.index(child) < position, key


def test_no_batch_deletes_more_rows_by_a_cascade_than_a_row_has_by_design() -> None:
    cascading = {
        relation.related_model._meta.label
        for expired in kinds.find_expired(now=NOW)
        for relation in expired.rows.model._meta.related_objects
        if relation.on_delete is CASCADE
    }
    # Deliveries go before their events, and coding tasks before their environments. The others are few for each row.
    assert cascading == {
        "sandboxes.Delivery", "sandboxes.StoredOutput", "leases.CodingTask", "leases.Shell",
        "leases.Participant", "leases.EnvironmentOutcome", "leases.EnvironmentSecret",
    }  # fmt: skip


def test_kinds_are_deleted_in_turn_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    insert_events(7)
    insert_tasks(5)
    order = []
    handle = sweep.handle_batch

    def note(expired: kinds.ExpiredRows, size: int) -> sweep.Batch:
        batch = handle(expired, size)
        if batch.changed:
            order.append((expired.kind, batch.changed))
        return batch

    monkeypatch.setattr(sweep, "handle_batch", note)
    result = delete_expired(now=A_YEAR_LATER, batch_size=3)
    assert result.counts == {"events deleted": 7, "tasks of the queue deleted": 5}
    assert order == [
        ("events", 3), ("tasks of the queue", 3), ("events", 3), ("tasks of the queue", 2), ("events", 1),
    ]  # fmt: skip


def test_a_pass_ends_at_its_time_limit_and_the_next_one_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    insert_events(5)
    elapsed = iter([timedelta(0)] * (len(kinds.find_expired(now=A_YEAR_LATER)) + 1))
    monkeypatch.setattr(sweep, "clock_from", lambda now: lambda: now + next(elapsed, PASS_TIME_LIMIT + timedelta(seconds=1)))
    assert delete_expired(now=A_YEAR_LATER, batch_size=2).counts == {"events deleted": 4}
    monkeypatch.undo()
    assert delete_expired(now=A_YEAR_LATER, batch_size=2).counts == {"events deleted": 1}


@pytest.mark.parametrize("checkpoint", ["expired rows locked", "expired rows deleted"])
def test_an_interrupted_pass_is_continued_by_the_next_one(checkpoint: str, at_checkpoint) -> None:
    insert_events(5)
    at_checkpoint(checkpoint)
    with pytest.raises(SimulatedCrash):
        delete_expired(now=A_YEAR_LATER, batch_size=2)
    assert Event.objects.count() == (5 if checkpoint == "expired rows locked" else 3)
    delete_expired(now=A_YEAR_LATER, batch_size=2)
    assert not Event.objects.exists()
    assert delete_expired(now=A_YEAR_LATER, batch_size=2).counts == {}


def test_an_error_of_one_kind_does_not_delay_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    insert_events(3)
    insert_tasks(3)
    handle = sweep.handle_batch

    def fail_for_events(expired: kinds.ExpiredRows, size: int) -> sweep.Batch:
        if expired.kind == "events":
            raise RuntimeError("no")
        return handle(expired, size)

    monkeypatch.setattr(sweep, "handle_batch", fail_for_events)
    result = delete_expired(now=A_YEAR_LATER, batch_size=2)
    assert (result.counts, result.failures) == ({"tasks of the queue deleted": 3}, ["events: no"])


def test_a_batch_reads_no_columns_but_the_keys_of_the_rows_that_it_deletes() -> None:
    Environment.objects.create(id="a", type_id="catan", ended_at=NOW, end_reason="operator")
    with CaptureQueriesContext(
        connection,
    ) as queries:
        delete_expired(now=A_YEAR_LATER)
    assert not Environment.objects.exists()
    reads = [query["sql"] for query in queries if query["sql"].startswith("SELECT") and "leases_environment" in query["sql"]]
    assert reads and not any("end_reason" in sql.partition(" FROM ")[0] for sql in reads)


def test_a_row_that_was_referred_to_before_it_was_locked_is_kept(lease: Lease, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first query has not seen the event, which was committed before the lock."""
    leasing.release(lease.pk, now=NOW)
    sweeps.reclaim(now=NOW)
    [expired] = [kind for kind in kinds.find_expired(now=A_YEAR_LATER) if kind.kind == "leases"]
    queries = [expired.rows]
    select = kinds.ExpiredRows.select
    monkeypatch.setattr(kinds.ExpiredRows, "select", lambda self: queries.pop() if queries else select(self))
    assert sweep.handle_batch(expired, 10) == sweep.Batch(1, 0)
    assert Lease.objects.get() == lease

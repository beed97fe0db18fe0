"""The retention sweep beside processes that read, lock and insert the same rows, in real transactions."""

from datetime import timedelta

import pytest
from django.db import IntegrityError, connection, transaction

from leases import leasing, sweeps
from leases.models import Lease, LeaseEvent
from leases.retention.kinds import ExpiredRows
from leases.retention.sweep import delete_expired
from sandboxes import lifecycle
from sandboxes.models import Event, Pool, Run
from tests.conftest import NOW, run_in_threads
from tests.races.test_identity_races import is_locked_out
from tests.support.leases import run

pytestmark = pytest.mark.django_db(transaction=True)
A_YEAR_LATER = NOW + timedelta(days=365)


def insert_events(count: int) -> None:
    Event.objects.bulk_create(Event(kind="lease.ended", key=str(number), payload={}, at=NOW) for number in range(count))


def end(lease: Lease) -> None:
    leasing.release(lease.pk, now=NOW)
    sweeps.reclaim(now=NOW)


def test_concurrent_passes_delete_each_row_once() -> None:
    insert_events(200)
    with run_in_threads(4) as together:
        results = together(lambda number: delete_expired(now=A_YEAR_LATER, batch_size=10))
    assert not Event.objects.exists()
    assert sum(result.counts.get("events deleted", 0) for result in results) == 200
    assert [result.failures for result in results] == [[]] * 4


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one writer")
def test_a_pass_waits_for_no_row_that_another_process_has_locked() -> None:
    insert_events(3)
    with transaction.atomic():
        locked = Event.objects.select_for_update().order_by("key").first()
        assert locked
        with run_in_threads(1) as together:
            [result] = together(lambda number: delete_expired(now=A_YEAR_LATER))
    assert result.counts == {"events deleted": 2} and Event.objects.get() == locked


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one writer")
def test_a_row_that_refers_to_one_in_deletion_waits_and_is_refused(lease: Lease, monkeypatch: pytest.MonkeyPatch) -> None:
    end(lease)

    def insert() -> None:
        LeaseEvent.objects.create(lease_id=lease.pk, at=NOW, kind="snapshot")

    waited: list[bool] = []

    def insert_at_leases(reached: str, expired: ExpiredRows) -> None:
        if reached == "expired rows locked" and expired.kind == "leases":
            waited.append(is_locked_out(insert))

    monkeypatch.setattr(lifecycle, "CHECKPOINT_HOOKS", [insert_at_leases])
    assert delete_expired(now=A_YEAR_LATER).failures == []
    assert waited == [True] and not Lease.objects.exists()
    with pytest.raises(IntegrityError):
        insert()


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one writer")
def test_a_transaction_that_has_inserted_a_reference_fails_at_its_commit(lease: Lease) -> None:
    """Foreign keys are checked at the commit. No row of an expired lease is written by any verb."""
    end(lease)
    failures: list[str] = []

    @transaction.atomic
    def insert_beside_a_pass() -> None:
        LeaseEvent.objects.create(lease_id=lease.pk, at=NOW, kind="snapshot")
        with run_in_threads(1) as together:
            [result] = together(lambda number: delete_expired(now=A_YEAR_LATER))
        failures.extend(result.failures)

    with pytest.raises(IntegrityError):
        insert_beside_a_pass()
    assert failures == []
    assert not Lease.objects.exists() and not LeaseEvent.objects.exists()


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one writer")
def test_commands_run_beside_a_pass(lease: Lease, pool: Pool, at_checkpoint) -> None:
    run(lease)
    insert_events(3)
    waited: list[bool] = []
    at_checkpoint("expired rows locked", lambda: waited.append(is_locked_out(lambda: run(lease))))
    assert delete_expired(now=A_YEAR_LATER).counts["events deleted"] >= 3
    assert waited == [False] and Run.objects.filter(holder=lease.pk).count() == 2

"""A database that has lost its last changes, with the sandboxes of a vendor."""

from collections.abc import Callable
from datetime import timedelta
from secrets import token_hex

import pytest
from django.db import transaction

from leases import snapshots, sweeps
from leases.models import Lease
from sandboxes.models import Pool, Snapshot, names
from sandboxes.sweeps import installation
from tests.conftest import MINUTE, NOW
from tests.support.actors import console_user
from tests.support.leases import evict, read, write
from tests.support.remote import GetEmulator
from tests.unit.sandboxes.remote.conftest import LISTING

pytestmark = [pytest.mark.django_db, pytest.mark.parametrize("kind", LISTING)]
LATER = NOW + timedelta(days=3650)  # than the clock of the emulators, which state when a sandbox was created


def test_wake_in_a_database_that_lost_changes_keeps_the_files_of_the_later_sandbox(
    kind: str,
    move_pool: Callable[[str], Pool],
    grant: Callable[..., Lease],
    emulators: GetEmulator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(names, "token_hex", token_hex)
    move_pool(kind)
    emulator = emulators(kind)
    lease = grant()
    write(lease, "one")
    evict(lease)
    before = transaction.savepoint()
    later = write(lease, "two").ref
    transaction.savepoint_rollback(before)
    assert read(lease) == "one"
    found = Snapshot.objects.get(holder=lease.pk, kind="found")
    assert emulator.find_machines(later)
    installation.confirm(now=NOW, actor=console_user("operator"))
    assert sweeps.reconcile(now=LATER, grace=MINUTE).counts["orphans destroyed"] == 1
    assert not emulator.find_machines(later)
    snapshots.restore_snapshot(lease.pk, found.pk, now=NOW + MINUTE)
    assert read(lease, now=NOW + MINUTE) == "two"

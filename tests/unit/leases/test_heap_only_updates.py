"""Updates of the rows that commands and renewals change, as PostgreSQL counts them. A heap-only update writes no index."""

from collections.abc import Callable
from datetime import datetime
from uuid import uuid4

import pytest
from django.db import connection

from leases import api_keys, execution, renewal
from leases.models import AgentKey, Lease
from sandboxes.db import sql
from sandboxes.runs.operations import Command
from tests.conftest import MINUTE, NOW
from tests.support.billing import ADA

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite has no heap-only updates"),
]
CALLS = 50
SECOND = MINUTE / 60
Counts = dict[str, tuple[int, int]]


def count_updates(work: Callable[[], None]) -> Counts:
    """Return the number of updates of each updated table by `work`, and how many of them were heap-only."""
    before = read_counts()
    work()
    changes = {
        table: (updates - before[table][0], heap_only - before[table][1])
        for table, (updates, heap_only) in read_counts().items()
    }
    return {table: change for table, change in changes.items() if change[0]}


def read_counts() -> Counts:
    sql.fetch_all("SELECT pg_stat_force_next_flush()")
    sql.fetch_all("SELECT pg_stat_clear_snapshot()")
    rows = sql.fetch_all("SELECT relname, n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables")
    return {table: (updates, heap_only) for table, updates, heap_only in rows}


@pytest.fixture
def key() -> str:
    key = api_keys.issue_key([ADA], now=NOW)[1]
    AgentKey.objects.update(last_used_at=NOW)
    return key


def run(lease: Lease, now: datetime) -> None:
    execution.exec_command(lease.pk, Command(["true"], MINUTE, run_id=uuid4()), now=now)


def test_commands_and_renewals_write_no_index_of_the_leases(grant, key: str, stopped_clock: None) -> None:
    """Those of its sandbox (two updates) and its run (one) contain the states that a command changes, for the sweeps.

    A page takes more than 20 versions of a lease. The version after those is not heap-only if none can be removed yet."""
    lease, now = grant(agent=ADA), NOW + SECOND
    run(lease, now)  # starts the sandbox

    def work() -> None:
        for number in range(CALLS):
            run(lease, now + number * SECOND / 5)
        for number in range(CALLS):
            assert renewal.renew_with_key(lease.pk, key, now=now + 20 * SECOND + number * SECOND / 5)

    counts = count_updates(work)
    updates, heap_only = counts["leases_lease"]
    assert (updates, heap_only >= 0.95 * updates) == (2 * CALLS, True)
    assert counts.keys() == {"leases_lease", "sandboxes_sandbox", "sandboxes_run"}


def test_leases_of_full_pages_are_renewed_without_their_indexes(grant, key: str) -> None:
    """Leases granted one after the other fill whole pages, of some 35 leases, which must leave room for renewed rows."""
    lease = grant(agent=ADA)
    columns = {field.attname: getattr(lease, field.attname) for field in Lease._meta.concrete_fields}
    leases = [Lease(**columns | {"id": uuid4(), "environment_id": f"game-{number}"}) for number in range(2, 400)]
    Lease.objects.bulk_create(leases)
    renewed = leases[:360:20]  # not those of the last page, which is not full

    def renew_each() -> None:
        for each in renewed:
            assert renewal.renew_with_key(each.pk, key, now=NOW + SECOND)

    assert count_updates(renew_each) == {"leases_lease": (len(renewed), len(renewed))}

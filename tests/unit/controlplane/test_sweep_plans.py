"""Plans of the queries of the sweeps on an installation with a long history: none reads the whole of a growing table."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from controlplane.schedules import SCHEDULE
from leases.models import Lease
from leases.queue.models import QueuedRun
from sandboxes.models import DataEvent, Delivery, LlmCall, Pool, Process, Snapshot, Webhook
from tests.bench.history import HELD, LEASE_ID, RUNS_PER_LEASE, SANDBOX_ID, insert, insert_history
from tests.conftest import MINUTE, NOW
from tests.support.leases import run
from tests.support.plans import find_growing_tables, list_full_reads

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.postgres("plans"),
    pytest.mark.usefixtures("compact_tables"),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="plans of PostgreSQL"),
]
RUNS = 30_000
DAY = timedelta(days=1)
GROWING = {
    "billing_usagerecord", "leases_lease", "leases_leaseevent", "leases_queuedrun", "leases_turn", "sandboxes_dataevent",
    "sandboxes_delivery", "sandboxes_event", "sandboxes_llmcall", "sandboxes_process", "sandboxes_reading", "sandboxes_run",
    "sandboxes_sandbox", "sandboxes_snapshot", "sandboxes_transition",
}  # fmt: skip
# `heartbeat` makes no query; `retention` deletes a part of the history, in batches of a share that only a test has.
EXCLUDED = {"heartbeat", "retention"}


@pytest.fixture
def history(grant: Callable[..., Lease], pool: Pool) -> Lease:
    """Active lease with a sandbox that has run a command, beside a history."""
    lease = grant(environment="open")
    run(lease)
    insert_history(pool, RUNS, now=NOW)
    insert_side_rows(pool)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    return lease


def insert_side_rows(pool: Pool) -> None:
    """Insert the settled rows of one model call, snapshot, process, change of /data, queued run and delivery a lease."""
    leases, at = f"generate_series(1, {RUNS // RUNS_PER_LEASE}) n", f"TIMESTAMPTZ '{NOW - 60 * DAY}' + INTERVAL '1 minute' * n"
    webhook = Webhook.objects.create(url="https://receiver.example/", created_at=NOW, sealed=b"sealed")
    row = {"id": "md5('side ' || n)::uuid", "sandbox_id": SANDBOX_ID, **HELD}
    times = {"started_at": at, "deadline_at": at, "ended_at": at}
    insert(LlmCall, leases, {**row, **times, "call_id": "'call ' || n", "recorded_at": at}, outcome="ok", cost=1, counted=True)
    deleted = {**row, "at": at, "key": "'key ' || n", "forgotten_at": at}
    insert(Snapshot, leases, deleted, incarnation=1, size_bytes=1, metered=True, local=False)
    ended = {**row, "started_at": at, "starts_by": at, "ended_at": at}
    insert(Process, leases, ended, incarnation=1, argv=["true"], cwd="/", state="exited", exit_code=0)
    insert(DataEvent, leases, {**row, "at": at}, kind="conflict")
    insert(
        QueuedRun, leases,
        {**row, "lease_id": LEASE_ID, "queued_at": at, "available_at": at, "expires_at": f"{at} + INTERVAL '1 hour'",
         "ended_at": at},
        pool_id=pool.pk, request={}, state="completed",
    )  # fmt: skip
    delivery = {"event_id": "md5('event ' || n)::uuid", "asked_at": at, "delivered_at": at}
    insert(Delivery, leases, delivery, webhook_id=webhook.pk)


def find_full_reads_of(sweep: str) -> list[str]:
    """Run a sweep, and return the full reads of growing tables by its statements."""
    assert find_growing_tables() >= GROWING
    with CaptureQueriesContext(connection) as captured:
        SCHEDULE[sweep].sweep(now=NOW + 2 * MINUTE)
    return [f"{sweep}: {read}" for read in list_full_reads(captured)]


def test_no_sweep_reads_a_growing_table_completely(history: Lease) -> None:
    reads = [read for name in SCHEDULE if name not in EXCLUDED for read in find_full_reads_of(name)]
    assert not reads, "\n\n".join(reads)
    for index, sweep, table in [("turn_open", "stalled", "leases_turn"), ("run_unmetered", "meter", "sandboxes_run")]:
        with connection.cursor() as cursor:
            cursor.execute(f"DROP INDEX {index}")
        assert any(table in read for read in find_full_reads_of(sweep)), f"a missing index {index} is not noticed"

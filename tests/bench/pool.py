"""Pool operations with 1, 10 and 100 thousand rows. Their cost should not depend on the number of rows.

Reference figures of the prototype, which kept its sandboxes in the memory of one process: marking 0.03 ms, choosing a victim
0.1 ms. Here each operation is a durable transaction."""

import os
import random
import uuid
from datetime import datetime, timedelta

from django.conf import settings
from django.db import connection
from django.utils import timezone

from sandboxes import eviction, lifecycle
from sandboxes.claims import CLAIM_TTL
from sandboxes.db import dialect
from sandboxes.models import Pool, Quota, RunOutcome, Sandbox
from sandboxes.pool import allocation
from sandboxes.runs import operations
from sandboxes.runs.operations import Command
from sandboxes.sweeps import passes
from tests.bench.measure import BenchCase, interleave, measure_seconds, print_report, refresh_statistics

ROW_COUNTS = [int(size) for size in os.environ.get("BENCH_ROWS", "1000,10000,100000").split(",")]
ROUND_COUNT = int(os.environ.get("BENCH_ROUNDS", "40"))
SWEPT_ROWS = int(os.environ.get("BENCH_SWEPT", "100000"))
IDLE_PER_SWEEP = 20  # due rows per sweep, independent of the total
# Per hundred rows. Most sandboxes of a typical pool are cold; destroyed rows are history.
STATE_PERCENTAGES = [("cold", 50), ("waiting", 15), ("warm", 5), ("running", 20), ("destroyed", 10)]


def main() -> None:
    results = {size: measure_decisions(size) for size in ROW_COUNTS}
    print(f"\n  p50 ms at rows{'':<28}" + "".join(f"{size:>12,}" for size in ROW_COUNTS) + f"{'growth':>9}")
    for title in results[ROW_COUNTS[0]]:
        durations = [results[size][title] for size in ROW_COUNTS]
        columns = "".join(f"{1e3 * seconds:12.2f}" for seconds in durations)
        print(f"  {title:<42}{columns}{durations[-1] / durations[0]:8.1f}x")
    print("  prototype, in memory, not durable: mark 0.03, choose a victim 0.1", flush=True)
    bench_large_sweep()


def measure_decisions(size: int) -> dict[str, float]:
    """Return the p50 of each operation, in seconds, in a pool with `size` rows."""
    now = timezone.now()
    Sandbox.objects.filter(idle_at__lte=now).update(idle_at=now + timedelta(hours=1))
    defaults = {"provider": "memory", "capacity": 10**9, "warm_target": 1}
    bench_pool, _ = Pool.objects.get_or_create(name="bench", defaults=defaults)
    fill_pool(bench_pool, size - Sandbox.objects.filter(pool=bench_pool).count(), now=now)
    Quota.objects.get_or_create(pool=bench_pool, agent_did="did:plc:guaranteed", defaults={"guaranteed": 5})
    refresh_statistics()

    def build_request() -> allocation.SandboxRequest:
        return allocation.SandboxRequest(uuid.uuid4(), "did:plc:bench", "e", bench_pool, timedelta(minutes=30))

    waiting = list(Sandbox.objects.filter(pool=bench_pool, state="waiting")[: ROUND_COUNT + 3])

    def mark_run(number: int) -> None:
        command = Command(argv=["true"], timeout=timedelta(minutes=1), run_id=uuid.uuid4())
        run = operations.open_run(waiting[number % len(waiting)], command, now=now)
        assert run and operations.close_run(run, now=now, outcome=RunOutcome.OK)

    def claim(number: int) -> None:
        assert allocation.claim_warm(build_request(), now=now)

    def evict_cold(number: int) -> None:
        assert eviction.free_place(bench_pool, agent_did="did:plc:bench", now=now)

    def make_due(number: int) -> None:
        pks = Sandbox.objects.filter(pool=bench_pool, state="waiting").values_list("pk", flat=True)[:IDLE_PER_SWEEP]
        Sandbox.objects.filter(pk__in=list(pks)).update(idle_at=now)

    def sweep(number: int) -> None:
        assert passes.claim_idle(lifecycle.WAITING, uuid.uuid4(), now=now, limit=10 * IDLE_PER_SWEEP) == IDLE_PER_SWEEP

    def reset(number: int) -> None:
        Sandbox.objects.filter(pool=bench_pool, state="evicting").update(
            state="waiting", claim=None, deadline_at=None, idle_at=now + timedelta(hours=1)
        )

    def update_by_key(number: int) -> None:
        assert Pool.objects.filter(pk=bench_pool.pk).update(warm_target=1)

    idle_sweep = BenchCase("idle sweep", sweep, before=make_due, after=reset)
    cases = [
        BenchCase("reference: update one row by key", update_by_key),
        BenchCase("claim a pre-warmed sandbox", claim),
        BenchCase("mark running, mark waiting", mark_run),
        BenchCase("choose a victim", lambda number: eviction.find_victim(bench_pool, agent_did="did:plc:bench", now=now)),
        BenchCase("choose and evict a cold sandbox", evict_cold),
    ]
    rounds = min(ROUND_COUNT, size // 100)
    interleave(cases, rounds=rounds)
    interleave([idle_sweep], rounds=min(rounds, 10), warmup=1)
    return {case.name: case.p50 for case in cases} | {"idle sweep, per idle sandbox": idle_sweep.p50 / IDLE_PER_SWEEP}


def fill_pool(pool: Pool, count: int, *, now: datetime) -> None:
    """Insert rows in all states, with a last use within the last day."""
    shares = {state: round(count * share / 100) for state, share in STATE_PERCENTAGES}
    seconds = measure_seconds(lambda: [insert_rows(pool, state, rows, now=now) for state, rows in shares.items()])
    print(f"  {sum(shares.values()):,} rows inserted in {seconds:.0f} s", flush=True)


def insert_rows(pool: Pool, state: str, count: int, *, now: datetime) -> None:
    """Insert `count` rows in one state. Half of the warm ones have no holder."""
    defaults = {
        "pool": pool, "provider": "memory", "image": settings.SANDBOX_IMAGE, "memory_mib": pool.memory_mib, "millicpus": 1000,
        "pids": 64, "state": state, "state_since": now, "created_at": now, "environment_id": "e",
        "open_runs": int(state == "running"), "destroyed_at": now if state == "destroyed" else None,
        "idle_at": now + timedelta(hours=1) if state in ("waiting", "warm") else None,
    }  # fmt: skip
    for first in range(0, count, 5000):
        Sandbox.objects.bulk_create(
            Sandbox(
                holder=None if state == "warm" and number % 2 else uuid.uuid4(), agent_did=f"did:plc:a{number}",
                last_used_at=now - random.random() * timedelta(days=1), **defaults,
            )
            for number in range(first, min(first + 5000, count))
        )  # fmt: skip


def bench_large_sweep() -> None:
    """Claim of a large idle sweep, against one raw UPDATE ... RETURNING of as many rows."""
    now = timezone.now()
    Sandbox.objects.filter(idle_at__lte=now).update(idle_at=now + timedelta(hours=1))
    bench_pool = Pool.objects.create(name="idle", provider="memory", capacity=10**9)
    insert_rows(bench_pool, "waiting", SWEPT_ROWS, now=now)

    def make_due(number: int) -> None:
        reset_fields = {"claim": None, "deadline_at": None, "idle_at": now}
        Sandbox.objects.filter(pool=bench_pool).update(state="waiting", **reset_fields)
        refresh_statistics("sandboxes_sandbox")

    statement = (
        "UPDATE sandboxes_sandbox SET state = 'evicting', state_since = %s, claim = %s, claimed_by = %s, deadline_at = %s, "
        "idle_at = NULL WHERE idle_at <= %s AND state = 'waiting' AND holder IS NOT NULL AND lost_at IS NULL RETURNING id"
    )

    def update_raw(number: int) -> None:
        parameters = [now, uuid.uuid4(), settings.INSTANCE, now + CLAIM_TTL, now]
        with connection.cursor() as cursor:
            cursor.execute(statement, [dialect.adapt_value(value) for value in parameters])
            assert len(cursor.fetchall()) == SWEPT_ROWS

    def claim_all(number: int) -> None:
        assert passes.claim_idle(lifecycle.WAITING, uuid.uuid4(), now=now, limit=SWEPT_ROWS) == SWEPT_ROWS

    raw_case = BenchCase("one raw UPDATE … RETURNING", update_raw, before=make_due)
    cases = [raw_case, BenchCase("claim_idle, with each Transition", claim_all, before=make_due)]
    interleave(cases, rounds=2, warmup=0)
    print_report(f"claim of an idle sweep of {SWEPT_ROWS:,} rows", cases, raw=raw_case, aim="3x")

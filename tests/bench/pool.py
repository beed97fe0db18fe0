"""The pool's decisions at 1 thousand, 100 thousand and 1 million rows: each should cost the same, however many there are.

The seed kept its sandboxes in memory: there, by its own figures, marking one cost 0.03 ms and choosing one to evict
0.1 ms, in one process and gone with it. Here each is a durable transaction that any process may make."""

import os
import sys
import time
import uuid
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from tests.bench.measure import BenchCase, interleave, print_report
from tests.bench.server import configure

ROW_COUNTS = [int(size) for size in os.environ.get("BENCH_ROWS", "1000,100000,1000000").split(",")]
MAX_ROWS_ON_SQLITE = 100_000
ROUND_COUNT = int(os.environ.get("BENCH_ROUNDS", "40"))
SWEPT_ROWS = int(os.environ.get("BENCH_SWEPT", "100000"))
IDLE_PER_SWEEP = 20  # due at each sweep, of however many
# Of a hundred rows: what most pools are full of is asleep. The last of them are gone, as history.
STATE_PERCENTAGES = [("cold", 50), ("waiting", 15), ("warm", 5), ("running", 20), ("destroyed", 10)]


def main(name: str, database: str, here: Path) -> None:
    configure(database, here)
    from django.db import connection

    sizes = [size for size in ROW_COUNTS if connection.vendor == "postgresql" or size <= MAX_ROWS_ON_SQLITE]
    print(f"\n===== the pool's decisions, {name} =====")
    at = {size: measure_decisions(size) for size in sizes}
    print(f"\n  p50 ms at rows{'':<28}" + "".join(f"{size:>12,}" for size in sizes) + f"{'growth':>9}")
    for title in at[sizes[0]]:
        took = [at[size][title] for size in sizes]
        print(f"  {title:<42}" + "".join(f"{1e3 * one:12.2f}" for one in took) + f"{took[-1] / took[0]:8.1f}x")
    print("  the seed, in memory and not durable: mark 0.03, choose one to evict 0.1", flush=True)
    bench_large_sweep()


def measure_decisions(size: int) -> dict[str, float]:
    """p50 of each decision in a pool that has `size` rows."""
    from django.db import connection, transaction
    from django.utils import timezone

    from sandboxes import eviction, lifecycle, pool, sweeps
    from sandboxes.models import Pool, Quota, Sandbox

    now = timezone.now()
    Sandbox.objects.filter(idle_at__lte=now).update(idle_at=now + timedelta(hours=1))
    one, _ = Pool.objects.get_or_create(name="bench", defaults={"provider": "memory", "capacity": 10**9, "warm_target": 1})
    fill_pool(one, size - Sandbox.objects.filter(pool=one).count(), now=now)
    Quota.objects.get_or_create(pool=one, agent_did="did:plc:guaranteed", defaults={"guaranteed": 5})
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE" if connection.vendor == "postgresql" else "ANALYZE")

    def want() -> pool.SandboxRequest:
        return pool.SandboxRequest(uuid.uuid4(), "did:plc:bench", "e", one, timedelta(minutes=30))

    waiting = list(Sandbox.objects.filter(pool=one, state="waiting").values_list("pk", "holder")[: ROUND_COUNT + 3])

    def mark(number: int) -> None:
        pk, holder = waiting[number % len(waiting)]
        with transaction.atomic():
            assert lifecycle.start_run(pk, holder=holder, now=now)
        with transaction.atomic():
            lifecycle.finish_run(pk, 1, idle_after=timedelta(hours=2), now=now)

    def claim(number: int) -> None:
        assert pool.claim_warm(want(), now=now)

    def drop(number: int) -> None:
        assert eviction.free_place(one, agent_did="did:plc:bench", now=now)

    def due(count: int) -> None:
        pks = Sandbox.objects.filter(pool=one, state="waiting").values("pk")[:count]
        Sandbox.objects.filter(pk__in=list(pks.values_list("pk", flat=True))).update(idle_at=now)

    def sweep(number: int) -> None:
        assert sweeps.claim_idle(lifecycle.WAITING, uuid.uuid4(), now=now, limit=10 * IDLE_PER_SWEEP) in (
            IDLE_PER_SWEEP,
            10 * IDLE_PER_SWEEP,
        )

    def again(number: int) -> None:
        Sandbox.objects.filter(pool=one, state="evicting").update(
            state="waiting", claim=None, deadline_at=None, idle_at=now + timedelta(hours=1)
        )

    def yardstick(number: int) -> None:
        assert Pool.objects.filter(pk=one.pk).update(warm_target=1)

    chosen = BenchCase("choose one to evict", lambda number: eviction.find_victim(one, agent_did="did:plc:bench", now=now))
    few = BenchCase("idle sweep", sweep, before=lambda number: due(IDLE_PER_SWEEP), after=again)
    many = BenchCase("idle sweep of ten times as many", sweep, before=lambda number: due(10 * IDLE_PER_SWEEP), after=again)
    cases = [
        BenchCase("yardstick: update one row by its key", yardstick),
        BenchCase("pick and claim a pre-warmed one", claim),
        BenchCase("mark running, mark waiting", mark),
        chosen,
        BenchCase("choose and evict a cold one", drop),
    ]
    enough = min(ROUND_COUNT, size // 100)
    interleave(cases, rounds=enough)
    interleave([few] + [many] * (size >= 10_000), rounds=min(enough, 10), warmup=1)
    found = {case.name: case.p50 for case in cases}
    found["idle sweep, for each idle one"] = few.p50 / IDLE_PER_SWEEP
    found["the same with ten times as many idle"] = (
        (many.p50 / (10 * IDLE_PER_SWEEP)) if many.seconds else few.p50 / IDLE_PER_SWEEP
    )
    return found


def fill_pool(pool: Any, count: int, *, now: datetime) -> None:
    """Insert rows in all states, each used some time in the last day, in a few statements."""
    began, done = time.perf_counter(), 0
    shares = [(state, round(count * share / 100)) for state, share in STATE_PERCENTAGES]
    for state, some in shares:
        insert_rows(pool, state, some, now=now)
        done += some
    print(f"  {done:,} rows more inserted in {time.perf_counter() - began:.0f} s", flush=True)


def insert_rows(pool: Any, state: str, count: int, *, now: datetime) -> None:
    """Insert `count` rows in one state, by one statement."""
    from django.conf import settings
    from django.db import connection

    from sandboxes.models import Sandbox

    postgres = connection.vendor == "postgresql"
    example = Sandbox(
        pool=pool, provider="memory", image=settings.SANDBOX_IMAGE, memory_mib=pool.memory_mib, millicpus=1000, pids=64,
        state=state, state_since=now, created_at=now, last_used_at=now, environment_id="e", open_runs=int(state == "running"),
        idle_at=now + timedelta(hours=1) if state in ("waiting", "warm") else None,
        destroyed_at=now if state == "destroyed" else None,
    )  # fmt: skip
    new = "gen_random_uuid()" if postgres else "lower(hex(randomblob(16)))"
    moment = (
        "%s::timestamptz - random() * interval '1 day'"
        if postgres
        else "strftime('%%Y-%%m-%%d %%H:%%M:%%f000', %s, '-' || abs(random() %% 86400) || ' seconds')"
    )
    odd = {
        "id": new,
        "holder": f"CASE WHEN n %% 2 = 0 OR state <> 'warm' THEN {new} END",  # of the warm ones, half are nobody's yet
        "agent_did": "'did:plc:a' || n",
        "last_used_at": moment,
    }
    columns, values, given = [], [], []
    for field in Sandbox._meta.concrete_fields:
        if field.generated:
            continue
        value = field.get_db_prep_save(getattr(example, field.attname), connection)
        columns.append(field.column)
        expression = odd.get(field.column, f"CAST(%s AS {field.db_type(connection)})" if postgres else "%s")
        if field.column == "holder":
            expression = expression.replace("state", f"'{state}'")
        values.append(expression)
        if field.column not in odd or field.column == "last_used_at":
            given.append(value)
    series = (
        f"generate_series(1, {count}) AS n"
        if postgres
        else f"(WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {count}) SELECT n FROM s)"
    )
    with connection.cursor() as cursor:
        cursor.execute(f"INSERT INTO sandboxes_sandbox ({', '.join(columns)}) SELECT {', '.join(values)} FROM {series}", given)


def bench_large_sweep() -> None:
    """Deciding an idle sweep of very many sandboxes against one raw UPDATE of as many rows that says which they are."""
    from django.conf import settings
    from django.db import connection
    from django.utils import timezone

    from sandboxes import eviction, lifecycle, sweeps
    from sandboxes.db import sql
    from sandboxes.models import Pool, Sandbox

    now = timezone.now()
    Sandbox.objects.filter(idle_at__lte=now).update(idle_at=now + timedelta(hours=1))
    one = Pool.objects.create(name="idle", provider="memory", capacity=10**9)
    insert_rows(one, "waiting", SWEPT_ROWS, now=now)

    def due(number: int) -> None:
        back = {"claim": None, "deadline_at": None, "idle_at": now}
        Sandbox.objects.filter(pool=one).update(state="waiting", **back)
        with connection.cursor() as cursor:
            cursor.execute("VACUUM ANALYZE sandboxes_sandbox" if connection.vendor == "postgresql" else "ANALYZE")

    statement = (
        "UPDATE sandboxes_sandbox SET state = 'evicting', state_since = %s, claim = %s, claimed_by = %s, deadline_at = %s, "
        "idle_at = NULL WHERE idle_at <= %s AND state = 'waiting' AND holder IS NOT NULL AND lost_at IS NULL RETURNING id"
    )

    def raw(number: int) -> None:
        given = [now, uuid.uuid4(), settings.INSTANCE, now + eviction.EVICTION_TIMEOUT, now]
        with connection.cursor() as cursor:
            cursor.execute(statement, [sql._adapt_value(value) for value in given])
            assert len(cursor.fetchall()) == SWEPT_ROWS

    def ours(number: int) -> None:
        assert sweeps.claim_idle(lifecycle.WAITING, uuid.uuid4(), now=now, limit=SWEPT_ROWS) == SWEPT_ROWS

    bare = BenchCase("one raw UPDATE … RETURNING", raw, before=due)
    cases = [bare, BenchCase("claim_idle, with each Transition", ours, before=due)]
    interleave(cases, rounds=2, warmup=0)
    print_report(f"deciding an idle sweep of {SWEPT_ROWS:,} in one go", cases, raw=bare, aim="3x")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))

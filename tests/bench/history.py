"""Rows of ended leases with their runs, transitions, readings, usage, turns and events, inserted by one statement a table."""

from datetime import datetime, timedelta
from typing import Any

from django.db import connection
from django.db.models import GeneratedField, Model

from billing.models import Account, CostRecord, Tab, UsageRecord
from leases.environments.models import Environment
from leases.models import EnvironmentType, Lease, LeaseEvent, Turn
from sandboxes.models import Event, Pool, Reading, Run, Sandbox, Transition

RUNS_PER_LEASE = 10
AGENT_COUNT = 500
DAYS = 120  # of history; LEASEHOLD_KEEP_HISTORY is 90
LEASE_ID, SANDBOX_ID = "md5('lease ' || n)::uuid", "md5('sandbox ' || n)::uuid"
RUN_ID = "md5('run ' || n || ' ' || k)::uuid"
HELD = {"holder": LEASE_ID, "agent_did": f"'did:plc:a' || mod(n, {AGENT_COUNT})"}
IN_GAME = {**HELD, "environment_id": "'game-' || n / 10"}


def fill(pool: Pool, runs: int, *, now: datetime) -> None:
    """Insert a history, and prepare the tables as autovacuum does."""
    insert_history(pool, runs, now=now)
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE")


def insert_history(pool: Pool, runs: int, *, now: datetime) -> None:
    """Insert ended leases with `runs` runs in all, evenly over the last DAYS days. On PostgreSQL."""
    leases = runs // RUNS_PER_LEASE
    _insert_leases(pool, leases, _build_start(leases, now))
    _insert_facts(leases, _build_start(leases, now))


def _build_start(leases: int, now: datetime) -> str:
    """Return the SQL expression of the beginning of lease n."""
    return f"TIMESTAMPTZ '{now.isoformat()}' - INTERVAL '1 day' * {DAYS} + INTERVAL '1 day' * {DAYS} * 0.99 * n / {leases}"


def _insert_leases(pool: Pool, leases: int, start: str) -> None:
    rows, end = f"generate_series(1, {leases}) n", f"({start} + INTERVAL '10 minutes')"
    hour, catan = timedelta(hours=1), EnvironmentType.objects.get(name="catan").name
    first_of_game = start.replace(" n /", " n * 10 /")
    host = Sandbox.objects.values_list("host", flat=True)[0]
    insert(
        Environment, f"generate_series(0, {leases // 10}) n",
        {"id": "'game-' || n", "created_at": first_of_game, "started_at": first_of_game,
         "ended_at": f"{first_of_game} + INTERVAL '1 day'"},
        type_id=catan, end_reason="unused", project_id=1,
    )  # fmt: skip
    insert(
        Lease, rows,
        {"id": LEASE_ID, "agent_did": HELD["agent_did"], "environment_id": IN_GAME["environment_id"], "leased_at": start,
         "last_activity_at": start, "expires_at": end, "max_expires_at": end, "ended_at": end, "destroyed_at": end},
        environment_type_id=catan, pool_id=pool.pk, ttl=hour, sleep_after=hour, expires_minute=0, status="destroyed",
        end_reason="released",
    )  # fmt: skip
    insert(
        Sandbox, rows,
        {"id": SANDBOX_ID, **IN_GAME, "state_since": end, "created_at": start, "last_used_at": start, "destroyed_at": end},
        pool_id=pool.pk, provider="memory", host_id=host, memory_mib=1024, millicpus=250, pids=100, state="destroyed",
        metered=True,
    )  # fmt: skip
    insert(Tab, rows, {**HELD, "opened_at": start, "closed_at": end}, environment_type=catan)
    event = {"id": "md5('event ' || n)::uuid", "key": "n::text", "at": end, "position": "n"}
    insert(Event, rows, event, kind="lease.ended", payload={"lease_id": "x"})
    account = Account.objects.values_list("pk", flat=True)[0]
    cost = {**IN_GAME, "day": f"({start})::date"}
    insert(CostRecord, rows, cost, account_id=account, provider="memory", item="llm", whole="1", quantity=1, usd=1)


def _insert_facts(leases: int, start: str) -> None:
    at = f"({start} + INTERVAL '1 minute' * k)"
    later = f"({at} + INTERVAL '10 seconds')"

    def each(count: int) -> str:
        return f"generate_series(1, {leases}) n, generate_series(1, {count}) k"

    insert(
        Run, each(RUNS_PER_LEASE),
        {"id": RUN_ID, "sandbox_id": SANDBOX_ID, **HELD, "started_at": at, "deadline_at": f"({at} + INTERVAL '1 minute')",
         "ended_at": later, "outcome": "CASE WHEN mod(n + k, 20) = 0 THEN 'failed' ELSE 'ok' END",
         "kind": "CASE WHEN k <= 2 THEN 'turn' ELSE 'exec' END"},
        argv=["true"], stdout=b"hello world\n", stdout_bytes=12, exit_code=0, metered=True,
    )  # fmt: skip
    insert(
        Transition, each(12),
        {"sandbox_id": SANDBOX_ID, "holder": LEASE_ID, "at": at,
         "was": "CASE WHEN mod(k, 2) = 0 THEN 'running' ELSE 'waiting' END",
         "to": "CASE WHEN k = 12 THEN 'destroyed' WHEN mod(k, 2) = 0 THEN 'waiting' ELSE 'running' END"},
        code="run_started", reason="exec",
    )  # fmt: skip
    insert(
        Reading, each(5),
        {"sandbox_id": SANDBOX_ID, "holder": LEASE_ID, "number": "k", "since": at, "at": later},
        incarnation=1, counted=1, cpu_micros=1, memory_mib=1, metered=True,
    )  # fmt: skip
    insert(
        UsageRecord, each(10),
        {"source": "'growth ' || n || ' ' || k", "sandbox_id": SANDBOX_ID, **IN_GAME, "day": f"({at})::date", "began_at": at,
         "ended_at": later},
        item="time", provider="memory", state="running", memory_mib=1024, millicpus=250,
    )  # fmt: skip
    turn = {"lease_id": LEASE_ID, "number": "k", "run_id": RUN_ID, "started_at": at, "deadline_at": later, "ended_at": later}
    insert(Turn, each(2), turn, answer='{"action": "roll"}')
    insert(LeaseEvent, each(2), {"lease_id": LEASE_ID, "at": at}, kind="granted")


def insert(model: type[Model], source: str, columns: dict[str, str], **values: Any) -> None:
    """Insert a row for each row of `source`. `columns` are SQL expressions; other columns have values or their defaults."""
    names, expressions, parameters = [], [], []
    for each in model._meta.concrete_fields:
        is_generated = isinstance(each, GeneratedField) or each.get_internal_type() == "BigAutoField"
        if is_generated:
            continue
        names.append(f'"{each.column}"')
        if each.attname in columns:
            expressions.append(columns[each.attname])
        else:
            expressions.append("%s")
            parameters.append(each.get_db_prep_save(values.get(each.attname, each.get_default()), connection))
    table = model._meta.db_table
    with connection.cursor() as cursor:
        cursor.execute(f"INSERT INTO {table} ({', '.join(names)}) SELECT {', '.join(expressions)} FROM {source}", parameters)

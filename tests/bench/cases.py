"""Leases through HTTP against the one SQL statement each verb is about, on the same database; at one caller and eight.

The raw side is the driver alone: one connection, the statement prepared, each execution a transaction of the same
durability."""

import os
import sqlite3
import sys
import uuid
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.bench.measure import BenchCase, ConcurrentCase, interleave, list_process_tree, print_report, run_concurrently
from tests.bench.server import ApiClient, configure, run_control_plane

CALL_COUNT = int(os.environ.get("BENCH_CALLS", "2000"))
SECONDS_PER_ROUND = float(os.environ.get("BENCH_SECONDS", "2"))
CLIENT_COUNT = 8
DID = "did:web:bench.invalid"
Execute = Callable[[str, Sequence[Any]], Any]


def main(name: str, database: str, here: Path) -> None:
    configure(database, here)
    with run_control_plane() as (up, port):
        print(f"\n===== leases, {name} =====")
        bench_leases(port, up.pid)


def open_driver() -> Execute:
    """Execute a statement on a new connection of the database's own driver, as %s marks its parameters; its rows."""
    from django.conf import settings
    from django.db import connection

    if connection.vendor == "postgresql":
        import psycopg

        there = psycopg.connect(os.environ["DATABASE_URL"], autocommit=True, prepare_threshold=0)
        cursor = there.cursor()

        def on_postgres(statement: str, values: Sequence[Any]) -> Any:
            cursor.execute(statement, values)
            return cursor.fetchall() if cursor.description else None

        return on_postgres
    local = sqlite3.connect(settings.DATABASES["default"]["NAME"], isolation_level=None, timeout=20)
    local.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL")
    return lambda statement, values: local.execute(statement.replace("%s", "?"), values).fetchall()


def adapt_datetime(value: Any) -> Any:
    from django.db import connection

    return value if connection.vendor == "postgresql" else connection.ops.adapt_datetimefield_value(value)


def list_database_pids() -> list[int]:
    """PostgreSQL's processes that work for this database or for all; none for SQLite, which works inside ours."""
    from django.db import connection

    if connection.vendor != "postgresql":
        return []
    with connection.cursor() as cursor:
        cursor.execute("SELECT pid FROM pg_stat_activity WHERE datname = current_database() OR datname IS NULL")
        return [row[0] for row in cursor.fetchall()]


def bench_leases(port: int, up: int) -> None:
    from django.db import connection, connections
    from django.utils import timezone

    from leases import api_keys, leasing
    from leases.models import Lease

    now, run = timezone.now(), uuid.uuid4().hex[:8]
    key = api_keys.issue_key([DID], now=now)[1]
    api = ApiClient(port, key)
    ask = {"agent_did": DID, "environment_type": "catan"}
    lease = uuid.UUID(api.post("/leases", {**ask, "environment_id": "held"})["id"])
    others = [api.post("/leases", {**ask, "environment_id": f"held-{number}"})["id"] for number in range(CLIENT_COUNT)]
    native = connection.features.has_native_uuid_field
    fields = Lease._meta.concrete_fields
    row = dict(zip([field.column for field in fields], Lease.objects.filter(pk=lease).values_list().get(), strict=True))
    values = {field.column: field.get_db_prep_save(row[field.column], connection) for field in fields}
    insert = f"INSERT INTO leases_lease ({', '.join(values)}) VALUES ({', '.join(['%s'] * len(values))})"

    def renews(pk: uuid.UUID) -> Callable[[int], Any]:
        execute, fence = open_driver(), pk if native else pk.hex

        def renew(number: int) -> Any:
            moment = timezone.now()
            until = leasing.compute_expires_at(
                renewed_at=moment, ttl=timedelta(hours=4), max_expires_at=now + timedelta(hours=24)
            )
            at, end = adapt_datetime(moment), adapt_datetime(until)
            changed = [end, leasing.to_epoch_minute(until), at, fence, at, at, end]
            return execute(f"UPDATE leases_lease SET {leasing.RENEW_SQL}", changed)

        return renew

    plain = open_driver()
    held = "SELECT id, expires_at FROM leases_lease WHERE agent_did = %s AND environment_id = %s AND status = 'active'"

    def insert_one(number: int) -> Any:
        new = uuid.uuid4()
        changed = {"id": new if native else new.hex, "environment_id": f"raw-{run}-{number}"}
        return plain(insert, list((values | changed).values()))

    def server() -> Iterable[int]:
        return [*list_process_tree(up), *list_database_pids()]

    def ourselves() -> Iterable[int]:
        return [os.getpid(), *list_database_pids()]

    renew, again = api.calls(f"/leases/{lease}/renew"), api.calls("/leases", {**ask, "environment_id": "held"})
    for title, raw, through in (
        ("renew", renews(lease), lambda number: renew()),
        ("acquire, held", lambda number: plain(held, [DID, "held"]), lambda number: again()),
        ("acquire, new", insert_one, lambda number: api.post("/leases", {**ask, "environment_id": f"{run}-{number}"})),
    ):
        bare = BenchCase("raw SQL, this process", raw, ourselves)
        ours = BenchCase("through HTTP", through, server)
        interleave([bare, ours], rounds=max(CALL_COUNT // 100, 1), block=min(CALL_COUNT, 100), warmup=20)
        print_report(title, [bare, ours], raw=bare)

    def posts(client: int) -> Callable[[int], Any]:
        call = ApiClient(port, key).calls(f"/leases/{others[client]}/renew")
        return lambda number: call()

    bare = ConcurrentCase("raw SQL, a process each", lambda client: renews(uuid.UUID(others[client])))
    ours = ConcurrentCase("through HTTP", posts)
    connections.close_all()  # the clients are forks of this process
    run_concurrently([bare, ours], clients=CLIENT_COUNT, seconds=SECONDS_PER_ROUND)
    print_report(f"renew, {CLIENT_COUNT} callers at once, a lease each", [bare, ours], raw=bare)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))

"""Lease operations through HTTP against the raw SQL statement, on the same database, with one client and with eight.

The raw case uses the database driver only: one connection, a prepared statement, and one transaction of the same durability
per execution."""

import os
import sqlite3
import uuid
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import psycopg
from django.conf import settings
from django.db import connection, connections
from django.utils import timezone

from leases import api_keys, leasing
from leases.models import Lease
from tests.bench.measure import BenchCase, ConcurrentCase, interleave, list_process_tree, print_report, run_concurrently
from tests.bench.server import ApiClient, run_control_plane

CALL_COUNT = int(os.environ.get("BENCH_CALLS", "2000"))
SECONDS_PER_ROUND = float(os.environ.get("BENCH_SECONDS", "2"))
CLIENT_COUNT = 8
DID = "did:web:bench.invalid"
Execute = Callable[[str, Sequence[Any]], Any]


def main() -> None:
    with run_control_plane() as (up, port):
        bench_leases(port, up.pid)


def open_driver() -> Execute:
    """Return a function that executes a statement with %s parameters on a new driver connection and returns its rows."""
    if connection.vendor == "postgresql":
        driver_connection = psycopg.connect(os.environ["DATABASE_URL"], autocommit=True, prepare_threshold=0)
        cursor = driver_connection.cursor()

        def on_postgres(statement: str, values: Sequence[Any]) -> Any:
            cursor.execute(statement, values)
            return cursor.fetchall() if cursor.description else None

        return on_postgres
    sqlite = sqlite3.connect(settings.DATABASES["default"]["NAME"], isolation_level=None, timeout=20)
    sqlite.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL")
    return lambda statement, values: sqlite.execute(statement.replace("%s", "?"), values).fetchall()


def adapt_datetime(value: Any) -> Any:
    return value if connection.vendor == "postgresql" else connection.ops.adapt_datetimefield_value(value)


def adapt_uuid(value: uuid.UUID | str) -> Any:
    return value if connection.features.has_native_uuid_field else uuid.UUID(str(value)).hex


def list_database_pids() -> list[int]:
    """Process ids of PostgreSQL's backends for this database and of its shared workers; empty for SQLite."""
    if connection.vendor != "postgresql":
        return []
    with connection.cursor() as cursor:
        cursor.execute("SELECT pid FROM pg_stat_activity WHERE datname = current_database() OR datname IS NULL")
        return [row[0] for row in cursor.fetchall()]


def bench_leases(port: int, up: int) -> None:
    now, run = timezone.now(), uuid.uuid4().hex[:8]
    key = api_keys.issue_key([DID], now=now)[1]
    api = ApiClient(port, key)
    request = {"agent_did": DID, "environment_type": "catan"}
    lease = uuid.UUID(api.post("/leases", {**request, "environment_id": "held"})["id"])
    other_leases = [
        api.post("/leases", {**request, "environment_id": f"held-{number}"})["id"] for number in range(CLIENT_COUNT)
    ]
    has_native_uuid = connection.features.has_native_uuid_field
    fields = Lease._meta.concrete_fields
    row = dict(zip([field.column for field in fields], Lease.objects.filter(pk=lease).values_list().get(), strict=True))
    values = {field.column: field.get_db_prep_save(row[field.column], connection) for field in fields}
    insert = f"INSERT INTO leases_lease ({', '.join(values)}) VALUES ({', '.join(['%s'] * len(values))})"

    def make_raw_renewal(pk: uuid.UUID) -> Callable[[int], Any]:
        execute, fence = open_driver(), pk if has_native_uuid else pk.hex

        def renew(number: int) -> Any:
            moment = timezone.now()
            expires_at = leasing.compute_expires_at(
                renewed_at=moment, ttl=timedelta(hours=4), max_expires_at=now + timedelta(hours=24)
            )
            at, end = adapt_datetime(moment), adapt_datetime(expires_at)
            parameters = [end, leasing.to_epoch_minute(expires_at), at, fence, at, at, end]
            return execute(f"UPDATE leases_lease SET {leasing.RENEW_SQL}", parameters)

        return renew

    execute_raw = open_driver()
    held_sql = "SELECT id, expires_at FROM leases_lease WHERE agent_did = %s AND environment_id = %s AND status = 'active'"

    def insert_one(number: int) -> Any:
        pk = uuid.uuid4()
        parameters = {"id": pk if has_native_uuid else pk.hex, "environment_id": f"raw-{run}-{number}"}
        return execute_raw(insert, list((values | parameters).values()))

    def list_server_pids() -> Iterable[int]:
        return [*list_process_tree(up), *list_database_pids()]

    def list_own_pids() -> Iterable[int]:
        return [os.getpid(), *list_database_pids()]

    renew, acquire_again = api.calls(f"/leases/{lease}/renew"), api.calls("/leases", {**request, "environment_id": "held"})
    for title, raw_call, http_call in (
        ("renew", make_raw_renewal(lease), lambda number: renew()),
        ("acquire, held", lambda number: execute_raw(held_sql, [DID, "held"]), lambda number: acquire_again()),
        ("acquire, new", insert_one, lambda number: api.post("/leases", {**request, "environment_id": f"{run}-{number}"})),
    ):
        raw_case = BenchCase("raw SQL, this process", raw_call, list_own_pids)
        http_case = BenchCase("through HTTP", http_call, list_server_pids)
        interleave([raw_case, http_case], rounds=max(CALL_COUNT // 100, 1), block=min(CALL_COUNT, 100), warmup=20)
        print_report(title, [raw_case, http_case], raw=raw_case)

    def make_http_renewal(client: int) -> Callable[[int], Any]:
        call = ApiClient(port, key).calls(f"/leases/{other_leases[client]}/renew")
        return lambda number: call()

    raw_case = ConcurrentCase("raw SQL, one process each", lambda client: make_raw_renewal(uuid.UUID(other_leases[client])))
    http_case = ConcurrentCase("through HTTP", make_http_renewal)
    connections.close_all()  # the clients are forked from this process
    run_concurrently([raw_case, http_case], clients=CLIENT_COUNT, seconds=SECONDS_PER_ROUND)
    print_report(f"renew, {CLIENT_COUNT} concurrent clients, one lease each", [raw_case, http_case], raw=raw_case)

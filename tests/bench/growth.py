"""Growth: the same operations on a small database and on a large one, in turn, on PostgreSQL.

Both have the same open leases, and ended leases with BENCH_HISTORY_ROWS runs (two numbers) and the other rows of as many runs.
A ratio far above 1 is a query that reads the history. A million runs take some minutes to insert. At the end the expired
quarter of the large history is deleted beside commands."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from statistics import median
from typing import Any

from django.contrib.auth.models import User
from django.db import connection, connections
from django.test import Client
from django.utils import timezone

from billing import period_totals
from billing.models import PeriodTotal, Watermark
from billing.models.period_totals import COSTS_WATERMARK
from controlplane.schedules import SCHEDULE, SWEEP_NAMES
from leases import api_keys, execution, leasing
from leases.leasing import LeaseRequest
from leases.models import AgentKey, Lease
from leases.retention.sweep import delete_expired
from sandboxes.models import Host, Pool
from sandboxes.runs.operations import Command
from tests.bench.history import fill
from tests.bench.measure import measure_seconds

SMALL, LARGE = (int(size) for size in os.environ.get("BENCH_HISTORY_ROWS", "10000,1000000").split(","))
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "5"))
OPEN_LEASES = 20
SWEEPS = [name for name in SWEEP_NAMES if name not in ("hosts", "seal", "mark", "retention")]
PAGES = {
    "leases": "leases/lease/?slice=all", "leases, search": "leases/lease/?slice=all&q=did:plc:a7",
    "turns": "leases/turn/", "turns, open": "leases/turn/?slice=open", "turns, skipped": "leases/turn/?slice=skipped",
    "turns, search": "leases/turn/?q=did:plc:a7",
    "runs": "sandboxes/run/?slice=all", "runs, failed": "sandboxes/run/?slice=failed",
    "runs, out of memory": "sandboxes/run/?slice=all&outcome__exact=oom",
    "runs, files": "sandboxes/run/?slice=all&kind__exact=file",
    "runs, search": "sandboxes/run/?slice=all&q=did:plc:a7",
    "runs, search without result": "sandboxes/run/?slice=all&q=nothing",
    "sandboxes": "sandboxes/sandbox/?slice=all", "sandboxes, search": "sandboxes/sandbox/?slice=all&q=did:plc:a7",
    "hosts": "sandboxes/host/", "readings": "sandboxes/reading/",
    "runs, search by old environment": "sandboxes/run/?slice=all&q=game-12",
    "runs, of an agent": "sandboxes/run/?slice=all&agent_did=did:plc:a7",
    "runs, open": "sandboxes/run/?slice=all&outcome__exact=open",
    "runs, stopped": "sandboxes/run/?slice=all&stop_reason__exact=ttl",
    "readings, search": "sandboxes/reading/?q=did:plc:a7", "events": "sandboxes/event/",
    "usage, search": "billing/usagerecord/?slice=all&q=did:plc:a7",
    "usage, search without result": "billing/usagerecord/?slice=all&q=nothing",
    "usage, unpriced": "billing/usagerecord/?slice=unpriced",
    "costs": "billing/costrecord/", "costs, search": "billing/costrecord/?slice=all&q=did:plc:a7",
    "accounts": "billing/account/", "budgets": "billing/budget/", "agents": "leases/agent/", "keys": "leases/agentkey/",
    "environments": "leases/environment/?slice=all", "dashboard": "",
}  # fmt: skip
API = {
    "GET /leases": "leases", "GET /leases?status=active": "leases?status=active", "GET /environments": "environments",
    "GET /costs": "costs", "GET /costs by day": "costs?by=day", "GET /costs of an agent": "costs?agent=did:plc:a7",
    "GET /forecast": "forecast", "GET /forecast of an account": "forecast?account=house", "GET /budgets": "budgets",
    "GET /agents": "agents",
}  # fmt: skip


@dataclass
class GrowthCase:
    name: str
    act: Callable[[], object]
    seconds: dict[str, list[float]] = field(default_factory=dict)


def main() -> None:
    if connection.vendor != "postgresql":
        print("  skipped: the rows are inserted by PostgreSQL")
        return
    now = timezone.now()
    pool = Pool.objects.get(name="default")
    small = str(connection.settings_dict["NAME"])
    leases = [_open_lease(pool, number, now) for number in range(OPEN_LEASES)]
    key = api_keys.issue_key([], operator=True, now=now)[1]
    User.objects.create_superuser("bench")
    large = f"{small}_large"
    connections.close_all()
    _execute_on_server(f'CREATE DATABASE "{large}" TEMPLATE "{small}"')
    try:
        for name, size in ((small, SMALL), (large, LARGE)):
            with _database(name):
                seconds = measure_seconds(lambda size=size: fill(pool, size, now=now))  # type: ignore[misc]
                print(f"  {size:,} runs and their rows inserted in {seconds:.0f} s, {_get_size()}", flush=True)
                # As of a pricing pass: without one there is nothing to derive.
                Watermark.objects.update_or_create(name=COSTS_WATERMARK, defaults={"at": now})
                seconds = measure_seconds(period_totals.derive_missing_totals)
                assert PeriodTotal.are_valid()
                print(f"  totals of their costs derived in {seconds:.0f} s", flush=True)
        measure(_build_cases(leases, key), small, large)
        with _database(large):
            measure_retention(leases[0])
    finally:
        connections.close_all()
        _execute_on_server(f'DROP DATABASE IF EXISTS "{large}" WITH (FORCE)')


def measure(cases: list[GrowthCase], small: str, large: str) -> None:
    print(f"\n  {'p50 ms':<34}{f'{SMALL:,}':>12}{f'{LARGE:,}':>12}{'ratio':>8}")
    for case in cases:
        for _ in range(ROUNDS):
            for name in (small, large):
                with _database(name):
                    case.act()  # the connection is new
                    case.seconds.setdefault(name, []).append(measure_seconds(case.act))
        first, last = (1e3 * median(case.seconds[name]) for name in (small, large))
        print(f"  {case.name:<34}{first:12.1f}{last:12.1f}{last / first:7.1f}x", flush=True)


def measure_retention(lease: Lease) -> None:
    """Delete the expired rows. Print the rate, and the p50 of commands before and meanwhile."""

    def call() -> float:
        return measure_seconds(lambda: _run(lease))

    alone = [call() for _ in range(50)]
    beside: list[float] = []
    deleted, seconds, done = 0, 0.0, threading.Event()

    def run_commands() -> None:
        try:
            while not done.is_set():
                beside.append(call())
        finally:
            connections.close_all()

    client = threading.Thread(target=run_commands)
    client.start()
    try:
        while seconds < 300:
            began = timezone.now()
            result = delete_expired(now=began)
            seconds += (timezone.now() - began).total_seconds()
            deleted += sum(result.counts.values())
            assert not result.failures, result.failures
            if not result.counts:
                break
    finally:
        done.set()
        client.join()
    print(f"\n  retention: {deleted:,} rows in {seconds:.1f} s, {deleted / max(seconds, 0.1):,.0f} rows/s")
    print(f"  exec: p50 {1e3 * median(alone):.1f} ms alone, {1e3 * median(beside):.1f} ms beside the deletion", flush=True)


def _open_lease(pool: Pool, number: int, now: datetime) -> Lease:
    # Longer than the insertion of the rows takes: the two databases share the sandboxes of the memory provider.
    lasting = timedelta(hours=3)
    request = LeaseRequest(
        agent_did=f"did:plc:open{number}", environment_id=f"open-{number}", environment_type="catan", pool=pool.name,
        ttl=lasting, sleep_after=lasting,
    )  # fmt: skip
    lease = leasing.acquire(request, now=now)[0]
    _run(lease)
    return lease


def _run(lease: Lease) -> None:
    execution.exec_command(lease.pk, Command(argv=("true",), timeout=timedelta(minutes=1)), now=timezone.now())


def _build_cases(leases: list[Lease], key: str) -> list[GrowthCase]:
    headers = {"HTTP_AUTHORIZATION": f"Bearer {key}"}
    user = User.objects.get(username="bench")

    def read(path: str, **more: Any) -> None:
        client = Client(SERVER_NAME="localhost")
        if not more:
            client.force_login(user)
        response = client.get(path, **more)
        assert response.status_code == 200, (path, response.status_code)

    def sweep(name: str) -> None:
        result = SCHEDULE[name].sweep(now=timezone.now())
        assert not result.failures, result.failures

    host, agent_key = Host.objects.values_list("pk", flat=True)[0], AgentKey.objects.values_list("pk", flat=True)[0]
    rows = {
        "host": f"/admin/sandboxes/host/{host}/change/", "key": f"/admin/leases/agentkey/{agent_key}/change/",
        "pool": f"/admin/sandboxes/pool/{leases[0].pool_id}/change/", "lease": f"/admin/leases/lease/{leases[0].pk}/change/",
    }  # fmt: skip
    return [
        GrowthCase("no query of the history", lambda: Pool.objects.count()),
        GrowthCase("exec", lambda: _run(leases[0])),
        *(GrowthCase(name, lambda path=path: read(f"/api/v1/{path}", **headers)) for name, path in API.items()),  # type: ignore[misc]
        *(GrowthCase(f"sweep {name}", lambda name=name: sweep(name)) for name in SWEEPS),  # type: ignore[misc]
        *(GrowthCase(f"console: page of a {name}", lambda path=path: read(path)) for name, path in rows.items()),  # type: ignore[misc]
        *(GrowthCase(f"console: {name}", lambda path=path: read(f"/admin/{path}")) for name, path in PAGES.items()),  # type: ignore[misc]
    ]


def _get_size() -> str:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_size_pretty(pg_database_size(current_database()))")
        [[size]] = cursor.fetchall()
    return str(size)


@contextmanager
def _database(name: str) -> Iterator[None]:
    """Use another database of the same server, in every thread that connects from now on."""
    connections.close_all()
    before, connection.settings_dict["NAME"] = connection.settings_dict["NAME"], name
    try:
        yield
    finally:
        connections.close_all()
        connection.settings_dict["NAME"] = before


def _execute_on_server(statement: str) -> None:
    with _database("postgres"), connection.cursor() as cursor:
        cursor.execute(statement)

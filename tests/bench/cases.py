"""The benchmarks themselves, on one database: leases through HTTP against raw SQL, execs against the raw engine."""

import http.client
import json
import socket
import sys
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.bench.__main__ import CALLS, EXECS, Api, control_plane
from tests.bench.measure import Case, interleave, report, tree


def main(name: str, database: str, here: Path) -> None:
    with control_plane(database, here) as (up, port):
        import django

        django.setup()
        print(f"\n===== {name} =====")
        leases(port, up.pid)
        execs(port, up.pid)


def database_pids() -> Iterable[int]:
    """PostgreSQL's processes; none for SQLite, which works inside ours."""
    from django.db import connection

    if connection.vendor != "postgresql":
        return ()
    with connection.cursor() as cursor:
        cursor.execute("SELECT pid FROM pg_stat_activity")
        return [row[0] for row in cursor.fetchall()]


def leases(port: int, up: int) -> None:
    """acquire (held, new) and renew through HTTP against the one statement each of them is about."""
    from django.db import connection
    from django.utils import timezone

    from leases import keys, leasing

    now = timezone.now()
    did = "did:web:bench.invalid"
    api = Api(port, keys.issue([did], now=now)[1])
    ask = {"agent_did": did, "environment_type": "catan"}
    held = api.post("/leases", {**ask, "environment_id": "held"})
    lease = uuid.UUID(held["id"])
    postgres = connection.vendor == "postgresql"
    pk: Any = lease if postgres else lease.hex
    cursor = connection.cursor()
    run = uuid.uuid4().hex[:8]
    row = leasing.Lease.objects.filter(pk=lease).values_list().get()
    columns = [field.column for field in leasing.Lease._meta.concrete_fields]
    quoted = ", ".join(f'"{column}"' for column in columns)
    values = [
        field.get_db_prep_save(value, connection) for field, value in zip(leasing.Lease._meta.concrete_fields, row, strict=True)
    ]
    insert = f"INSERT INTO leases_lease ({quoted}) VALUES ({', '.join(['%s'] * len(columns))})"

    def raw_renew(number: int) -> None:
        moment = timezone.now()
        until = min(moment + leasing.timedelta(hours=4), now + leasing.timedelta(hours=24))
        cursor.execute(
            "UPDATE leases_lease SET expires_at = %s, expires_minute = %s, last_activity_at = %s "
            "WHERE id = %s AND status = 'active' AND expires_at > %s",
            [until, leasing.minute_of(until), moment, pk, moment],
        )

    def raw_held(number: int) -> None:
        cursor.execute(
            "SELECT id, expires_at FROM leases_lease WHERE agent_did = %s AND environment_id = %s AND status = 'active'",
            [did, "held"],
        )
        cursor.fetchall()

    def raw_new(number: int) -> None:
        fresh = list(values)
        new = uuid.uuid4()
        fresh[columns.index("id")] = new if postgres else new.hex
        fresh[columns.index("environment_id")] = f"raw-{run}-{number}"
        cursor.execute(insert, fresh)

    def server() -> Iterable[int]:
        return [*tree(up), *database_pids()]

    def ourselves() -> Iterable[int]:
        import os

        return [os.getpid(), *database_pids()]

    for title, raw, through in (
        ("renew", raw_renew, lambda number: api.post(f"/leases/{lease}/renew")),
        ("acquire, held", raw_held, lambda number: api.post("/leases", {**ask, "environment_id": "held"})),
        ("acquire, new", raw_new, lambda number: api.post("/leases", {**ask, "environment_id": f"{run}-{number}"})),
    ):
        bare = Case("raw SQL, this process", raw, ourselves)
        ours = Case("through HTTP", through, server)
        interleave([bare, ours], rounds=max(CALLS // 100, 1), block=100, warmup=20)
        report(title, [bare, ours], raw=bare)


def execs(port: int, up: int) -> None:
    """exec of `true` on a live sandbox: through HTTP and through the provider alone, against the engine's own socket."""
    from datetime import timedelta

    from django.utils import timezone

    from leases import keys
    from sandboxes import providers
    from sandboxes.models import Sandbox

    if providers.default_name() != "docker":
        print("\nexec: no Docker daemon answers; left out")
        return
    did = "did:web:bench-exec.invalid"
    api = Api(port, keys.issue([did], now=timezone.now())[1])
    joined = api.post("/environments/bench/join", {"agent_did": did, "environment_type": "coding"})
    sandbox = Sandbox.objects.get(holder=joined["id"])
    provider = providers.get("docker")
    minute = timedelta(minutes=1)
    bare = Case("raw: create, start, inspect", lambda number: raw_exec(sandbox.ref, ["true"]))
    alone = Case(
        "provider.exec",
        lambda number: provider.exec(sandbox.ref, ["true"], env={}, timeout=minute, mark=str(uuid.uuid4())),
    )
    ours = Case("through HTTP", lambda number: api.post(f"/leases/{joined['id']}/exec", {"argv": ["true"]}), lambda: tree(up))
    try:
        interleave([bare, alone, ours], rounds=EXECS)
        report("exec of `true`", [bare, alone, ours], raw=bare)
    finally:
        provider.destroy(sandbox.ref)


class _Unix(http.client.HTTPConnection):
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect("/var/run/docker.sock")


def _engine(method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
    connection = _Unix("localhost")
    connection.request(method, path, json.dumps(body) if body is not None else None, {"Content-Type": "application/json"})
    try:
        return connection.getresponse().read()
    finally:
        connection.close()


def raw_exec(container: str, argv: list[str]) -> int:
    """What any client of the engine has to do: create an exec, start it and read to the end, ask how it ended."""
    made = json.loads(
        _engine("POST", f"/containers/{container}/exec",
                {"Cmd": argv, "AttachStdout": True, "AttachStderr": True, "User": "10001:10001"})
    )["Id"]  # fmt: skip
    _engine("POST", f"/exec/{made}/start", {"Detach": False, "Tty": False})
    return int(json.loads(_engine("GET", f"/exec/{made}/json"))["ExitCode"])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))

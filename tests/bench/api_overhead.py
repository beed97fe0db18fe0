"""CPU of renew and exec through the API, against the same verbs called directly. In one process, without a web server.

Run by `python -m tests.bench tests.bench.api_overhead`. Exec runs on the memory provider, so the cost of a sandbox is not
included. To compare two revisions, alternate runs in two checkouts."""

import os
import statistics
import sys
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.bench.server import configure

RENEWALS = int(os.environ.get("BENCH_CALLS", "2000"))
EXECS = int(os.environ.get("BENCH_EXECS", "300"))
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "5"))
DID = "did:web:bench.invalid"


def main(name: str, database: str, here: Path) -> None:
    os.environ["SANDBOX_PROVIDER"] = "memory"
    configure(database, here)
    print(f"\n===== API overhead, {name} =====")
    bench_api()


def bench_api() -> None:
    from django.core.handlers.wsgi import WSGIHandler
    from django.test import RequestFactory
    from django.utils import timezone

    from leases import api_keys, execution, leasing
    from leases.models import Lease
    from sandboxes.db import sql
    from sandboxes.runs import Command

    now = timezone.now()
    key = api_keys.issue_key([DID], now=now)[1]
    request = leasing.LeaseRequest(agent_did=DID, environment_id="bench", environment_type="catan")
    pk = leasing.acquire(request, now=now, actor="bench", admit=lambda: None)[0].pk
    handler, factory = WSGIHandler(), RequestFactory(headers={"Authorization": f"Bearer {key}"})
    handler.load_middleware()
    argv = '{"argv": ["true"]}'

    def post(verb: str, body: str) -> Callable[[], Any]:
        path = f"/api/v1/leases/{pk}/{verb}"

        def call() -> None:
            response: Any = handler.get_response(factory.post(path, body, content_type="application/json"))
            assert response.status_code == 200, response.content

        return call

    def renew() -> None:
        lease = sql.find_first(Lease, "id = %s", pk)
        assert lease is not None
        leasing.renew(lease, now=timezone.now())

    def execute() -> None:
        command = Command(["true"], timedelta(seconds=60), {}, "/workspace", b"", run_id=uuid.uuid4())
        execution.exec_command(pk, command, now=timezone.now(), actor="bench")

    for title, direct, through, calls in (
        ("renew", renew, post("renew", ""), RENEWALS),
        ("exec", execute, post("exec", argv), EXECS),
    ):
        rounds: dict[str, list[float]] = {"verb alone": [], "through the API": []}
        for call in (direct, through):
            measure(call, 20)  # warm up
        for _ in range(ROUNDS):
            rounds["verb alone"].append(measure(direct, calls))
            rounds["through the API"].append(measure(through, calls))
        for side, spent in rounds.items():
            print(f"{title:6} {side:16} {statistics.median(spent):8.0f} us CPU a call (of {ROUNDS} rounds of {calls})")


def measure(call: Callable[[], Any], calls: int) -> float:
    """Return user and system time of this process per call, in microseconds."""
    began = time.process_time()
    for _ in range(calls):
        call()
    return (time.process_time() - began) / calls * 1e6


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))

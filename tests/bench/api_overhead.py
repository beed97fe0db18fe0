"""CPU of renew and exec through the API, against the same verbs called directly. In one process, without a web server.

The bare view is a Django view behind the same middleware that executes one UPDATE by the lease's primary key, without a key.

Exec runs on the memory provider, so the cost of a sandbox is not included. To compare two revisions, alternate runs in two
checkouts."""

import os
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.core.handlers.wsgi import WSGIHandler
from django.test import RequestFactory
from django.utils import timezone

from leases import api_keys, execution, leasing
from leases.models import Lease
from sandboxes.db import sql
from sandboxes.runs.operations import Command
from tests.bench import bare_view
from tests.bench.measure import BenchCase, get_own_pids, interleave, print_report

RENEWALS = int(os.environ.get("BENCH_CALLS", "2000"))  # per round
EXECS = int(os.environ.get("BENCH_EXECS", "300"))  # per round
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "5"))
DID = "did:web:bench.invalid"


def main() -> None:
    now = timezone.now()
    key = api_keys.issue_key([DID], now=now)[1]
    request = leasing.LeaseRequest(agent_did=DID, environment_id="bench", environment_type="catan")
    pk = leasing.acquire(request, now=now, actor="bench", admit=lambda: None)[0].pk
    handler, factory = WSGIHandler(), RequestFactory(headers={"Authorization": f"Bearer {key}", "Host": "localhost"})
    handler.load_middleware()

    def post(verb: str, body: str) -> Callable[[int], None]:
        url = f"/api/v1/leases/{pk}/{verb}"

        def call(number: int) -> None:
            response: Any = handler.get_response(factory.post(url, body, content_type="application/json"))
            assert response.status_code == 200, response.content

        return call

    def call_bare_view(number: int) -> None:
        request = factory.post(f"/api/v1/bare/{pk}", "", content_type="application/json")
        request.urlconf = bare_view.__name__
        assert handler.get_response(request).status_code == 200

    def renew(number: int) -> None:
        lease = sql.find_first(Lease, "id = %s", pk)
        assert lease is not None
        leasing.renew(lease, now=timezone.now())

    def execute(number: int) -> None:
        command = Command(["true"], timedelta(seconds=60), {}, "/workspace", b"", run_id=uuid.uuid4())
        execution.exec_command(pk, command, now=timezone.now(), actor="bench")

    for title, direct, through, calls in (
        ("renew", renew, post("renew", ""), RENEWALS),
        ("exec", execute, post("exec", '{"argv": ["true"]}'), EXECS),
    ):
        cases = [BenchCase("verb alone", direct, get_own_pids), BenchCase("through the API", through, get_own_pids)]
        if title == "renew":
            cases.insert(0, BenchCase("bare view", call_bare_view, get_own_pids))
        interleave(cases, rounds=ROUNDS, block=calls, warmup=20)
        print_report(title, cases, raw=cases[0])

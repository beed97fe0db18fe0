"""Model calls under limits in USD: what a reservation costs, and streams through the egress server beside direct ones.

The first table opens and settles calls without a server, on the memory provider: without a limit, with a spend limit and with a
hard budget, then with many calls and usage records of earlier. The second has 50 streams at once from one process: to the
upstream directly, through LiteLLM if TEST_LITELLM_URL is set, and through an egress server on a socket, without nginx."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import aiohttp
from django.conf import settings
from django.db import connections

from billing import budgets
from billing.models import Budget, UsageRecord
from leases import execution, leasing
from leases.models import Lease
from sandboxes.call_limits import CallLimits
from sandboxes.db import database_time
from sandboxes.egress import authorization, settlement
from sandboxes.egress.estimates import TokenEstimate
from sandboxes.egress.server import EgressServer
from sandboxes.egress.settlement import CallResult
from sandboxes.egress.token_usage import TokenUsage
from sandboxes.models import LlmCall, Policy, Pool, Sandbox, TokenRate
from sandboxes.runs.operations import Command
from tests.bench.measure import BenchCase, Timing, interleave, print_report, refresh_statistics
from tests.bench.server import REPO_DIR
from tests.support.servers.egress import EventLoopThread, run_server
from tests.support.servers.ports import find_free_ports

CALL_COUNT = int(os.environ.get("BENCH_MODEL_CALLS", "300"))
EARLIER_CALL_COUNT = int(os.environ.get("BENCH_ROWS", "100000"))  # of the lease, all metered
USAGE_RECORD_COUNT = EARLIER_CALL_COUNT // 10  # of other leases, on the same day
STREAM_COUNT, ROUND_COUNT = 50, int(os.environ.get("BENCH_ROUNDS", "5"))
PATH, MODEL = "/v1/chat/completions", "gpt"
ESTIMATE = TokenEstimate(200, 100)
BODY = {"model": MODEL, "stream": True, "max_tokens": 100, "messages": [{"role": "user", "content": "Hello. " * 100}]}
INSERT_BATCH_SIZE = 1000


def main() -> None:
    settings.LLM_MODEL = MODEL
    lease, sandbox = create_sandbox()
    usd = Decimal(1)
    start = database_time.now() - timedelta(days=1)
    for kind in ("input", "output"):
        TokenRate.objects.create(pattern=MODEL, kind=kind, usd_per_million=usd, valid_from=start)
    with run_upstream() as port:
        settings.LLM_URL = f"http://127.0.0.1:{port}/v1"
        bench_reservations("no earlier calls", sandbox)
        insert_earlier_calls(lease, sandbox)
        bench_reservations(
            f"{EARLIER_CALL_COUNT:,} calls of the lease, {USAGE_RECORD_COUNT:,} usage records of the day", sandbox
        )
        bench_streams(sandbox, port)


def create_sandbox() -> tuple[Lease, Sandbox]:
    now = database_time.now()
    pool, _ = Pool.objects.get_or_create(name="bench", defaults={"provider": "memory", "capacity": 100})
    lease, _ = leasing.acquire(leasing.LeaseRequest("did:plc:bench", "e", "coding", pool=pool.name), now=now)
    execution.exec_command(lease.pk, Command(["true"], timedelta(minutes=1)), now=now)
    sandbox = Sandbox.objects.get(holder=lease.pk)
    sandbox.policy = Policy.objects.create(name="bench", calls_per_minute=10**6, most_calls_at_once=1000, models=["*"])
    sandbox.save(update_fields=["policy"])
    return lease, sandbox


@contextmanager
def run_upstream() -> Iterator[int]:
    [port] = find_free_ports()
    process = subprocess.Popen([sys.executable, "-m", "tests.bench.upstream", str(port)], cwd=REPO_DIR)
    try:
        time.sleep(1)
        yield port
    finally:
        process.terminate()
        process.wait(20)


# --- reservations -----------------------------------------------------------------------------------------------------


def bench_reservations(title: str, sandbox: Sandbox) -> None:
    """Measure the opening and the settlement of a call under each limit."""

    def limit(usd: int | None = None, tokens: int | None = None) -> Callable[[int], object]:
        limits = CallLimits(None if usd is None else Decimal(usd), tokens)
        return lambda number: Sandbox.objects.filter(pk=sandbox.pk).update(**limits.columns)

    def enforce(hard: bool) -> Callable[[int], object]:
        return lambda number: Budget.objects.update(hard=hard)

    add_budget()
    enforce(False)(0)
    cases = [
        BenchCase("no limit", lambda number: make_call(sandbox), before=limit()),
        BenchCase("spend limit", lambda number: make_call(sandbox), before=limit(10**6), after=limit()),
        BenchCase("spend and token limit", lambda number: make_call(sandbox), before=limit(10**6, 10**12), after=limit()),
        BenchCase("hard budget on everything", lambda number: make_call(sandbox), before=enforce(True), after=enforce(False)),
    ]
    interleave(cases, rounds=CALL_COUNT)
    Budget.objects.all().delete()
    print_report(f"open and settle; {title}", cases, raw=cases[0], aim="2 ms more at p50")


def add_budget() -> None:
    budget = Budget(scope="all", unit="usd", amount=Decimal(10**6), period="month")
    budgets.create_budget(budget, now=database_time.now())


def make_call(sandbox: Sandbox) -> None:
    now = database_time.now()
    row, _ = authorization.open_model_call(
        sandbox.slot or 0, uuid.uuid4().hex, PATH, MODEL, streamed=True, size=600, estimate=ESTIMATE, now=now
    )
    result = CallResult(LlmCall.Outcome.OK, 200, usage=TokenUsage(), estimate=ESTIMATE)
    assert result.usage
    result.usage.add({"model": MODEL, "usage": {"prompt_tokens": 120, "completion_tokens": 7}})
    result.usage.is_final = True
    settlement.settle_call(row, result, now=now)


def insert_earlier_calls(lease: Lease, sandbox: Sandbox) -> None:
    """Insert metered calls of the lease, and usage records of other leases on this day."""
    now = database_time.now() - timedelta(minutes=10)  # not within the minute of the call rate
    earlier = (
        LlmCall(
            call_id=uuid.uuid4().hex, sandbox=sandbox, holder=lease.pk, agent_did=lease.agent_did, model=MODEL, outcome="ok",
            started_at=now, ended_at=now, deadline_at=now, cost=Decimal("0.0001"), metered_cost=Decimal("0.0001"),
            priced="rate", counted=True,
        )
        for _ in range(EARLIER_CALL_COUNT)
    )  # fmt: skip
    LlmCall.objects.bulk_create(earlier, batch_size=INSERT_BATCH_SIZE)
    records = (
        UsageRecord(
            item="tokens", source=f"bench {number}", day=now.date(), began_at=now, ended_at=now, holder=uuid.uuid4(),
            agent_did=f"did:plc:a{number % 100}", model=MODEL, calls=10, usd=Decimal("0.001"),
        )
        for number in range(USAGE_RECORD_COUNT)
    )  # fmt: skip
    UsageRecord.objects.bulk_create(records, batch_size=INSERT_BATCH_SIZE)
    refresh_statistics()


# --- streams ----------------------------------------------------------------------------------------------------------


class StreamRoute(Timing):
    """Route of concurrent streams. `seconds` are those to the first byte, `elapsed` those of all rounds."""

    def __init__(self, name: str, url: str, *, socket_path: str | None = None, key: str = "") -> None:
        super().__init__(name)
        self.url, self.socket_path, self.key, self.elapsed = url, socket_path, key, 0.0

    @property
    def rate(self) -> float:
        return len(self.seconds) / self.elapsed

    async def run_round(self) -> None:
        connector = aiohttp.UnixConnector(self.socket_path, limit=0) if self.socket_path else aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            began = time.perf_counter()
            self.seconds += await asyncio.gather(*(self._stream(session) for _ in range(STREAM_COUNT)))
            self.elapsed += time.perf_counter() - began

    async def _stream(self, session: aiohttp.ClientSession) -> float:
        began = time.perf_counter()
        async with session.post(self.url, json=BODY, headers={"Authorization": f"Bearer {self.key}"}) as response:
            await response.content.readany()
            first = time.perf_counter() - began
            content = await response.read()
            if response.status != 200:
                raise SystemExit(f"{self.name}: {response.status} {content[:300]!r}")
            return first


def bench_streams(sandbox: Sandbox, port: int) -> None:
    with tempfile.TemporaryDirectory(prefix="lh-bench-") as directory:
        settings.RUNTIME_DIR = Path(directory)
        settings.EGRESS_DIR = settings.RUNTIME_DIR / "egress"
        loop = EventLoopThread()
        with run_server(loop, slot=sandbox.slot or 0, server=EgressServer()) as path:
            routes = [StreamRoute("direct", f"http://127.0.0.1:{port}{PATH}")]
            if url := os.environ.get("TEST_LITELLM_URL"):
                routes.append(StreamRoute("LiteLLM", f"{url}{PATH}", key=os.environ["TEST_LITELLM_KEY"]))
            routes.append(StreamRoute("egress, no limit", f"http://sandbox{PATH}", socket_path=str(path)))
            limited = StreamRoute("egress, spend limit and budget", f"http://sandbox{PATH}", socket_path=str(path))
            for route in (*routes, limited):
                run(route.run_round())  # opens the connections
                route.seconds, route.elapsed = [], 0.0
            for _ in range(ROUND_COUNT):
                for route in routes:
                    run(route.run_round())
                Sandbox.objects.filter(pk=sandbox.pk).update(llm_limit=Decimal(10**6))
                add_budget()
                run(limited.run_round())
                Budget.objects.all().delete()
                Sandbox.objects.filter(pk=sandbox.pk).update(llm_limit=None)
            print_report(f"{STREAM_COUNT} streams at once, to the first byte", [*routes, limited], raw=routes[0])
        loop.close()
        connections.close_all()


def run(work: Awaitable[Any]) -> None:
    asyncio.run(work)  # type: ignore[arg-type]

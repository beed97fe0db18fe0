"""Latency of queued runs with 1, 100 and 10,000 pending ones of 100 agents, on the memory provider.

`add to start` is the time from the request that adds a run to its claim by an idle runner of the same process, if the run is
the next one. The reference is the direct execution of the same command."""

import os
import statistics
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta

from django.conf import settings
from django.utils import timezone

from leases import execution, leasing
from leases.models import Lease, QueuedRun
from leases.queue import attempts, queue
from leases.queue.queue import QueueOptions
from leases.queue.runner import Runner
from sandboxes.db import encryption
from sandboxes.models import Pool
from sandboxes.runs.operations import Command
from tests.bench.measure import refresh_statistics

PENDING_COUNTS = [int(count) for count in os.environ.get("BENCH_PENDING", "1,100,10000").split(",")]
ROUND_COUNT = int(os.environ.get("BENCH_ROUNDS", "100"))
AGENT_COUNT = 100
REQUEST = {"kind": "exec", "argv": ["true"], "cwd": "/workspace", "shell": None, "timeout_seconds": 60}


def main() -> None:
    settings.QUEUE_MAX_PENDING = settings.QUEUE_MAX_PENDING_PER_AGENT = 10**6
    pool, _ = Pool.objects.get_or_create(name="bench", defaults={"provider": "memory", "capacity": 10**6})
    lease = leasing.acquire(leasing.LeaseRequest("did:plc:bench", "e", "coding", pool="bench"), now=timezone.now())[0]
    print(f"\n  ms, p50 / p95 of {ROUND_COUNT:<27}" + "".join(f"{count:>18,}" for count in PENDING_COUNTS))
    results = [measure(count, pool, lease) for count in PENDING_COUNTS]
    for title in results[0]:
        cells = [f"{1e3 * statistics.median(each[title]):.1f} / {1e3 * compute_p95(each[title]):.1f}" for each in results]
        print(f"  {title:<42}" + "".join(f"{cell:>18}" for cell in cells), flush=True)


def measure(pending: int, pool: Pool, lease: Lease) -> dict[str, list[float]]:
    """Return the durations of each operation, in seconds, with `pending` other runs in the queue."""
    QueuedRun.objects.all().delete()
    now = timezone.now()
    others = [
        QueuedRun(
            agent_did=f"did:plc:a{number % AGENT_COUNT}", lease=lease, pool=pool, request=REQUEST, queued_at=now,
            available_at=now, expires_at=now + timedelta(days=1),
        )
        for number in range(pending)
    ]  # fmt: skip
    for row in others:
        row.sealed = encryption.encrypt(b'{"env": {}}', row=f"queued run {row.pk}")
    QueuedRun.objects.bulk_create(others, batch_size=1000)
    refresh_statistics()

    def add(agent: str = "did:plc:bench") -> uuid.UUID:
        pk = uuid.uuid4()
        queue.enqueue(
            pk, agent_did=agent, lease=lease, pool=pool, request=REQUEST, secrets={"env": {}}, options=QueueOptions(),
            now=timezone.now(),
        )  # fmt: skip
        return pk

    def claim() -> None:
        row = queue.claim("bench", now=timezone.now())
        assert row is not None
        QueuedRun.objects.filter(pk=row.pk).update(state="queued", runner_deadline=None, attempt=0)

    def execute() -> None:
        command = Command(["true"], timedelta(minutes=1))
        execution.exec_command(lease.pk, command, now=timezone.now())

    def execute_queued() -> None:
        add("did:plc:new")
        row = queue.claim("bench", now=timezone.now())
        assert row is not None
        attempts.execute(row, now=timezone.now())

    durations = {
        "reference: execute directly": repeat(execute),
        "add a run": repeat(add),
        "claim the next run": repeat(claim),
        "add, claim, execute, record": repeat(execute_queued),
    }
    QueuedRun.objects.filter(agent_did="did:plc:bench").delete()
    durations["add to start, idle runner"] = measure_start(add)
    return durations


def measure_start(add: Callable[..., uuid.UUID]) -> list[float]:
    """Return the times from a request to the claim of its run by a runner, which executes nothing else."""
    QueuedRun.objects.update(available_at=timezone.now() + timedelta(hours=1))
    started, claimed_at = threading.Event(), [0.0]

    def execute(row: QueuedRun, *, now: object) -> None:
        claimed_at[0] = time.perf_counter()
        queue.finish(row, attempts.STATE.COMPLETED, now=timezone.now())
        started.set()

    original, attempts.execute = attempts.execute, execute  # type: ignore[assignment]
    runner, durations = Runner(4), []
    try:
        for _ in range(ROUND_COUNT):
            started.clear()
            begun = time.perf_counter()
            add(f"did:plc:{uuid.uuid4().hex}")
            runner.notify()
            assert started.wait(30)
            durations.append(claimed_at[0] - begun)
            time.sleep(0.02)  # the runner becomes idle
    finally:
        attempts.execute = original
        runner.stop()
        runner.join()
    return durations


def repeat(operation: Callable[[], object]) -> list[float]:
    durations = []
    for _ in range(ROUND_COUNT):
        begun = time.perf_counter()
        operation()
        durations.append(time.perf_counter() - begun)
    return durations


def compute_p95(durations: list[float]) -> float:
    return statistics.quantiles(durations, n=20)[-1]

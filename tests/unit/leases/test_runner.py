"""Threads of the runner of queued runs."""

import threading
import uuid
from collections.abc import Callable, Iterator

import pytest
from django.conf import settings
from django.db import connections
from django.utils import timezone

from leases.models import Lease
from leases.queue import queue
from leases.queue.models import QueuedRun
from leases.queue.queue import QueueOptions
from leases.queue.runner import Runner
from sandboxes.models import Pool
from sandboxes.providers.memory import MemoryProvider
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)
COMMAND = {"kind": "exec", "argv": ["true"], "cwd": "/workspace", "shell": None, "timeout_seconds": 60}


@pytest.fixture
def running_lease(grant) -> Lease:
    lease: Lease = grant(now=timezone.now())
    return lease


@pytest.fixture
def runner() -> Iterator[Runner]:
    runner = Runner(2)
    yield runner
    runner.stop()
    runner.join()
    connections.close_all()


def enqueue(lease: Lease, pool: Pool, count: int = 1) -> None:
    for _ in range(count):
        queue.enqueue(
            uuid.uuid4(), agent_did=lease.agent_did, lease=lease, pool=pool, request=COMMAND, secrets={"env": {}},
            options=QueueOptions(), now=timezone.now(),
        )  # fmt: skip


def test_runner_executes_what_is_queued_with_as_many_threads_as_it_has(
    running_lease: Lease, pool: Pool, memory: MemoryProvider, runner: Runner
) -> None:
    reached, proceed = threading.Semaphore(0), threading.Event()

    def wait(_: str) -> None:
        reached.release()
        assert proceed.wait(20)

    memory.before("exec", wait)
    enqueue(running_lease, pool, 3)
    runner.notify()
    assert all(reached.acquire(timeout=20) for _ in range(2))
    assert QueuedRun.objects.filter(state="started").count() == 2
    proceed.set()
    wait_until(lambda: QueuedRun.objects.filter(state="completed").count() == 3, "all runs have ended", within=20.0)


def test_stopped_runner_finishes_its_runs_and_claims_no_others(
    running_lease: Lease, pool: Pool, memory: MemoryProvider, runner: Runner
) -> None:
    reached, proceed = threading.Event(), threading.Event()

    def wait(_: str) -> None:
        reached.set()
        assert proceed.wait(20)

    memory.before("exec", wait)
    enqueue(running_lease, pool)
    runner.notify()
    assert reached.wait(20)
    runner.stop()
    enqueue(running_lease, pool)
    runner.notify()
    proceed.set()
    runner.join()
    assert sorted(QueuedRun.objects.values_list("state", flat=True)) == ["completed", "queued"]


def test_claim_is_renewed_while_its_thread_executes_the_attempt(
    running_lease: Lease, pool: Pool, memory: MemoryProvider
) -> None:
    enqueue(running_lease, pool)
    times, pending = [timezone.now()], dict[str, Callable[[], object]]()
    runner = Runner(1, now=lambda: times[0], start_thread=pending.__setitem__)
    assert runner.run_pending() == 1
    for _ in range(4):
        times[0] += queue.RUNNER_TTL / 2
        assert runner.run_pending() == 0
    row = QueuedRun.objects.get()
    assert (row.state, row.attempt, row.runner_deadline) == ("started", 1, times[0] + queue.RUNNER_TTL)
    [execute] = pending.values()
    execute()
    assert QueuedRun.objects.get().state == "completed"


def test_attempt_whose_thread_does_not_start_is_repeated_and_takes_no_place(running_lease: Lease, pool: Pool) -> None:
    enqueue(running_lease, pool)
    times, refusals = [timezone.now()], iter([RuntimeError("can't start new thread")])

    def start(name: str, act: Callable[[], object]) -> None:
        for refusal in refusals:
            raise refusal
        act()

    runner = Runner(1, now=lambda: times[0], start_thread=start)
    with pytest.raises(RuntimeError):
        runner.run_pending()
    assert QueuedRun.objects.get().state == "started"
    for _ in range(3):
        times[0] += queue.RUNNER_TTL
        runner.run_pending()
    assert (QueuedRun.objects.get().state, QueuedRun.objects.get().attempt) == ("completed", 2)


def test_process_without_threads_executes_nothing(running_lease: Lease, pool: Pool) -> None:
    assert settings.RUNNER_THREADS > 0
    enqueue(running_lease, pool)
    idle = Runner(0)
    idle.notify()
    idle.stop()
    idle.join()
    assert QueuedRun.objects.get().state == "queued"

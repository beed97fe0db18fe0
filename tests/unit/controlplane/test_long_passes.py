"""Passes of a sweep that outlast their task of the queue."""

from datetime import timedelta
from multiprocessing import Value
from queue import SimpleQueue
from threading import Event, Lock, Thread, current_thread, get_ident
from types import SimpleNamespace
from typing import Any

import pytest
from django_q.worker import worker

from controlplane import schedules
from sandboxes import claims, queue_threads
from sandboxes.db import tracing
from sandboxes.models import Sweep
from sandboxes.providers.memory import MemoryProvider
from sandboxes.queue_threads import HANG_TIMEOUT, MAX_THREADS_PER_NAME, StillRunning, WorkThreads
from sandboxes.sweep_log import SweepResult
from tests.support.waiting import wait_until

QUEUE_TIMEOUT_SECONDS = 1


@pytest.mark.parametrize("wait", [None, timedelta(0)], ids=["of all tasks", "of this sweep"])
@pytest.mark.django_db(transaction=True)
def test_a_pass_that_outlasts_the_timeout_of_the_queue_is_completed(
    wait: timedelta | None, monkeypatch: pytest.MonkeyPatch, memory: MemoryProvider
) -> None:
    tasks: SimpleQueue[Any] = SimpleQueue()
    results: SimpleQueue[dict[str, Any]] = SimpleQueue()
    released = Event()

    def store(*, now: object) -> SweepResult:
        released.wait(30)
        return SweepResult({"stored": 1})

    monkeypatch.setitem(schedules.SCHEDULE, "persist", schedules.ScheduledSweep(1, "test", store, wait))
    monkeypatch.setattr(queue_threads, "is_worker_thread", lambda: True)
    threads = WorkThreads(wait=timedelta(0) if wait is None else timedelta(seconds=30))
    monkeypatch.setattr(queue_threads, "THREADS", threads)
    tasks.put({"id": "1", "name": "one", "func": "controlplane.schedules.run", "args": ("persist",), "kwargs": {}})
    tasks.put("STOP")
    worker(tasks, results, Value("f", -1), timeout=QUEUE_TIMEOUT_SECONDS)  # type: ignore[arg-type]  # only get and put are used
    result = results.get(timeout=30)
    assert (result["success"], result["result"]) == (True, "still running in the background")
    released.set()
    ended = Sweep.objects.filter(name="persist", succeeded_at__isnull=False)
    wait_until(lambda: [*ended.values_list("counts", flat=True)] == [{"stored": 1}], "the pass has ended")
    threads.close_idle()


@pytest.mark.django_db(transaction=True)
def test_passes_one_after_the_other_share_a_thread_and_no_context() -> None:
    threads, used = WorkThreads(wait=timedelta(seconds=30)), []

    def work() -> None:
        Sweep.objects.count()
        used.append(get_ident())
        assert tracing.caller_trace.get() == ""
        tracing.caller_trace.set("of this pass")

    for _ in range(2):
        threads.run("idle", work)
    threads.close_idle()
    assert len(used) == 2
    assert len({*used}) == 1


def test_the_process_ends_once_all_threads_of_a_name_hang_and_not_while_one_makes_progress() -> None:
    now, released, ended = SimpleNamespace(seconds=0.0), Event(), []
    threads = WorkThreads(wait=timedelta(0), clock=lambda: now.seconds)
    threads.end_process = lambda: ended.append(now.seconds)  # type: ignore[method-assign]
    progress = SimpleQueue[None]()

    def work() -> None:
        claims.note_progress()
        progress.put(None)
        released.wait(30)

    for _ in range(MAX_THREADS_PER_NAME):
        with pytest.raises(StillRunning):
            threads.run("idle", work)
        progress.get(timeout=30)
    for seconds in (0.0, HANG_TIMEOUT.total_seconds() + 1):
        assert not ended
        now.seconds = seconds
        with pytest.raises(StillRunning, match="earlier passes that still run: 4"):
            threads.run("idle", work)
    assert ended == [now.seconds]
    assert progress.empty()
    released.set()


@pytest.mark.django_db(transaction=True)
def test_a_hung_pass_of_the_installation_ends_the_process(monkeypatch: pytest.MonkeyPatch, memory: MemoryProvider) -> None:
    now, released, ended = SimpleNamespace(seconds=0.0), Event(), []
    threads = WorkThreads(wait=timedelta(0), clock=lambda: now.seconds)
    threads.end_process = lambda: ended.append(now.seconds)  # type: ignore[method-assign]

    def hang(*, now: object) -> SweepResult:
        released.wait(30)
        return SweepResult()

    monkeypatch.setitem(schedules.SCHEDULE, "meter", schedules.ScheduledSweep(1, "test", hang))
    monkeypatch.setattr(queue_threads, "is_worker_thread", lambda: True)
    monkeypatch.setattr(queue_threads, "THREADS", threads)
    assert schedules.run("meter") == "still running in the background"
    for seconds in (60.0, HANG_TIMEOUT.total_seconds(), HANG_TIMEOUT.total_seconds() + 60.0):
        assert not ended
        now.seconds = seconds
        assert schedules.run("meter") == "earlier passes that still run: 1"
    assert ended == [now.seconds]
    released.set()
    wait_until(lambda: all(thread.ended.is_set() for thread in threads._threads), "the pass has ended")
    threads.close_idle()


def test_simultaneous_tasks_start_no_more_threads_of_a_name_than_the_limit() -> None:
    """The clock is read between the count of the threads and the start of another one: there the second task arrives."""
    released, arrived, answers, arrivals = Event(), Event(), list[str](), list[Thread]()

    class ObservedLock:
        lock = Lock()

        def __enter__(self) -> None:
            if current_thread() is second:
                arrived.set()
            self.lock.acquire()

        def __exit__(self, *error: object) -> None:
            self.lock.release()

    def run() -> None:
        with pytest.raises(StillRunning) as raised:
            threads.run("idle", lambda: released.wait(30))
        answers.append(str(raised.value))

    def read_clock() -> float:
        if current_thread() is second:
            arrived.set()
        elif len(answers) == MAX_THREADS_PER_NAME - 1 and not arrivals:
            arrivals.append(second)
            second.start()
            assert arrived.wait(30)
        return 0.0

    second = Thread(target=run)
    threads = WorkThreads(wait=timedelta(0), clock=read_clock)
    threads._lock = ObservedLock()  # type: ignore[assignment]
    for _ in range(MAX_THREADS_PER_NAME):
        run()
    second.join(30)
    released.set()
    started = "still running in the background"
    assert sorted(answers) == ["earlier passes that still run: 4", *[started] * MAX_THREADS_PER_NAME]

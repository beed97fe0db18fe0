"""Threads of the queue worker, with real tasks of django-q2 in the database."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest
from django.db import connections
from django_q.models import Failure, OrmQ, Success
from django_q.tasks import async_task

from controlplane.worker import cluster
from controlplane.worker.cluster import Cluster
from sandboxes import long_calls, queue_threads
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)
QUEUE = "host-test"
BEGUN: SimpleQueue[str] = SimpleQueue()
RELEASED = threading.Event()


def work(name: str) -> str:
    BEGUN.put(name)
    assert RELEASED.wait(30)
    with long_calls.LONG_CALLS.admit():
        return f"{name} in a worker: {queue_threads.is_worker_thread()}"


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cluster.Conf, "POLL", 0.01)
    monkeypatch.setattr(cluster.Conf, "CLUSTER_NAME", QUEUE)
    monkeypatch.setattr(cluster, "GUARD_INTERVAL_SECONDS", 0.01)
    RELEASED.clear()
    yield
    RELEASED.set()


@contextmanager
def running(queue: Cluster) -> Iterator[Cluster]:
    def run() -> None:
        try:
            queue.run()
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield queue
    finally:
        queue.stop()
        RELEASED.set()
        thread.join(30)
        assert not thread.is_alive()


def enqueue(name: str) -> None:
    async_task(f"{__name__}.work", name, cluster=QUEUE)


def test_stopping_finishes_and_records_the_task_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of a web server in the same process, used up, does not apply to the task."""
    limit = long_calls.LongCallLimit()
    limit.set_maximum(1)
    monkeypatch.setattr(long_calls, "LONG_CALLS", limit)
    with limit.admit(), running(Cluster(QUEUE)) as queue:
        enqueue("one")
        assert BEGUN.get(timeout=30) == "one"
        queue.stop()
        RELEASED.set()
    assert [task.result for task in Success.objects.all()] == ["one in a worker: True"]
    assert not OrmQ.objects.exists()
    assert not any(thread.name.startswith("queue-") for thread in threading.enumerate())


def test_a_thread_that_dies_is_replaced_and_its_task_delivered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Died(BaseException):
        """Ends the thread: django-q2 catches exceptions only."""

    def die(name: str) -> str:
        BEGUN.put(name)
        raise Died if OrmQ.objects.update(lock=cluster.timezone.now()) and BEGUN.qsize() == 1 else ValueError

    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    monkeypatch.setitem(globals(), "work", die)
    with running(Cluster(QUEUE)):
        enqueue("one")
        wait_until(lambda: BEGUN.qsize() >= 2 and Failure.objects.exists(), "the task is executed by the next thread")
    while not BEGUN.empty():
        BEGUN.get()


def test_a_task_beyond_its_timeout_is_recorded_as_failed_and_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    queue = Cluster(QUEUE)

    def end_process() -> None:
        ended.set()
        queue.workers[0].timer.value = cluster.IDLE
        queue.stop()

    monkeypatch.setattr(queue, "end_process", end_process)
    monkeypatch.setattr(cluster, "SAVE_TIMEOUT_SECONDS", 30.0)
    with running(queue):
        enqueue("one")
        assert BEGUN.get(timeout=30) == "one"
        moved: Any = queue.workers[0].timer
        monkeypatch.setattr(moved, "_clock", lambda: moved._set_at + moved.value + 1)
        assert ended.wait(30)
        failure = Failure.objects.get()
        assert (failure.result, OrmQ.objects.count()) == ("The task exceeded its timeout.", 0)

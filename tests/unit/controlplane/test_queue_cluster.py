"""Threads of the queue worker, with real tasks of django-q2 in the database."""

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import django_q.tasks
import pytest
from django.db import OperationalError, connections
from django.utils import timezone
from django_q.brokers import get_broker
from django_q.models import Failure, OrmQ, Schedule, Success
from django_q.signing import SignedPackage
from django_q.tasks import async_task

from controlplane import schedules, stages
from controlplane.stages import HeartbeatCheck
from controlplane.supervisor import Child
from controlplane.worker import cluster, heartbeat
from controlplane.worker.cluster import Cluster
from controlplane.worker.heartbeat import HeartbeatFile, get_path
from leases import tasks
from sandboxes import long_calls, queue_threads
from sandboxes.db import database_time
from sandboxes.hosts import registry
from sandboxes.models import Sweep
from sandboxes.sweep_log import SweepResult
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
    monkeypatch.setattr(cluster, "CHECK_INTERVAL_SECONDS", 0.01)
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
    async_task(f"{__name__}.work", name, cluster=QUEUE, save=True)


def test_builds_and_forges_that_never_answer_keep_no_sweep_and_no_heartbeat(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: Any
) -> None:
    """More of them than a worker has threads, in front of the sweeps."""
    settings.STATE_DIR, builds = tmp_path, queue_threads.MAX_THREADS_PER_NAME + 2

    def wait(*args: object, **kwargs: object) -> SweepResult:
        BEGUN.put("waits")
        assert RELEASED.wait(30)
        return SweepResult()

    monkeypatch.setattr(cluster.Conf, "WORKERS", 1)
    monkeypatch.setattr(cluster.Conf, "SAVE_LIMIT", 0)
    monkeypatch.setattr(heartbeat, "UPDATE_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(tasks.builds, "build", wait)
    for name in ("pull_requests", "records"):
        monkeypatch.setitem(schedules.SCHEDULE, name, dataclasses.replace(schedules.SCHEDULE[name], sweep=wait))
    with running(Cluster(QUEUE, HeartbeatFile())):
        for _ in range(builds):
            async_task("leases.tasks.build_template", str(uuid4()), cluster=QUEUE)
        for _ in range(3):
            for name in ("pull_requests", "records", "recount"):
                async_task(schedules.SCHEDULED_FUNCTION, name, cluster=QUEUE)
            wait_until(lambda: not OrmQ.objects.exists(), "all tasks have ended")
            recounted = Sweep.objects.get(name="recount").succeeded_at
            wait_until(get_path().exists, "the heartbeat is written")
        assert BEGUN.qsize() == queue_threads.MAX_THREADS_PER_NAME + 2
        assert (
            recounted and not Sweep.objects.filter(name__in=("pull_requests", "records"), succeeded_at__isnull=False).exists()
        )
    while not BEGUN.empty():
        BEGUN.get()


def test_stopping_finishes_and_records_the_task_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of a web server in the same process, used up, does not apply to the task."""
    limit = long_calls.LongCallLimit()
    limit.set_maximum(1)
    monkeypatch.setattr(long_calls, "LONG_CALLS", limit)
    with limit.admit(), running(Cluster(QUEUE, HeartbeatFile())) as queue:
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
        raise Died if OrmQ.objects.update(lock=timezone.now()) and BEGUN.qsize() == 1 else ValueError

    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    monkeypatch.setitem(globals(), "work", die)
    with running(Cluster(QUEUE, HeartbeatFile())):
        enqueue("one")
        wait_until(lambda: BEGUN.qsize() >= 2 and Failure.objects.exists(), "the task is executed by the next thread")
    while not BEGUN.empty():
        BEGUN.get()


def test_a_task_beyond_its_timeout_is_recorded_as_failed_and_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    queue = Cluster(QUEUE, HeartbeatFile())

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


def test_the_heartbeat_file_has_the_time_of_the_last_heartbeat_task(tmp_path: Path, settings: Any) -> None:
    settings.STATE_DIR = tmp_path / "state"
    HeartbeatFile().update()
    assert not get_path().exists()  # no task was executed yet
    now = timezone.now()
    host = registry.find_worker_host(now=now)
    Sweep.objects.create(name=schedules.HEARTBEAT, host=host, succeeded_at=now - timedelta(minutes=5))
    HeartbeatFile().update()
    child = Child("queue", work=print, started_at=time.monotonic() - 3600)
    assert HeartbeatCheck(str(get_path()), 310)(child) == ""
    assert HeartbeatCheck(str(get_path()), 299)(child) == "no heartbeat for 299 s"


@pytest.mark.parametrize("ahead", [timedelta(hours=1), timedelta(days=1)])
def test_a_heartbeat_of_a_clock_that_was_ahead_gets_old(
    tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch, ahead: timedelta
) -> None:
    settings.STATE_DIR, elapsed = tmp_path, [0.0]
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: 1e6 + elapsed[0]))
    monkeypatch.setattr(stages, "time", SimpleNamespace(monotonic=lambda: 1e6 + elapsed[0]))
    now = timezone.now()
    row = Sweep.objects.create(name=schedules.HEARTBEAT, host=registry.find_worker_host(now=now), succeeded_at=now + ahead)
    file, check = HeartbeatFile(), HeartbeatCheck(str(get_path()), 180)
    child: Any = SimpleNamespace(age=3600)
    for elapsed[0], is_alive in ((0.0, True), (170.0, True), (190.0, False)):
        file.update()
        assert (check(child) == "") is is_alive
    Sweep.objects.filter(pk=row.pk).update(succeeded_at=now)  # the first pass after the correction, with an earlier time
    elapsed[0] += 60
    file.update()
    assert check(child) == ""


@pytest.mark.parametrize("content", ["", "x", "nan", "1e9"])
def test_a_heartbeat_file_without_a_time_of_this_boot_is_no_heartbeat(tmp_path: Path, content: str) -> None:
    (tmp_path / "file").write_text(content)
    child: Any = SimpleNamespace(age=3600)
    assert HeartbeatCheck(str(tmp_path / "file"), 180)(child) == "no heartbeat for 180 s"


def test_sweeps_and_tasks_of_a_clock_that_was_ahead_are_due_at_once() -> None:
    now = timezone.now()
    for queue, name, wait in (
        (QUEUE, "idle", timedelta(hours=1)),
        (QUEUE, "reconcile", timedelta(minutes=5)),  # as scheduled
        ("host-other", "idle", timedelta(hours=1)),  # by the clock of another host
    ):
        Schedule.objects.create(**schedules._build_schedule(queue, name) | {"next_run": now + wait})
    for name, wait in (("late", timedelta(days=1)), ("timely", tasks.RESUME_INTERVAL)):
        django_q.tasks.schedule(tasks.RESUME_FUNCTION, name=name, cluster=QUEUE, next_run=now + wait)
    for wait in (timedelta(seconds=600), timedelta(hours=1)):  # fetched by a worker now, and when the clock was ahead
        enqueue("one")
        OrmQ.objects.filter(pk=OrmQ.objects.latest("pk").pk).update(lock=now + wait)
    assert schedules.forget_future(QUEUE, now=now) == 3
    waits = {(row.cluster, row.name): row.next_run - now for row in Schedule.objects.all()}
    assert waits == {
        (QUEUE, "idle"): timedelta(0), (QUEUE, "reconcile"): timedelta(minutes=5), ("host-other", "idle"): timedelta(hours=1),
        (QUEUE, "late"): timedelta(0), (QUEUE, "timely"): tasks.RESUME_INTERVAL,
    }  # fmt: skip
    assert sorted(row.lock - now for row in OrmQ.objects.all()) == [timedelta(0), timedelta(seconds=600)]
    assert schedules.forget_future(QUEUE, now=now) == 0


class VirtualClocks:
    """The clocks of the database and of this host. That of the host is ahead by `shift`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time, self.shift = datetime(2026, 3, 4, tzinfo=UTC), timedelta(0)
        monkeypatch.setattr(timezone, "now", lambda: self.time + self.shift)
        monkeypatch.setattr(database_time, "meter", self)

    def update(self) -> None:
        """Measure nothing."""

    def now(self) -> datetime:
        return self.time


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> VirtualClocks:
    return VirtualClocks(monkeypatch)


SHIFTS = [timedelta(hours=1), timedelta(hours=-1), timedelta(days=1), timedelta(days=-1)]


@pytest.mark.parametrize("shift", SHIFTS)
def test_a_task_of_a_host_with_a_wrong_clock_is_fetched_at_once_and_only_once(clocks: VirtualClocks, shift: timedelta) -> None:
    clocks.shift = shift
    enqueue("one")
    clocks.shift, clocks.time = timedelta(0), clocks.time + timedelta(seconds=1)
    broker = get_broker(QUEUE)
    [(pk, _)] = broker.dequeue()
    clocks.shift = shift
    assert not broker.dequeue()
    assert (broker.queue_size(), broker.lock_size()) == (0, 1)
    clocks.time += timedelta(seconds=cluster.Conf.RETRY + 1)  # whose worker has died
    assert [row for row, _ in broker.dequeue()] == [pk]


def test_each_sweep_keeps_its_interval_while_the_clock_of_its_host_is_set_forward_and_back(clocks: VirtualClocks) -> None:
    queue, step = Cluster(QUEUE, HeartbeatFile()), timedelta(seconds=cluster.SCHEDULER_INTERVAL_SECONDS)
    for name in schedules.SCHEDULE:
        Schedule.objects.create(**schedules._build_schedule(QUEUE, name) | {"next_run": clocks.time})
    began: dict[str, list[datetime]] = {name: [] for name in schedules.SCHEDULE}
    shifts = [timedelta(0), *SHIFTS, *SHIFTS[::-1]]
    for number in range(timedelta(minutes=130) // step):
        clocks.time += step
        clocks.shift = shifts[number // 7 % len(shifts)]  # each for three and a half minutes
        queue._enqueue_due_sweeps()
        clocks.time += timedelta(microseconds=1)
        while fetched := queue.broker.dequeue():
            for pk, payload in fetched:
                began[SignedPackage.loads(payload)["args"][0]].append(clocks.time)
                queue.broker.acknowledge(pk)
    for name, times in began.items():
        interval = schedules.get_interval(name)
        gaps = [later - earlier for earlier, later in pairwise(times)]
        assert len(times) >= 2, name
        assert interval - step <= min(gaps) <= max(gaps) <= interval + step + timedelta(seconds=1), name


def test_the_begin_of_any_sweep_is_a_heartbeat_of_a_worker_behind_its_schedule(
    tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that hangs begins no further sweep. Other tasks do not prove that the schedule works."""
    settings.STATE_DIR = tmp_path
    now = timezone.now()
    long_ago = now - timedelta(hours=1)
    Sweep.objects.create(name=schedules.HEARTBEAT, host=registry.find_worker_host(now=now), succeeded_at=long_ago)
    monkeypatch.setattr(heartbeat, "UPDATE_INTERVAL_SECONDS", 0.0)

    def is_recent() -> bool:
        return time.monotonic() - float(get_path().read_text()) < 3000

    with running(Cluster(QUEUE, HeartbeatFile())):
        enqueue("one")
        assert BEGUN.get(timeout=30) == "one"
        wait_until(get_path().exists, "the heartbeat is written")
        assert not is_recent()
        RELEASED.set()
        async_task(schedules.SCHEDULED_FUNCTION, "recount", cluster=QUEUE)
        wait_until(is_recent, "the sweep is a heartbeat")


def test_a_sweep_that_still_waits_is_not_enqueued_again() -> None:
    now = timezone.now()
    for name in ("idle", "persist", "expire"):
        values = schedules._build_schedule(QUEUE, name) | {"next_run": now - timedelta(minutes=5)}
        Schedule.objects.create(**values)
    for queue, name in ((QUEUE, "idle"), (QUEUE, "expire"), ("host-other", "persist")):
        async_task(schedules.SCHEDULED_FUNCTION, name, cluster=queue)
    enqueue("other")
    fetched = next(row for row in OrmQ.objects.all() if row.task["args"] == ("expire",))
    OrmQ.objects.filter(pk=fetched.pk).update(lock=now + timedelta(minutes=10))  # a worker executes it
    Cluster(QUEUE, HeartbeatFile())._enqueue_due_sweeps()
    queued = [row.task["args"][0] for row in OrmQ.objects.filter(key=QUEUE)]
    assert sorted(queued) == ["expire", "expire", "idle", "other", "persist"]
    assert not Schedule.objects.filter(next_run__lte=now).exists()


def test_without_a_database_the_heartbeat_file_has_the_present_time(tmp_path: Path, settings: Any) -> None:
    settings.STATE_DIR = tmp_path
    with connections["default"].execute_wrapper(fail):
        HeartbeatFile().update()
    assert time.time() - get_path().stat().st_mtime < 60


def fail(*args: Any) -> Any:
    raise OperationalError("no connection")

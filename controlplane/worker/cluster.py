"""Queue worker in one process: django-q2's pusher, workers, monitor and scheduler as threads.

django-q2's own cluster gives each of them a process, under a sentinel process. The threads execute the same functions, so that
rows, signatures, schedules, attempts and results are those of django-q2. A thread cannot be killed: if a task exceeds its
timeout, the task is recorded as failed and the whole process ends. A supervisor starts it again.

Schedules and queue follow the clock of the database: django-q2's scheduler gets it in place of the host's."""

import itertools
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import structlog
from django.db import Error as DatabaseError
from django.db import connections
from django_q import scheduler as scheduling
from django_q.brokers import get_broker
from django_q.conf import Conf
from django_q.monitor import monitor
from django_q.pusher import pusher
from django_q.signals import pre_execute
from django_q.worker import worker

from controlplane import schedules
from controlplane.worker.heartbeat import HeartbeatFile
from sandboxes import queue_threads
from sandboxes.db import database_time

log = structlog.get_logger(__name__)
CHECK_INTERVAL_SECONDS = 0.5  # of the threads
SCHEDULER_INTERVAL_SECONDS = 30.0
SAVE_TIMEOUT_SECONDS = 10.0  # for the record of a task that exceeded its timeout
END_OF_QUEUE = "STOP"  # ends the loops of django-q2's worker and monitor
IDLE, RECYCLED = -1.0, -2.0  # values of a timer that django-q2's worker sets between tasks, and when it ends to free memory
SWEEP_NUMBERS = itertools.count(1)  # of the sweeps that this process begins


class DatabaseClock:
    """The database's clock in place of `django.utils.timezone` in django-q2's scheduler (1.11)."""

    now = staticmethod(database_time.now)


scheduling.timezone, scheduling.localtime = DatabaseClock, database_time.now


class TaskTimer:
    """Time limit of a worker's task, with the interface of multiprocessing.Value that django-q2's worker expects."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.RLock()
        self._value, self._set_at = IDLE, clock()

    def get_lock(self) -> AbstractContextManager[Any]:
        return self._lock

    @property
    def value(self) -> float:
        return self._value

    @value.setter
    def value(self, value: float) -> None:
        self._value, self._set_at = value, self._clock()

    def has_expired(self) -> bool:
        return self._value > 0 and self._clock() - self._set_at > self._value


class QueueThread(threading.Thread):
    """Thread of one part of the cluster. Closes its database connections when the part ends."""

    def __init__(self, target: Callable[..., Any], *args: Any) -> None:
        super().__init__(name=f"queue-{target.__name__}", daemon=True)
        self._work = target, args

    def run(self) -> None:
        target, args = self._work
        try:
            target(*args)
        finally:
            connections.close_all()


class WorkerThread(QueueThread):
    """Thread that executes tasks. `task` is the task that was begun last, `sweep_number` the number of the last sweep."""

    def __init__(self, task_queue: "queue.Queue[Any]", result_queue: "queue.Queue[Any]", timeout: int) -> None:
        self.timer = TaskTimer()
        self.task: dict[str, Any] | None = None
        self.sweep_number = 0
        super().__init__(worker, task_queue, result_queue, self.timer, timeout)

    def run(self) -> None:
        queue_threads.mark_worker_thread()
        super().run()


def remember_task(sender: Any, func: Any, task: dict[str, Any], **kwargs: Any) -> None:
    """Store the task that begins in its worker thread. Receiver of pre_execute, which django-q2 sends in that thread."""
    thread = threading.current_thread()
    if isinstance(thread, WorkerThread):
        thread.task = task
        if task["func"] == schedules.SCHEDULED_FUNCTION:
            thread.sweep_number = next(SWEEP_NUMBERS)


class Cluster:
    """The threads of one queue. `run` returns after `stop`, or if the process exceeds its memory limit."""

    def __init__(self, queue_name: str, heartbeat: HeartbeatFile) -> None:
        self.heartbeat = heartbeat
        Conf.CLUSTER_NAME = queue_name  # django-q2 has set the name at its import, from an environment variable
        self.broker = get_broker(queue_name)
        self.task_queue: queue.Queue[Any] = queue.Queue(Conf.QUEUE_LIMIT)
        self.result_queue: queue.Queue[Any] = queue.Queue()
        self._stopping, self._pusher_stop = threading.Event(), threading.Event()
        self.workers: list[WorkerThread] = []
        self.pusher = QueueThread(pusher, self.task_queue, self._pusher_stop, self.broker)
        self.monitor = QueueThread(monitor, self.result_queue, self.broker)
        pre_execute.connect(remember_task, dispatch_uid="leasehold.remember_task")

    def install_signal_handlers(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: self.stop())

    def stop(self) -> None:
        """Make `run` return after the tasks that were fetched are finished."""
        self._stopping.set()

    def run(self) -> None:
        """Run all threads until `stop`."""
        for _ in range(Conf.WORKERS):
            self._start_worker()
        self.monitor.start()
        self.pusher.start()
        next_schedule_at, sweeps_begun = time.monotonic() + SCHEDULER_INTERVAL_SECONDS, 0
        while not self._stopping.wait(CHECK_INTERVAL_SECONDS):
            self._check_threads()
            sweeps_begun = max(sweeps_begun, *(each.sweep_number for each in self.workers))
            self.heartbeat.update(sweeps_begun)
            if time.monotonic() >= next_schedule_at:
                next_schedule_at = time.monotonic() + SCHEDULER_INTERVAL_SECONDS
                self._enqueue_due_sweeps()
        self._finish()

    def _enqueue_due_sweeps(self) -> None:
        try:
            now = database_time.now()
            forgotten = schedules.forget_future(self.broker.list_key, now=now)
            postponed = schedules.postpone_queued_sweeps(self.broker.list_key, now=now)
        except DatabaseError as error:  # django-q2's scheduler logs its errors likewise, and is called again
            log.error("due sweeps not enqueued", error=str(error))
            connections.close_all()
            return
        if forgotten:
            log.warning("clock was ahead, schedule corrected", rows=forgotten)
        if postponed:
            log.warning("queue behind its schedule", postponed=postponed)
        scheduling.scheduler(broker=self.broker)

    def _start_worker(self) -> None:
        thread = WorkerThread(self.task_queue, self.result_queue, Conf.TIMEOUT)
        self.workers.append(thread)
        thread.start()

    def _check_threads(self) -> None:
        """Replace dead threads. End the process if a task exceeds its timeout, and stop if a worker ended to free memory."""
        for thread in list(self.workers):
            if thread.timer.has_expired():
                self._fail_task_and_end_process(thread)
            elif not thread.is_alive() and thread.timer.value == RECYCLED:
                log.warning("queue worker exceeded its memory limit, ending the process")
                self.stop()
            elif not thread.is_alive():
                log.critical("queue thread died, replacing it", thread=thread.name)
                self.workers.remove(thread)
                self._start_worker()
        if not self.monitor.is_alive():
            self.monitor = self._restart(self.monitor, monitor, self.result_queue, self.broker)
        if not self.pusher.is_alive():
            self.pusher = self._restart(self.pusher, pusher, self.task_queue, self._pusher_stop, self.broker)

    def _restart(self, dead: QueueThread, target: Callable[..., Any], *args: Any) -> QueueThread:
        log.critical("queue thread died, replacing it", thread=dead.name)
        thread = QueueThread(target, *args)
        thread.start()
        return thread

    def _fail_task_and_end_process(self, thread: WorkerThread) -> None:
        """Record the task of a worker as failed, and end the process."""
        task = dict(thread.task or {})
        log.critical("task exceeded its timeout, ending the process", task=task.get("func"), group=task.get("group"))
        if task:
            task |= {"result": "The task exceeded its timeout.", "success": False, "stopped": database_time.now()}
            self.result_queue.put(task)
        self.result_queue.put(END_OF_QUEUE)
        self.monitor.join(SAVE_TIMEOUT_SECONDS)
        self.end_process()

    def end_process(self) -> None:
        os._exit(1)

    def _finish(self) -> None:
        """Stop the threads in the order in which tasks pass through them: pusher, workers, monitor."""
        self._pusher_stop.set()
        self.pusher.join()
        for _ in self.workers:
            self.task_queue.put(END_OF_QUEUE)
        for thread in self.workers:
            thread.join()
        self.result_queue.put(END_OF_QUEUE)
        self.monitor.join()
        queue_threads.THREADS.close_idle()

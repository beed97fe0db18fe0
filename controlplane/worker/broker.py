"""Broker of the task queues. Its times are those of the database's clock, which all hosts share.

django-q2's broker uses the clock of the host: a task that a host whose clock is ahead queues for another one would wait there
until the difference has passed, and a worker whose clock is set forward would fetch a task that it executes already."""

from datetime import timedelta
from time import sleep

from django_q.brokers.orm import ORM
from django_q.conf import Conf

from sandboxes.db import database_time
from sandboxes.deferred_writes import end_if_unanswered


class DatabaseTimeBroker(ORM):
    """django-q2's broker of rows. `lock` is the time from which on a worker may fetch the task."""

    def enqueue(self, task: str) -> int:
        row = self.get_connection().create(key=self.list_key or Conf.CLUSTER_NAME, payload=task, lock=database_time.now())
        return int(row.pk)

    def dequeue(self) -> list[tuple[int, str]]:
        """Fetch due tasks, and lock them for the retry time. Without one, wait for the polling interval."""
        now, tried, fetched = database_time.now(), list[int](), list[tuple[int, str]]()
        until = now + timedelta(seconds=Conf.RETRY)

        def unlock() -> None:
            """Unlock the tasks of this call, which raises an error and returns none of them."""
            self.get_connection().filter(pk__in=tried, lock=until).update(lock=now)

        with end_if_unanswered(unlock, f"tasks of {self.list_key}"):
            due = self.get_connection().filter(key=self.list_key, lock__lt=now)
            for row in due.order_by("pk")[: Conf.BULK]:
                tried.append(row.pk)
                unlocked = self.get_connection().filter(pk=row.pk, lock=row.lock)
                if unlocked.update(lock=until):  # not fetched by another worker meanwhile
                    fetched.append((row.pk, row.payload))
        if not fetched:
            sleep(Conf.POLL)
        return fetched

    def queue_size(self) -> int:
        return int(self.get_connection().filter(key=self.list_key, lock__lte=database_time.now()).count())

    def lock_size(self) -> int:
        return int(self.get_connection().filter(key=self.list_key, lock__gt=database_time.now()).count())

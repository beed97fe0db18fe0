"""Heartbeat file of the queue worker. `manage.py up` checks it to detect a hung worker, without a database connection.

The file has a monotonic time, which all processes of a machine share: a clock that is set changes the age of no heartbeat."""

import os
import time
from datetime import datetime
from pathlib import Path

import structlog
from django.conf import settings
from django.db import Error as DatabaseError
from django.db import connections

from controlplane import schedules
from sandboxes.db import database_time
from sandboxes.hosts import registry
from sandboxes.models import Sweep

log = structlog.get_logger(__name__)
FIRST_INTERVAL_SECONDS, UPDATE_INTERVAL_SECONDS = 2.0, 10.0  # until the first heartbeat, and then, of one each minute


def get_path() -> Path:
    return Path(settings.STATE_DIR) / "queue-heartbeat"


class HeartbeatFile:
    """File with the monotonic time at which this worker last saw progress.

    Progress is a sweep that this worker begins, or a `heartbeat` sweep that a worker of this host executed. A worker that is
    behind its schedule executes `heartbeat` late, and must not be restarted for that: a restart takes more of the processor."""

    def __init__(self) -> None:
        self._path, self._next_update_at = get_path(), 0.0
        self._seen: tuple[datetime | None, int] = (None, 0)

    def update(self, sweeps_begun: int = 0) -> None:
        """Write the present time if there was progress since the last call. `sweeps_begun` counts this worker's sweeps.

        The first heartbeat that is found may be one of an earlier worker: its age counts. While the database does not respond,
        write the present time, too: a restart of the worker would not help."""
        if time.monotonic() < self._next_update_at:
            return
        self._next_update_at = time.monotonic() + FIRST_INTERVAL_SECONDS
        try:
            own = Sweep.objects.filter(name=schedules.HEARTBEAT, host=registry.find_worker_host(now=database_time.now()))
            executed_at = own.values_list("succeeded_at", flat=True).first()
        except DatabaseError:
            connections.close_all()
            self._write(time.monotonic())
            return
        seen, self._seen = self._seen, (executed_at, sweeps_begun)
        if executed_at or sweeps_begun:
            self._next_update_at = time.monotonic() + UPDATE_INTERVAL_SECONDS
        if seen == (None, 0) and executed_at and not sweeps_begun:
            self._write(time.monotonic() - max((database_time.now() - executed_at).total_seconds(), 0.0))
        elif self._seen != seen:
            self._write(time.monotonic())

    def _write(self, seen_at: float) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(".new")
            temporary.write_text(repr(seen_at))
            os.replace(temporary, self._path)
        except OSError as error:  # under `up` the worker is then restarted as hung; a worker without `up` needs no file
            log.warning("heartbeat file not written", path=str(self._path), error=str(error))

"""Heartbeat file of the queue worker. `manage.py up` checks it to detect a hung worker, without a database connection."""

import os
import time
from datetime import datetime
from pathlib import Path

import structlog
from django.conf import settings
from django.db import Error as DatabaseError
from django.db import connections
from django.utils import timezone

from controlplane import schedules
from sandboxes.hosts import registry
from sandboxes.models import Sweep

log = structlog.get_logger(__name__)
FIRST_INTERVAL_SECONDS, UPDATE_INTERVAL_SECONDS = 2.0, 10.0  # until the first heartbeat, and then, of one each minute


def get_path() -> Path:
    return Path(settings.STATE_DIR) / "queue-heartbeat"


class HeartbeatFile:
    """File whose modification time is that of the last sweep begun by this worker.

    Without one it is the time of the last `heartbeat` sweep that a worker of this host executed. A worker that is behind its
    schedule executes `heartbeat` late, and must not be restarted for that: a restart takes more of the processor."""

    def __init__(self) -> None:
        self._path, self._next_update_at = get_path(), 0.0

    def update(self, begun_at: datetime | None = None) -> None:
        """Write the time of the last heartbeat to the file, or `begun_at`, the begin of this worker's last sweep, if later.

        While the database does not respond, write the current time: a restart of the worker would not help."""
        if time.monotonic() < self._next_update_at:
            return
        self._next_update_at = time.monotonic() + FIRST_INTERVAL_SECONDS
        now = timezone.now()
        try:
            own = Sweep.objects.filter(name=schedules.HEARTBEAT, host=registry.find_worker_host(now=now))
            executed_at = own.values_list("succeeded_at", flat=True).first()
        except DatabaseError:
            connections.close_all()
            executed_at = now
        executed_at = max((at for at in (executed_at, begun_at) if at), default=None)
        if executed_at:
            self._next_update_at = time.monotonic() + UPDATE_INTERVAL_SECONDS
            self._write(executed_at)

    def _write(self, executed_at: datetime) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
            os.utime(self._path, (executed_at.timestamp(),) * 2)
        except OSError as error:  # under `up` the worker is then restarted as hung; a worker without `up` needs no file
            log.warning("heartbeat file not written", path=str(self._path), error=str(error))

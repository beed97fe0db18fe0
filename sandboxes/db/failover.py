"""Repetition of database work while the database restarts or fails over."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import structlog
from django.db import InterfaceError, OperationalError, connection

from sandboxes.db.clock import Clock

log = structlog.get_logger(__name__)
T = TypeVar("T")
RETRY_PERIOD = timedelta(seconds=30)  # longer than the failover of a database usually takes
RETRY_SECONDS = 0.5


def retry_through_failover(act: Callable[[], T], *, clock: Clock, **context: object) -> T:
    """Call `act` until the database responds, each time on a new connection. `act` must be repeatable.

    Raise the error of the database after RETRY_PERIOD, or at once inside a transaction of the caller, which is lost.
    `context` is logged with each failure."""
    until = clock() + RETRY_PERIOD
    while True:
        try:
            return act()
        except (OperationalError, InterfaceError) as failed:
            if connection.in_atomic_block or clock() >= until:
                raise
            log.warning("database did not respond", error=str(failed), **context)
            connection.close()  # the next statement opens a new connection
            time.sleep(RETRY_SECONDS)

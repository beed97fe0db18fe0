"""Handling of lost database connections after an operation that took effect: an error would make the client repeat it.

The errors are logged, or the call is retried. Inside a transaction they are raised: the caller's transaction is lost, and a
retry cannot succeed."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import structlog
from django.db import InterfaceError, OperationalError, connection

from sandboxes.db.clock import Clock

log = structlog.get_logger(__name__)
CONNECTION_ERRORS = (OperationalError, InterfaceError)
RETRY_INTERVAL_SECONDS = 0.5
FAILOVER_PERIOD = timedelta(seconds=30)  # time limit of the retries; longer than a usual failover of a database
T = TypeVar("T")


class NoFreeConnection(OperationalError):
    """Every connection to the database is in use. Try again in a moment."""

    code = "no_database_connection"
    retry_after = 2


class RetriesExhausted(Exception):
    """The database did not respond within FAILOVER_PERIOD. `__cause__` is the last connection error."""


@contextmanager
def log_connection_errors(message: str, **context: object) -> Iterator[None]:
    """Log a connection error that the body of the `with` raises, as `message`, and suppress the error."""
    try:
        yield
    except CONNECTION_ERRORS as failed:
        _log_or_raise(failed, message, context)


def retry_connection_errors(record: Callable[[], T], message: str, *, clock: Clock, **context: object) -> T:
    """Call `record` until it raises no connection error, and return its result. Errors are logged as `message`.

    `record` must be idempotent: a call that was committed before its answer was lost is repeated. Raises RetriesExhausted after
    FAILOVER_PERIOD."""
    until = clock() + FAILOVER_PERIOD
    while True:
        try:
            return record()
        except CONNECTION_ERRORS as failed:
            _log_or_raise(failed, message, context)
            if clock() >= until:
                raise RetriesExhausted from failed
            connection.close()  # the next statement opens a new connection
            time.sleep(RETRY_INTERVAL_SECONDS)


def _log_or_raise(failed: Exception, message: str, context: dict[str, object]) -> None:
    if connection.in_atomic_block:
        raise failed
    log.warning(message, error=str(failed), **context)

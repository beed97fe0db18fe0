"""Connection errors of the database after an operation with an effect, which must not look failed to its caller.

Inside a transaction the errors are raised: the caller's transaction is lost, and a retry cannot succeed."""

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
RETRY_SECONDS = 0.5
FAILOVER_PERIOD = timedelta(seconds=30)  # longer than the failover of a database usually takes
T = TypeVar("T")


class RetriesExhausted(Exception):
    """The database did not respond within FAILOVER_PERIOD. The last error is the cause."""


@contextmanager
def log_connection_errors(message: str, **context: object) -> Iterator[None]:
    """Log a connection error of the body of the `with` as `message`, instead of raising the error."""
    try:
        yield
    except CONNECTION_ERRORS as failed:
        _log_or_raise(failed, message, context)


def retry_connection_errors(record: Callable[[], T], message: str, *, clock: Clock, **context: object) -> T:
    """Call `record` and return its result. Call it again after each connection error, which is logged as `message`.

    Raises RetriesExhausted after FAILOVER_PERIOD. A call that succeeded without an answer is repeated, too."""
    until = clock() + FAILOVER_PERIOD
    while True:
        try:
            return record()
        except CONNECTION_ERRORS as failed:
            _log_or_raise(failed, message, context)
            if clock() >= until:
                raise RetriesExhausted from failed
            connection.close()  # the next statement opens a new connection
            time.sleep(RETRY_SECONDS)


def _log_or_raise(failed: Exception, message: str, context: dict[str, object]) -> None:
    if connection.in_atomic_block:
        raise failed
    log.warning(message, error=str(failed), **context)

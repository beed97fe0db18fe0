"""Writes that the database refused for longer than a request waits, repeated until the database accepts them.

They record the ends of operations that took effect. The heartbeat of this process repeats them in their order. A process that
dies loses them: sweeps then take the next step for the rows that stayed open."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from typing import NamedTuple

import structlog

from sandboxes import claims
from sandboxes.claims import Claim, Progress, hold
from sandboxes.db.clock import Clock
from sandboxes.db.connection_errors import CONNECTION_ERRORS, NoFreeConnection, RetriesExhausted, retry_connection_errors

log = structlog.get_logger(__name__)


class DeferredWrite(NamedTuple):
    record: Callable[[], object]
    message: str  # of the log, such as "run not closed"
    fields: dict[str, object]
    context: Context  # of the operation: its trace


class DeferredWrites(Progress):
    """Queue of the writes of this process. Their number is limited as the operations that may be in progress are."""

    def __init__(self) -> None:
        super().__init__()
        self._writes = deque[DeferredWrite]()

    def add(self, record: Callable[[], object], message: str, **fields: object) -> None:
        """Have the heartbeat call `record` until it raises no connection error. `record` must be idempotent.

        Another exception is logged, and ends the tries."""
        with self.lock:
            self._writes.append(DeferredWrite(record, message, fields, copy_context()))
            if len(self._writes) == 1:
                claims.HEARTBEAT.add(self)

    def flush(self) -> None:
        """Make the writes now, in their order. Raise the connection error of the first that fails; it stays the first."""
        with self.lock:
            while self._writes:
                write = self._writes[0]
                try:
                    write.context.run(write.record)
                except CONNECTION_ERRORS:
                    raise
                except Exception:
                    log.exception(write.message, **write.fields)
                self._writes.popleft()
                if not self._writes:
                    claims.HEARTBEAT.remove(self)

    def beat(self) -> None:
        try:
            self.flush()
        except CONNECTION_ERRORS as failed:
            log.warning("writes deferred", count=len(self._writes), error=str(failed))

    def __str__(self) -> str:
        return f"{len(self._writes)} deferred writes"


DEFERRED = DeferredWrites()


def record_or_defer(record: Callable[[], object], message: str, *, clock: Clock, **fields: object) -> None:
    """Call `record` with retries while the database does not respond, and leave it to the heartbeat after FAILOVER_PERIOD.

    Deferred writes are made before it: it may depend on their effect."""

    def record_in_order() -> None:
        DEFERRED.flush()
        record()

    try:
        retry_connection_errors(record_in_order, message, clock=clock, **fields)
    except RetriesExhausted:
        DEFERRED.add(record, message, **fields)


@contextmanager
def end_if_unanswered(end: Callable[[], object], claim: object) -> Iterator[None]:
    """Make a claim in the body. After a connection error of the database, call `end` as soon as the database responds.

    The claim may have been committed before its answer was lost: the worker has given up, and no sweep takes the next step
    before the deadline. `end` ends the claim of this worker alone, by the token that the worker chose before: it has no effect
    if the claim was not made. `claim` names the claim in the log."""
    try:
        yield
    except NoFreeConnection:  # nothing was sent
        raise
    except CONNECTION_ERRORS:
        DEFERRED.add(end, "claim not ended", claim=str(claim))
        raise


@contextmanager
def hold_in_flight(claim: Claim) -> Iterator[Claim]:
    """Like `claims.hold`, and like `end_on_connection_error`."""
    with end_on_connection_error(claim), hold(claim):
        yield claim


@contextmanager
def end_on_connection_error(claim: Claim) -> Iterator[Claim]:
    """End the claim after a connection error of the database in the body: now, or as soon as the database responds.

    The worker has given up then, and no sweep takes the next step before the deadline."""
    try:
        yield claim
    except CONNECTION_ERRORS:
        record_or_defer(claim.end, "claim not ended", clock=claim.clock, claim=str(claim))
        raise
    except RetriesExhausted:
        DEFERRED.add(claim.end, "claim not ended", claim=str(claim))
        raise

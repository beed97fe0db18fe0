"""Tracking of active upstream calls: settlement of their rows, and cancellation when a lease ends."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

import structlog
from django.db import Error as DatabaseError
from django.db import close_old_connections, connection

from sandboxes.background import repeat
from sandboxes.db.connection_errors import CONNECTION_ERRORS
from sandboxes.egress import authorization, settlement
from sandboxes.egress.authorization import CallerIdentity
from sandboxes.egress.estimates import TokenEstimate
from sandboxes.egress.responses import ClientDisconnected
from sandboxes.egress.settlement import CallResult
from sandboxes.egress.token_usage import TokenUsage
from sandboxes.models import LlmCall

log = structlog.get_logger(__name__)
T = TypeVar("T")
OUTCOME = LlmCall.Outcome
HOLDER_CHECK_INTERVAL_SECONDS = 1.0  # upper bound on how long a call outlives its lease
RELAY_HEARTBEAT_INTERVAL_SECONDS = 60.0
CONNECTION_CHECK_INTERVAL_SECONDS = 1.0  # a database connection is reused for this long without a check
MAX_DATABASE_THREADS = 8
# Codes of failed answers that were passed on to their end: a later disconnect of the sandbox changes nothing.
STREAM_ERROR_CODE, STREAM_INCOMPLETE_CODE, ANSWER_ERROR_CODE = "stream_error", "stream_incomplete", "answer_error"
FINAL_CODES = (STREAM_ERROR_CODE, STREAM_INCOMPLETE_CODE, ANSWER_ERROR_CODE)


class DatabaseThreads:
    """Thread pool for the database work of the event loop. Each thread has its own database connection."""

    def __init__(self) -> None:
        self._checks = threading.local()  # `at`: monotonic time of the thread's last connection check
        self._executor = ThreadPoolExecutor(MAX_DATABASE_THREADS, thread_name_prefix="egress")

    async def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call `function` in a thread. The call completes even if the awaiting task is cancelled.

        After a lost connection the function is called a second time. A row that the first call committed is not inserted
        again, because the call id is unique."""

        def run_in_thread() -> T:
            if time.monotonic() - getattr(self._checks, "at", 0.0) > CONNECTION_CHECK_INTERVAL_SECONDS:
                close_old_connections()
                self._checks.at = time.monotonic()
            before = connection.connection
            try:
                return function(*args, **kwargs)
            except CONNECTION_ERRORS:
                close_old_connections()
                # The end of a transaction whose connection was lost may have opened another connection already.
                if connection.connection is not None and before in (None, connection.connection):
                    raise  # the connection was not lost: the error has another cause
                return function(*args, **kwargs)

        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._executor, run_in_thread))

    async def close(self) -> None:
        await asyncio.to_thread(self._executor.shutdown)


@dataclass
class ActiveCall:
    """A call in flight, and the asyncio task that serves it."""

    row: LlmCall
    caller: CallerIdentity
    task: asyncio.Task[Any] | None
    has_lease_ended: bool = False

    @property
    def holding(self) -> tuple[Any, Any]:
        """Pair of sandbox and holder. The call continues only while the sandbox is held by this holder."""
        return self.caller.sandbox.pk, self.caller.holder


@dataclass
class CallTracker:
    """Calls in flight in this process, by row key."""

    now: Callable[[], datetime]
    database: DatabaseThreads
    active: dict[int, ActiveCall] = field(default_factory=dict)
    _extended_at: float = field(default_factory=time.monotonic)

    @asynccontextmanager
    async def track(self, row: LlmCall, caller: CallerIdentity) -> AsyncIterator[CallResult]:
        """Register a call for the body of the `with`, and settle its row at the end, also after an exception."""
        result, call = CallResult(OUTCOME.CUT), ActiveCall(row, caller, asyncio.current_task())
        self.active[row.pk] = call
        try:
            yield result
        except (ClientDisconnected, asyncio.CancelledError):
            if result.outcome != OUTCOME.OK and result.code not in FINAL_CODES:
                result.outcome = OUTCOME.CUT
                result.code = "lease_ended" if call.has_lease_ended else result.code or "not_read_to_its_end"
            raise
        except Exception as error:
            result.outcome, result.code = OUTCOME.FAILED, result.code or type(error).__name__[:64]
            raise
        finally:
            del self.active[row.pk]
            try:
                if not result.is_settled:
                    await self.database.run(settlement.settle_call, row, result, now=self.now())
            except DatabaseError as error:  # the row stays open until a sweep closes it after its deadline or from the logs
                log.error("end of a call not recorded", call=row.call_id, error=str(error))

    async def note_usage(self, row: LlmCall, usage: TokenUsage, request: TokenEstimate) -> None:
        """Write the usage of an open call that is known so far. An error changes only the estimate of a lost call."""
        try:
            await self.database.run(settlement.note_usage, row, usage, request)
        except DatabaseError as error:
            log.warning("usage of an open call not recorded", call=row.call_id, error=str(error))

    def cancel_all(self) -> None:
        for call in [*self.active.values()]:
            if call.task:
                call.task.cancel()

    async def watch_leases(self) -> None:
        """Check the leases of calls at intervals, until cancelled. After an error active calls continue."""
        await repeat(self._check_leases, "leases of calls not checked", seconds=HOLDER_CHECK_INTERVAL_SECONDS)

    async def _check_leases(self) -> None:
        """Cancel calls whose lease no longer holds the sandbox, and extend the deadlines of open relay connections."""
        await self._cancel_unheld()
        if time.monotonic() - self._extended_at > RELAY_HEARTBEAT_INTERVAL_SECONDS:
            self._extended_at = time.monotonic()
            relays = [pk for pk, call in self.active.items() if call.row.kind == LlmCall.Kind.RELAY]
            await self.database.run(settlement.extend_relay_deadlines, relays, now=self.now())

    async def _cancel_unheld(self) -> None:
        calls = [*self.active.values()]
        if not calls:
            return
        held = await self.database.run(authorization.filter_held, {call.holding for call in calls})
        for call in calls:
            if call.holding not in held and call.task:
                call.has_lease_ended = True
                call.task.cancel()

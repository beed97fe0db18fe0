"""Requests, retries and streams without input or output.

An operation is a generator. It yields steps (a Request, a Pause, OpenStream, ReadChunk, Emit), and receives the Response, the
chunk or, as an exception, ConnectionFailed. `transports` has one driver that performs the steps and one that awaits them:
Sandbox and AsyncSandbox share every rule of the protocol."""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, Generic, TypeVar

from .errors import (
    COMMAND_MAY_HAVE_RUN,
    ApiError,
    ConnectionFailed,
    LeaseholdError,
    OutcomeUnknown,
    UnexpectedAnswer,
    build_error,
    build_problem_error,
)
from .events import Event, EventParser

RETRIED_STATUSES = frozenset({429, 502, 503, 504})
UNSETTLED_STATUSES = frozenset({500, 502, 504})  # the request may have been executed
IN_PROGRESS = "idempotency_in_progress"
MAX_IN_PROGRESS_SECONDS = 900.0  # beyond the time limit of the command: a start, a wake, the end of an abandoned run by a sweep
# Raised by code that reads an answer which is not one of the HTTP API.
ANSWER_ERRORS = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
T = TypeVar("T")
Item = TypeVar("Item")


@dataclass(frozen=True)
class Request:
    """One HTTP request. `path` is relative to /api/v1, and quoted."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | BinaryIO = b""  # a file is read from its beginning, in each attempt
    sink: BinaryIO | None = None  # receives the body of a successful response
    seconds: float = 0.0  # time limit of the operation, in addition to that of a response
    is_repeatable: bool = True  # a second execution has no further effect


@dataclass(frozen=True)
class Response:
    """Status, headers with lower-case names, and body. The body of a successful stream is read chunk by chunk."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Pause:
    seconds: float


@dataclass(frozen=True)
class OpenStream:
    request: Request


@dataclass(frozen=True)
class ReadChunk:
    """Read the next chunk of the open stream; None at its end."""


@dataclass(frozen=True)
class Emit(Generic[Item]):
    """Hand an item of a stream to the caller."""

    item: Item


Operation = Generator[Any, Any, T]


@dataclass(frozen=True)
class RetryPolicy:
    """Bounds of retries: exponential backoff with jitter, and at least the server's Retry-After.

    An outage may last `period_seconds`. A pause that would end after it is not begun."""

    period_seconds: float = 60.0
    first_pause_seconds: float = 0.25
    max_pause_seconds: float = 8.0
    clock: Callable[[], float] = time.monotonic
    jitter: Callable[[], float] = random.random

    def compute_pause(self, failures: int) -> float:
        """Return the pause after the n-th failure in a row, from half of the exponential value to the whole."""
        seconds = min(self.first_pause_seconds * 2.0 ** min(failures - 1, 30), self.max_pause_seconds)
        return seconds * (0.5 + self.jitter() / 2)


class Attempts:
    """Attempts of one request."""

    def __init__(self, policy: RetryPolicy, request: Request) -> None:
        self.may_have_run = False
        self.run_id = ""  # once it is known
        self._policy, self._request = policy, request
        self._begun_at = policy.clock()
        self._failures, self._failing_since = 0, self._begun_at

    def note_progress(self) -> None:
        self._failures = 0

    def handle(self, failure: LeaseholdError, retry_after: float = 0.0) -> Pause:
        """Return the pause before the next attempt. Raise the failure, or OutcomeUnknown, if there is none."""
        now = self._policy.clock()
        if failure.code == IN_PROGRESS:  # the first request is being served: no outage
            self.may_have_run, self._failures = True, 0
            if now > self._begun_at + self._request.seconds + MAX_IN_PROGRESS_SECONDS:
                raise self._finish(failure)
            return Pause(max(retry_after, self._policy.compute_pause(1)))
        self._note_effect(failure)
        is_retried = failure.status in RETRIED_STATUSES and failure.problem.get("retryable") is not False
        if not (isinstance(failure, ConnectionFailed) or failure.retryable or is_retried):
            raise self._finish(failure)
        if not self._failures:
            self._failing_since = now
        self._failures += 1
        pause = max(retry_after, self._policy.compute_pause(self._failures))
        if now + pause > self._failing_since + self._policy.period_seconds:
            raise self._finish(failure)
        return Pause(pause)

    def _note_effect(self, failure: LeaseholdError) -> None:
        """Note whether the request may have had an effect. A 503 that names no run is answered before the command starts."""
        if isinstance(failure, ConnectionFailed):
            self.may_have_run |= failure.sent
        else:
            self.may_have_run |= failure.status in UNSETTLED_STATUSES or "run_id" in failure.problem

    def _finish(self, failure: LeaseholdError) -> LeaseholdError:
        """Return the final error: OutcomeUnknown if a command may have been executed."""
        is_settled = isinstance(failure, ApiError) and failure.status not in RETRIED_STATUSES | {409, 500}
        if self._request.is_repeatable or not self.may_have_run or is_settled or isinstance(failure, OutcomeUnknown):
            return failure
        problem = ({"run_id": self.run_id} if self.run_id else {}) | failure.problem
        unknown = OutcomeUnknown(f"{failure.detail} {COMMAND_MAY_HAVE_RUN}", status=failure.status, problem=problem)
        unknown.__cause__ = failure
        return unknown


def build_answer_error(error: Exception, request: Request) -> LeaseholdError:
    """Return the error of an answer that cannot be read: OutcomeUnknown if the request may have executed a command."""
    detail = f"The answer to {request.method} {request.path} cannot be read: {type(error).__name__}."
    if request.is_repeatable:
        return UnexpectedAnswer(detail)
    return OutcomeUnknown(f"{detail} {COMMAND_MAY_HAVE_RUN}")


def build_post(path: str, body: Mapping[str, Any] | None = None, **options: Any) -> Request:
    """Return a POST with an Idempotency-Key, which stays the same in all attempts."""
    headers = {"Idempotency-Key": uuid.uuid4().hex, "Content-Type": "application/json"}
    return Request("POST", path, headers=headers, body=json.dumps(body or {}).encode(), **options)


def send(request: Request, policy: RetryPolicy, *, accept_missing: bool = False) -> Operation[Response]:
    """Send a request until it is answered. Return the successful response, else raise.

    `accept_missing`: a 404 after an attempt that may have succeeded is a success, as of a deletion."""
    attempts = Attempts(policy, request)
    while True:
        try:
            response: Response = yield request
        except ConnectionFailed as failure:
            yield attempts.handle(failure)
            continue
        if response.is_success or (accept_missing and attempts.may_have_run and response.status == 404):
            return response
        yield attempts.handle(build_error(response.status, response.body), parse_retry_after(response))


def follow(
    request: Request,
    policy: RetryPolicy,
    find_path: Callable[[str], str],
    *,
    end: str,
    convert: Callable[[Event], Iterable[object]],
) -> Operation[dict[str, Any]]:
    """Read a stream of events, and emit the items that `convert` makes of each. Return the data of the event `end`.

    Raises the error of an event `error`. An interrupted stream is continued after its last event. `find_path` returns the path
    of the stream of a run; before the run is known, the first request is repeated under its Idempotency-Key."""
    attempts, last_id = Attempts(policy, request), ""
    while True:
        try:
            response: Response = yield OpenStream(request)
            if not response.is_success:
                yield attempts.handle(build_error(response.status, response.body), parse_retry_after(response))
                continue
            parser = EventParser()
            while (chunk := (yield ReadChunk())) is not None:
                for event in parser.feed(chunk):
                    attempts.note_progress()
                    last_id = event.id
                    if event.name == end:
                        return event.data
                    if event.name == "error":
                        raise build_problem_error(event.data)
                    if event.name == "start":
                        request = Request(
                            "GET", find_path(event.data["run_id"]), query=request.query, seconds=request.seconds,
                            is_repeatable=request.is_repeatable,
                        )  # fmt: skip
                        attempts.may_have_run, attempts.run_id = True, event.data["run_id"]
                    for item in convert(event):
                        yield Emit(item)
            raise ConnectionFailed("The stream was interrupted.", sent=True)
        except ConnectionFailed as failure:
            yield attempts.handle(failure)
        if last_id:
            request = replace(request, headers={"Last-Event-ID": last_id})


def parse_retry_after(response: Response) -> float:
    """Return the seconds of Retry-After, 0 without it. A date, which the server does not send, is ignored."""
    text = response.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() else 0.0

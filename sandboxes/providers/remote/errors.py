"""Translation of the error answers of vendors' APIs.

The sender of an answer is known by its form alone: a proxy, a load balancer without a route, a login page or an ended version
of the API answers in place of the vendor, with any status. An answer is therefore the vendor's only if it is a document of the
vendor's form; any other answer is Unavailable."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn

from sandboxes.providers.errors import FailureCause, NoCapacity, Rejected, Unavailable
from sandboxes.redaction.texts import quote_answer

MAX_RETRY_AFTER_SECONDS = 3600
QUOTA_PATTERN = re.compile(
    r"(?i)\bquota\b|\blimits? (?:was |were |is |are |has been )?(?:exceeded|reached)|\bexceed\w* .*\blimit"
)
RATE_PATTERN = re.compile(r"(?i)\brate\b|\brequests?\b|throttl")


class Conflict(Unavailable):
    """The name is taken, or the sandbox is in a state that does not permit the operation (HTTP 409)."""

    code = "provider_conflict"


class NotFound(Unavailable):
    """The vendor's own document says that the object does not exist. One such answer is no proof: see absence.py."""

    code = "provider_not_found"


def read_message_field(document: Mapping[str, Any]) -> str | None:
    """Return the text in the field `message` of an error document."""
    message = document.get("message")
    return message if isinstance(message, str) else None


@dataclass(frozen=True)
class ErrorForm:
    """Form of the error documents of one vendor.

    `read_message` returns the message of a JSON object, or None if the object is not of the vendor's form. `absence` matches
    the messages of a 404 by which the vendor says that an object does not exist, and not those about an unknown route."""

    absence: re.Pattern[str]
    read_message: Callable[[Mapping[str, Any]], str | None] = read_message_field

    def read(self, body: str | bytes) -> str | None:
        """Return the message of an answer. None: not a document of the vendor."""
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            return None
        return self.read_message(document) if isinstance(document, dict) else None


def raise_for_answer(
    form: ErrorForm, subject: str, status: int, body: str | bytes, headers: Mapping[str, str] | None = None
) -> NoReturn:
    """Raise the error of an answer to a call about `subject` that is no success."""
    error = _build_error(form, subject, status, body)
    if isinstance(error, Unavailable):
        error.retry_after = read_retry_after((headers or {}).get("Retry-After", ""))
    raise error


def _build_error(form: ErrorForm, subject: str, status: int, body: str | bytes) -> Unavailable | Rejected:
    message = form.read(body)
    shown = body.decode(errors="replace") if isinstance(body, bytes) else body
    text = f"{subject}: the vendor answered {status}: {quote_answer(shown if message is None else message)}"
    if message is not None and status in (400, 402, 403, 429) and states_quota(message):
        return NoCapacity(text, cause=FailureCause.NO_CAPACITY)
    if status == 429:
        return Unavailable(text, cause=FailureCause.RATE_LIMITED)
    if status == 401:
        return Unavailable(text, cause=FailureCause.CREDENTIALS_REFUSED)
    if message is None:
        text = f"{subject}: status {status}, and no document of the vendor's API: {quote_answer(shown)}"
        return Unavailable(text, cause=FailureCause.ENGINE_ERROR)
    if status == 404 and form.absence.search(message):
        return NotFound(text, cause=FailureCause.ENGINE_ERROR)
    if status == 409:
        return Conflict(text)
    if status == 403:
        return Unavailable(text, cause=FailureCause.CREDENTIALS_REFUSED)
    if status in (404, 408, 410) or not 400 <= status < 500:
        return Unavailable(text, cause=FailureCause.ENGINE_ERROR)
    return Rejected(text)


def states_quota(message: str) -> bool:
    """Return whether a message refuses a sandbox for the account's limits, and not a request for its rate."""
    return bool(QUOTA_PATTERN.search(message)) and not RATE_PATTERN.search(message)


def read_retry_after(value: str, *, now: datetime | None = None) -> int | None:
    """Return the seconds of a Retry-After header, which is a number or a date, bounded by MAX_RETRY_AFTER_SECONDS."""
    if value.isascii() and value.isdigit():
        seconds = int(value[:9])
    else:
        try:
            date = parsedate_to_datetime(value)
        except ValueError:
            return None
        seconds = int((date - (now or datetime.now(UTC))).total_seconds()) if date.tzinfo else 0  # noqa: TID251 - limited
    return min(max(seconds, 1), MAX_RETRY_AFTER_SECONDS)


def raise_for_transport(subject: str, error: Exception, *, is_timeout: bool = False) -> NoReturn:
    """Raise Unavailable for a connection that failed, was cut or timed out. The request may have been carried out."""
    cause = FailureCause.TIMEOUT if is_timeout else FailureCause.ENGINE_UNREACHABLE
    raise Unavailable(
        f"{subject}: no response of the vendor: {type(error).__name__}: {quote_answer(error)}", cause=cause
    ) from error

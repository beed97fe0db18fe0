"""Ingestion of nginx's access log, one JSON line per request, matched to call rows by request id.

The log has requests without a row: those that nginx refused. It also shows which open calls belong to a server process that
died."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import structlog
from django.db.models import QuerySet

from sandboxes.egress.logs import tail
from sandboxes.egress.request_filter import MCP_PATH, MODELS_PATH
from sandboxes.lifecycle import checkpoint
from sandboxes.models import LlmCall, Sandbox

log = structlog.get_logger(__name__)
Outcome = LlmCall.Outcome
REFUSAL_CODES = {
    400: "malformed", 403: "path_forbidden", 404: "path_forbidden", 405: "path_forbidden", 408: "too_slow", 413: "too_large",
    414: "too_large", 429: "too_many", 431: "too_large", 494: "too_large", 499: "caller_gone",
}  # fmt: skip
MAX_REFUSED_ROWS_PER_HOUR = 100  # per sandbox
PADDED_STATUS_PATTERN = re.compile(r'("status": ?)0+(?=\d)')  # nginx pads a status below 100 with zeros: invalid JSON
CLOSE_GRACE_PERIOD = timedelta(seconds=60)  # after the end of a request, for the server to settle the row
MAX_LOG_BYTES = 32 << 20  # size at which the log is rotated
HOUR = timedelta(hours=1)


@dataclass(frozen=True)
class AccessLogLine:
    """One finished request, as logged by nginx."""

    call_id: str
    slot: int
    started_at: datetime
    ended_at: datetime
    uri: str
    status: int
    sent: int
    received: int
    was_forwarded: bool  # reached the egress server
    code: str  # the egress server's error code


def collect_access_log(path: Path, now: datetime) -> Counter[str]:
    """Ingest new log lines: mark logged calls, insert refused requests, and close abandoned calls as lost. Return counts."""
    counts = tail.ingest_file(path, lambda lines: apply_lines(lines, now=now), now=now)
    counts["closed as lost"] += find_abandoned(now=now).update(ended_at=now, outcome=Outcome.LOST)
    return +counts


def find_abandoned(*, now: datetime) -> QuerySet[LlmCall]:
    """Return open calls whose request ended more than CLOSE_GRACE_PERIOD ago: their server process has died."""
    return LlmCall.objects.filter(ended_at__isnull=True, logged_at__lt=now - CLOSE_GRACE_PERIOD)


def apply_lines(lines: Iterable[bytes], *, now: datetime) -> Counter[str]:
    """Apply lines inside the transaction that advances the file position. Return counts.

    A request without a row is inserted at once, although the server may be about to insert the same row after an early
    disconnect of the client. The call id is unique, and the server inserts before it forwards. If the insert here is first, the
    server refuses the call; if the server's is first, the insert here is ignored."""
    parsed = [parse_line(line) for line in lines]
    lines_by_call = {line.call_id: line for line in parsed if line and not _needs_no_row(line)}
    counts = Counter(malformed=parsed.count(None))
    recorded = {*LlmCall.objects.filter(call_id__in=lines_by_call).values_list("call_id", flat=True)}
    new = [line for line in lines_by_call.values() if line.call_id not in recorded]
    LlmCall.objects.bulk_create(_build_rows(new, counts), ignore_conflicts=True, batch_size=200)
    counts["logged"] += LlmCall.objects.filter(call_id__in=recorded, logged_at__isnull=True).update(logged_at=now)
    LlmCall.objects.filter(call_id__in=[line.call_id for line in new], logged_at__isnull=True).update(logged_at=now)
    if counts["malformed"]:
        log.error("malformed lines in the access log", lines=counts["malformed"])
    if counts["unmetered"]:
        log.error("answered calls without a row", calls=counts["unmetered"])
    return +counts


def _needs_no_row(line: AccessLogLine) -> bool:
    """Return whether a request is no call: a list of models, or a message to the tools that was not refused."""
    is_answered = line.was_forwarded and not line.code
    return (line.uri == MODELS_PATH and line.status == 200) or (line.uri == MCP_PATH and is_answered)


def _build_rows(lines: list[AccessLogLine], counts: Counter[str]) -> list[LlmCall]:
    """Build rows for requests without one. Refusals are limited per sandbox, because an agent can cause any number of them."""
    find_sandbox = _build_sandbox_lookup(lines)
    remaining: dict[tuple[Any, datetime], int] = {}
    rows = []
    for line in sorted(lines, key=lambda line: line.ended_at):
        sandbox = find_sandbox(line)
        row = _build_row(line, sandbox)
        if row.outcome == Outcome.OK:
            counts["unmetered"] += 1
            rows.append(row)
            continue
        hour = line.started_at.replace(minute=0, second=0, microsecond=0)
        bucket = (sandbox.pk if sandbox else None, hour)
        if bucket not in remaining:
            logged = LlmCall.objects.filter(sandbox=sandbox, started_at__gte=hour, started_at__lt=hour + HOUR)
            remaining[bucket] = MAX_REFUSED_ROWS_PER_HOUR - logged.filter(outcome__in=[Outcome.REFUSED, Outcome.FAILED]).count()
        remaining[bucket] -= 1
        counts["refused" if remaining[bucket] >= 0 else "refused, not stored"] += 1
        if remaining[bucket] >= 0:
            rows.append(row)
    if counts["refused, not stored"]:
        log.warning("refused requests above the hourly limit were not stored", requests=counts["refused, not stored"])
    return rows


def _build_sandbox_lookup(lines: list[AccessLogLine]) -> Callable[[AccessLogLine], Sandbox | None]:
    """Return a function that finds the sandbox that held a request's slot at the time of the request.

    A sandbox that has become cold since has no slot any more. Its last refused requests, of up to a minute before, are then
    stored without a sandbox."""
    slots: dict[int, list[tuple[datetime, Sandbox]]] = {}
    for sandbox in Sandbox.objects.filter(slot__in={line.slot for line in lines}):
        slots.setdefault(sandbox.slot or 0, []).append((sandbox.slot_since or sandbox.created_at, sandbox))
    for holders in slots.values():
        holders.sort(key=lambda pair: pair[0], reverse=True)

    def find_sandbox(line: AccessLogLine) -> Sandbox | None:
        begun = (sandbox for since, sandbox in slots.get(line.slot, []) if since <= line.ended_at)
        alive = (sandbox for sandbox in begun if sandbox.destroyed_at is None or line.started_at <= sandbox.destroyed_at)
        return next(alive, None)

    return find_sandbox


def _build_row(line: AccessLogLine, sandbox: Sandbox | None) -> LlmCall:
    """Build a row for a request that was not sent upstream: the server writes the row of a call before it forwards it."""
    code = line.code or REFUSAL_CODES.get(line.status, f"status_{line.status}")
    if 100 <= line.status < 400:
        outcome, code = Outcome.OK, ""
    elif line.was_forwarded and line.status >= 500:
        outcome = Outcome.FAILED
    else:
        outcome = Outcome.REFUSED
    return LlmCall(
        call_id=line.call_id, sandbox=sandbox, holder=sandbox.holder if sandbox else None,
        agent_did=sandbox.agent_did if sandbox else "", environment_id=sandbox.environment_id if sandbox else "",
        path=line.uri, started_at=line.started_at, deadline_at=line.ended_at, ended_at=line.ended_at, outcome=outcome,
        status=line.status, code=code, sent_bytes=line.sent, received_bytes=line.received,
    )  # fmt: skip


def parse_line(line: bytes) -> AccessLogLine | None:
    """Parse one line. Return None if the line is malformed: a sandbox controls its URI, sizes and timing."""
    try:
        fields = json.loads(PADDED_STATUS_PATTERN.sub(r"\1", line.decode(errors="replace")), parse_float=Decimal)
        ended_at = datetime.fromtimestamp(_parse_number(fields["at"], 1 << 33), UTC)
        if not re.fullmatch(r"[0-9a-f]{32}", fields["id"]) or not isinstance(fields["uri"], str):
            return None
        return AccessLogLine(
            call_id=fields["id"],
            slot=int(_parse_number(fields["slot"], 1 << 31)),
            started_at=ended_at - timedelta(seconds=_parse_number(fields["took"], 1 << 31)),
            ended_at=ended_at,
            uri=_clean_text(fields["uri"]),
            status=int(_parse_number(fields["status"], 1000)),
            sent=int(_parse_number(fields["sent"], 1 << 62)),
            received=int(_parse_number(fields["received"], 1 << 62)),
            was_forwarded=fields["upstream"] not in ("", "-"),
            code=_clean_text(str(fields.get("code") or "").strip("-"))[:64],
        )
    except (ValueError, TypeError, KeyError, OverflowError, InvalidOperation, RecursionError):
        return None


def _parse_number(value: object, upper_bound: int) -> float:
    number = float(str(value))
    if not 0 <= number < upper_bound:
        raise ValueError(f"{value!r} is not between 0 and {upper_bound}")
    return number


def _clean_text(text: str) -> str:
    """Replace characters that a database rejects: lone surrogates and NUL."""
    return text.encode(errors="replace").decode().replace("\0", "�")


def rotate_log(path: Path, reopen: Callable[[], object], *, now: datetime, max_bytes: int = MAX_LOG_BYTES) -> bool:
    """Rotate the log once it exceeds `max_bytes`. Return whether a new log was started.

    1. Rename the log.
    2. Call `reopen`, which makes nginx open a new log by name. May be called repeatedly.
    3. In a later call, delete the renamed log once it is ingested completely.

    Safe to stop at any step and to repeat."""
    old = path.with_name(f"{path.name}.1")
    collect_access_log(path, now)  # creates the read position, without which the renamed file would never be read
    if old.exists():
        reopen()  # the process that renamed the log may have died before reopening it
        checkpoint("log reopened", path)
        collect_access_log(path, now)
        if tail.is_fully_read(path, old):
            old.unlink()
        return False
    if not path.exists() or path.stat().st_size <= max_bytes:
        return False
    path.rename(old)
    checkpoint("log renamed", path)
    reopen()
    checkpoint("log reopened", path)
    collect_access_log(path, now)
    return True

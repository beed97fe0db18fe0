"""nginx's log of what came through sandboxes' sockets, one JSON line a request, joined with our rows by the request's id.

It shows what no row does: requests that nginx refused itself, and calls whose forwarder died."""

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

from sandboxes.egress import log_tail
from sandboxes.egress.request_filter import MODELS_PATH
from sandboxes.lifecycle import checkpoint
from sandboxes.models import LlmCall, Sandbox

log = structlog.get_logger(__name__)
Outcome = LlmCall.Outcome
REFUSAL_CODES = {
    400: "malformed", 403: "path_forbidden", 404: "path_forbidden", 405: "path_forbidden", 408: "too_slow", 413: "too_large",
    414: "too_large", 429: "too_many", 431: "too_large", 494: "too_large", 499: "caller_gone",
}  # fmt: skip
MAX_REFUSED_ROWS_PER_HOUR = 100  # rows of refused requests a sandbox and hour
PADDED_STATUS_PATTERN = re.compile(
    r'("status": ?)0+(?=\d)'
)  # nginx writes a status below 100 with three digits, which is no JSON
CLOSE_GRACE_PERIOD = timedelta(seconds=60)  # of the end of a request its row is closed, or its forwarder is dead
MAX_LOG_BYTES = 32 << 20  # bytes of nginx's log, past which it is rotated
HOUR = timedelta(hours=1)


@dataclass(frozen=True)
class AccessLogLine:
    """One request, as nginx saw it end."""

    call_id: str
    slot: int
    started_at: datetime
    ended_at: datetime
    uri: str
    status: int
    sent: int
    received: int
    left: bool  # it went on to the process that forwards calls
    code: str  # why that one refused it


def collect_access_log(path: Path, now: datetime) -> Counter[str]:
    """Note which calls nginx saw, write down those it refused, and close those whose forwarder died; what was done."""
    counts = log_tail.ingest_file(path, lambda lines: apply_lines(lines, now=now), now=now)
    counts["closed as lost"] += find_abandoned(now=now).update(ended_at=now, outcome=Outcome.LOST)
    return +counts


def find_abandoned(*, now: datetime) -> QuerySet[LlmCall]:
    """Calls that nginx saw the end of, and that nobody has closed since."""
    return LlmCall.objects.filter(ended_at__isnull=True, logged_at__lt=now - CLOSE_GRACE_PERIOD)


def apply_lines(lines: Iterable[bytes], *, now: datetime) -> Counter[str]:
    """Apply lines of the log, in the transaction in which its position moves.

    A request without a row gets one at once. Its forwarder may be about to write that row, if its caller went away early; but
    it does so before it sends, and an id is there once: who comes second has the call refused, or adds nothing."""
    parsed = [parse_line(line) for line in lines]
    found = {line.call_id: line for line in parsed if line and not (line.uri == MODELS_PATH and line.status == 200)}
    counts = Counter(garbage=parsed.count(None))
    known = {*LlmCall.objects.filter(call_id__in=found).values_list("call_id", flat=True)}
    new = [line for line in found.values() if line.call_id not in known]
    LlmCall.objects.bulk_create(_build_rows(new, counts), ignore_conflicts=True, batch_size=200)
    counts["logged"] += LlmCall.objects.filter(call_id__in=known, logged_at__isnull=True).update(logged_at=now)
    LlmCall.objects.filter(call_id__in=[line.call_id for line in new], logged_at__isnull=True).update(logged_at=now)
    if counts["garbage"]:
        log.error("lines of the proxy's log are no requests", lines=counts["garbage"])
    if counts["unmetered"]:
        log.error("answered calls without a row", calls=counts["unmetered"])
    return +counts


def _build_rows(lines: list[AccessLogLine], counts: Counter[str]) -> list[LlmCall]:
    """Rows for requests that have none, up to the limit of each sandbox: refusing it costs an agent nothing."""
    boxes = _build_sandbox_lookup(lines)
    room: dict[tuple[Any, datetime], int] = {}
    rows = []
    for line in sorted(lines, key=lambda line: line.ended_at):
        box = boxes(line)
        row = _build_row(line, box)
        if row.outcome == Outcome.OK:
            counts["unmetered"] += 1
            rows.append(row)
            continue
        hour = line.started_at.replace(minute=0, second=0, microsecond=0)
        within = (box.pk if box else None, hour)
        if within not in room:
            there = LlmCall.objects.filter(sandbox=box, started_at__gte=hour, started_at__lt=hour + HOUR)
            room[within] = MAX_REFUSED_ROWS_PER_HOUR - there.filter(outcome__in=[Outcome.REFUSED, Outcome.FAILED]).count()
        room[within] -= 1
        counts["refused" if room[within] >= 0 else "refused and not kept"] += 1
        if room[within] >= 0:
            rows.append(row)
    if counts["refused and not kept"]:
        log.warning("more refused requests than are kept", requests=counts["refused and not kept"])
    return rows


def _build_sandbox_lookup(lines: list[AccessLogLine]) -> Callable[[AccessLogLine], Sandbox | None]:
    """Who had a slot at the time of a request."""
    slots: dict[int, list[Sandbox]] = {}
    for box in Sandbox.objects.filter(slot__in={line.slot for line in lines}).order_by("-created_at"):
        slots.setdefault(box.slot or 0, []).append(box)

    def box_of(line: AccessLogLine) -> Sandbox | None:
        there = (box for box in slots.get(line.slot, []) if box.created_at <= line.ended_at)
        return next((box for box in there if box.destroyed_at is None or line.started_at <= box.destroyed_at), None)

    return box_of


def _build_row(line: AccessLogLine, box: Sandbox | None) -> LlmCall:
    """A request that has no row was not sent to any upstream: its row would have been written before."""
    code = line.code or REFUSAL_CODES.get(line.status, f"status_{line.status}")
    if 100 <= line.status < 400:
        outcome, code = Outcome.OK, ""
    elif line.left and line.status >= 500:
        outcome = Outcome.FAILED
    else:
        outcome = Outcome.REFUSED
    return LlmCall(
        call_id=line.call_id, sandbox=box, holder=box.holder if box else None, agent_did=box.agent_did if box else "",
        environment_id=box.environment_id if box else "", path=line.uri[:200], started_at=line.started_at,
        deadline_at=line.ended_at, ended_at=line.ended_at, outcome=outcome, status=line.status, code=code,
        sent_bytes=line.sent, received_bytes=line.received,
    )  # fmt: skip


def parse_line(line: bytes) -> AccessLogLine | None:
    """The request on a line; None if there is none. Much of it was written by a sandbox."""
    try:
        said = json.loads(PADDED_STATUS_PATTERN.sub(r"\1", line.decode(errors="replace")), parse_float=Decimal)
        ended_at = datetime.fromtimestamp(_parse_number(said["at"], 1 << 33), UTC)
        if not re.fullmatch(r"[0-9a-f]{32}", said["id"]) or not isinstance(said["uri"], str):
            return None
        return AccessLogLine(
            call_id=said["id"],
            slot=int(_parse_number(said["slot"], 1 << 31)),
            started_at=ended_at - timedelta(seconds=_parse_number(said["took"], 1 << 31)),
            ended_at=ended_at,
            uri=_clean_text(said["uri"]),
            status=int(_parse_number(said["status"], 1000)),
            sent=int(_parse_number(said["sent"], 1 << 62)),
            received=int(_parse_number(said["received"], 1 << 62)),
            left=said["upstream"] not in ("", "-"),
            code=_clean_text(str(said.get("code") or "").strip("-"))[:64],
        )
    except (ValueError, TypeError, KeyError, OverflowError, InvalidOperation, RecursionError):
        return None


def _parse_number(said: object, below: int) -> float:
    number = float(str(said))
    if not 0 <= number < below:
        raise ValueError(f"{said!r} is not between 0 and {below}")
    return number


def _clean_text(text: str) -> str:
    """Text that every database takes."""
    return text.encode(errors="replace").decode().replace("\0", "�")


def rotate_log(path: Path, reopen: Callable[[], object], *, now: datetime, largest: int = MAX_LOG_BYTES) -> bool:
    """Start a new log once the present one is large, and remove the old one once all of it is collected; whether one was
    started. `reopen` makes nginx open its log by name again, and may be called again.

    Safe to stop at any step, and to repeat: while the old one is there the next call goes on with it."""
    old = path.with_name(f"{path.name}.1")
    collect_access_log(path, now)  # where nobody has begun to read, the file that is renamed would never be found
    if old.exists():
        reopen()  # whoever renamed it may have died before
        checkpoint("log reopened", path)
        collect_access_log(path, now)
        if log_tail.is_fully_read(path, old):
            old.unlink()
        return False
    if not path.exists() or path.stat().st_size <= largest:
        return False
    path.rename(old)
    checkpoint("log renamed", path)
    reopen()
    checkpoint("log reopened", path)
    collect_access_log(path, now)
    return True

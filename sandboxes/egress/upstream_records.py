"""LiteLLM's records of our calls, as litellm_callback.py writes them, joined with our rows by the call's id.

A record is the best that is known of a price, so it replaces one that came from elsewhere. How a call ended it leaves alone."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path

import structlog
from django.conf import settings
from django.db.models import QuerySet

from sandboxes.egress import log_tail
from sandboxes.egress.amounts import parse_usd
from sandboxes.models import LlmCall

log = structlog.get_logger(__name__)
OWN_CALL_ID_PATTERN = re.compile(r"[0-9a-f]{32}")  # the id of a call of ours; LiteLLM makes others for its other clients
CALL_ID_PATTERN = re.compile(r"[!-~]{1,256}")
RECORD_TIMEOUT = timedelta(minutes=1)  # a record that is not there by then is missing
TOKEN_COLUMNS = ("input_tokens", "cached_tokens", "output_tokens")


@dataclass(frozen=True)
class UpstreamRecord:
    """What LiteLLM says about one call. None: it does not know. Input tokens have the cached ones in them."""

    call_id: str
    failed: bool
    exact: bool  # not an estimate, as for a caller who went away
    cost: Decimal | None
    input_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None


def collect_records(path: Path, now: datetime) -> Counter[str]:
    """Give our calls the costs and tokens that were recorded since the last collection; what was done, by what it was.

    Of several records of one call the one with the highest cost counts: LiteLLM writes one for each attempt of its own."""
    return log_tail.ingest_file(path, lambda lines: apply_lines(lines, now=now), now=now)


def find_unmetered(now: datetime) -> QuerySet[LlmCall]:
    """Calls that were answered, but are not in the upstream's records: what they cost is not known, or not confirmed."""
    if not settings.LLM_RECORDS:
        return LlmCall.objects.none()
    return LlmCall.objects.filter(
        kind=LlmCall.Kind.LLM, outcome=LlmCall.Outcome.OK, recorded_at__isnull=True, ended_at__lt=now - RECORD_TIMEOUT
    )


def apply_lines(lines: Iterable[bytes], *, now: datetime) -> Counter[str]:
    """Apply lines of the file, in the transaction in which its position moves."""
    counts: Counter[str] = Counter()
    found: dict[str, list[UpstreamRecord]] = {}
    for line in lines:
        if record := parse_line(line):
            found.setdefault(record.call_id, []).append(record)
        else:
            counts["garbage"] += 1
    rows = {row.call_id: row for row in LlmCall.objects.select_for_update().filter(call_id__in=found).order_by("pk")}
    for call_id, row in rows.items():
        counted = [record for record in found[call_id] if _is_applicable(record, row)]
        counts["recorded"] += bool(counted and row.recorded_at is None)
        for record in counted:
            _apply_record(record, row, now=now)
    LlmCall.objects.bulk_update(rows.values(), [*TOKEN_COLUMNS, "cost", "priced", "recorded_at", "counted"], batch_size=200)
    _count_missing([call_id for call_id in found if call_id not in rows], counts)
    if counts["garbage"]:
        log.error("lines of the upstream's records are no records", lines=counts["garbage"])
    return +counts


def _count_missing(call_ids: list[str], counts: Counter[str]) -> None:
    """A row is there before its call is sent; without one the database was restored, or LiteLLM has other clients."""
    ours = [call_id for call_id in call_ids if OWN_CALL_ID_PATTERN.fullmatch(call_id)]
    counts["unknown"] += len(ours)
    counts["of others"] += len(call_ids) - len(ours)
    if ours:
        log.error("recorded calls without a row", calls=len(ours), first=ours[:5])


def _is_applicable(record: UpstreamRecord, row: LlmCall) -> bool:
    """Whether a record says something about a row. An attempt that failed for nothing says so only if the call did, too:
    another attempt may have been answered."""
    if not record.failed or record.cost:
        return True
    return row.outcome in (LlmCall.Outcome.FAILED, LlmCall.Outcome.LOST) and not row.output_tokens


def _apply_record(record: UpstreamRecord, row: LlmCall, *, now: datetime) -> None:
    row.recorded_at = row.recorded_at or now
    for name in TOKEN_COLUMNS:
        count = getattr(record, name)
        if count is not None and (record.exact or getattr(row, name) is None):
            setattr(row, name, count)
    better = row.priced != LlmCall.Priced.RECORD or row.cost is None or (record.cost or 0) > row.cost
    if record.cost is not None and better:
        row.cost, row.priced = record.cost, LlmCall.Priced.RECORD
    row.counted = False


def parse_line(line: bytes) -> UpstreamRecord | None:
    """The record on a line; None if there is none."""
    try:
        said = json.loads(line, parse_float=Decimal)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or not isinstance(call_id := said.get("call"), str) or not CALL_ID_PATTERN.fullmatch(call_id):
        return None
    cost = parse_usd(said.get("cost"))
    if said.get("status") not in ("success", "failure") or (cost is None and said.get("cost") is not None):
        return None
    return UpstreamRecord(
        call_id,
        said["status"] == "failure",
        said["status"] == "success" and not said.get("error"),
        cost,
        *(_parse_count(said.get(name)) for name in ("input", "cached", "output")),
    )


def _parse_count(said: object) -> int | None:
    return said if isinstance(said, int) and not isinstance(said, bool) and 0 <= said < 1 << 53 else None

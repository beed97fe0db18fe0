"""Ingestion of LiteLLM's cost records, written by litellm_callback.py and matched to call rows by call id.

A record is the most reliable source of a price and replaces a price from another source. Records do not change outcomes.

LiteLLM may bill a call twice: when a stream fails before its answer begins, it asks another model. It writes a record of each
attempt. Records with different statuses or response ids are of different attempts, whose costs are added. Of several records of
one attempt the one with the highest cost counts.

After a client disconnect LiteLLM states an estimate. Its cost and its tokens are taken together if it has more output than the
call: the answer went on after its reader had left. Otherwise the reported tokens stay, and a price that follows from them."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path

import structlog
from django.conf import settings
from django.db.models import QuerySet

from sandboxes.egress.amounts import REFUSED_AMOUNT_CODE, parse_tokens, parse_usd
from sandboxes.egress.estimates import COUNT_TOKENS_PATH
from sandboxes.egress.logs import tail
from sandboxes.egress.model_pricing import OUTPUT_KINDS
from sandboxes.models import LlmCall, TokenKind

log = structlog.get_logger(__name__)
OWN_CALL_ID_PATTERN = re.compile(r"[0-9a-f]{32}")  # format of the proxy's ids; LiteLLM's other clients have other ids
CALL_ID_PATTERN = re.compile(r"[!-~]{1,256}")
RECORD_TIMEOUT = timedelta(minutes=1)  # after the end of a call, for its record to arrive
TOKEN_COLUMNS = ("input_tokens", "cached_tokens", "output_tokens")
CHANGED_COLUMNS = (
    *TOKEN_COLUMNS, "tokens", "token_counts", "cost", "priced", "rate_ids", "recorded_at", "recorded_attempts", "counted",
    "code",
)  # fmt: skip
UNRECORDED_ANSWER = "answer"  # name of the attempt whose price is not that of a record
REPORTED_PRICES = (LlmCall.Priced.UPSTREAM, LlmCall.Priced.RATE)


@dataclass(frozen=True)
class UpstreamRecord:
    """LiteLLM's record of one call. None means unknown. Input tokens include cached tokens."""

    call_id: str
    failed: bool
    exact: bool  # False for estimates, as after a client disconnect
    cost: Decimal | None
    input_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    attempt: str  # of LiteLLM, the same in each record of it
    has_refused_counts: bool = False  # a stated token count is out of range, and is ignored


def collect_records(path: Path, now: datetime) -> Counter[str]:
    """Apply records written since the last collection to the call rows. Return counts by kind of result.

    LiteLLM writes one record per attempt, and some records repeatedly."""
    return tail.ingest_file(path, lambda lines: apply_lines(lines, now=now), now=now)


def find_unmetered(now: datetime) -> QuerySet[LlmCall]:
    """Return answered calls without an upstream record, whose cost is therefore unknown or unconfirmed.

    LiteLLM writes no record of a token count, which is free of charge."""
    if not settings.LLM_RECORDS:
        return LlmCall.objects.none()
    unrecorded = LlmCall.objects.filter(
        kind=LlmCall.Kind.LLM, outcome=LlmCall.Outcome.OK, recorded_at__isnull=True, ended_at__lt=now - RECORD_TIMEOUT
    )
    return unrecorded.exclude(priced=LlmCall.Priced.FREE).exclude(path__endswith=COUNT_TOKENS_PATH)


def apply_lines(lines: Iterable[bytes], *, now: datetime) -> Counter[str]:
    """Apply lines inside the transaction that advances the file position. Return counts."""
    counts: Counter[str] = Counter()
    records_by_call: dict[str, list[UpstreamRecord]] = {}
    for line in lines:
        if record := parse_line(line):
            counts["out of range"] += record.has_refused_counts
            records_by_call.setdefault(record.call_id, []).append(record)
        else:
            counts["malformed"] += 1
    rows = {row.call_id: row for row in LlmCall.objects.select_for_update().filter(call_id__in=records_by_call).order_by("pk")}
    for call_id, row in rows.items():
        applicable = [record for record in records_by_call[call_id] if _is_applicable(record, row)]
        counts["recorded"] += bool(applicable and row.recorded_at is None)
        for record in applicable:
            _apply_record(record, row, now=now)
    LlmCall.objects.bulk_update(rows.values(), CHANGED_COLUMNS, batch_size=200)
    _count_missing([call_id for call_id in records_by_call if call_id not in rows], counts)
    if counts["malformed"]:
        log.error("malformed lines in the upstream's records", lines=counts["malformed"])
    if counts["out of range"]:
        log.error("token counts out of range in the upstream's records", records=counts["out of range"])
    return +counts


def _count_missing(call_ids: list[str], counts: Counter[str]) -> None:
    """Count records without a row. Rows precede their calls: the database was restored, or LiteLLM has other clients."""
    own_ids = [call_id for call_id in call_ids if OWN_CALL_ID_PATTERN.fullmatch(call_id)]
    counts["unknown"] += len(own_ids)
    counts["from other clients"] += len(call_ids) - len(own_ids)
    if own_ids:
        log.error("recorded calls without a row", calls=len(own_ids), first=own_ids[:5])


def _is_applicable(record: UpstreamRecord, row: LlmCall) -> bool:
    """Return whether a record describes the result of a call.

    The record of a failed attempt without cost applies only if the call failed too: another attempt may have succeeded."""
    if not record.failed or record.cost:
        return True
    return row.outcome in (LlmCall.Outcome.FAILED, LlmCall.Outcome.LOST) and not row.output_tokens


def _apply_record(record: UpstreamRecord, row: LlmCall, *, now: datetime) -> None:
    row.recorded_at = row.recorded_at or now
    is_lower_estimate = not record.exact and (row.output_tokens or 0) > (record.output_tokens or 0)
    for name in TOKEN_COLUMNS:
        count, known = getattr(record, name), getattr(row, name)
        if count is not None and (record.exact or known is None or count > known):
            setattr(row, name, count)
    reported = (row.input_tokens or 0) + (row.output_tokens or 0)
    is_whole = record.exact and record.input_tokens is not None and record.output_tokens is not None
    row.tokens = reported if is_whole else max(reported, row.tokens or 0)
    if not record.exact and row.token_counts and not is_lower_estimate:
        row.token_counts = _replace_output(row.token_counts, row.output_tokens or 0)
    is_beside = record.failed and row.outcome == LlmCall.Outcome.OK  # of an attempt other than the answered one
    if record.cost is not None and (is_beside or not (is_lower_estimate and row.priced in REPORTED_PRICES)):
        _add_attempt(record.attempt, record.cost, row, failed=record.failed)
    if record.has_refused_counts:
        row.code = row.code or REFUSED_AMOUNT_CODE
    row.counted = False


def _add_attempt(attempt: str, cost: Decimal, row: LlmCall, *, failed: bool) -> None:
    """Set the cost of an attempt, and the price of its call to the sum of its attempts.

    An answered call keeps its price as that of a further attempt until the answer is recorded."""
    attempts = {name: Decimal(usd) for name, usd in (row.recorded_attempts or {}).items()}
    if row.cost is not None and not attempts:
        if row.priced == LlmCall.Priced.RECORD:  # by a version that named no attempts
            row.cost = max(row.cost, cost)
            return
        if failed and row.outcome == LlmCall.Outcome.OK:
            attempts[UNRECORDED_ANSWER] = row.cost
    if not failed:
        attempts.pop(UNRECORDED_ANSWER, None)
    attempts[attempt] = max(cost, attempts.get(attempt, cost))
    row.recorded_attempts = {name: str(usd) for name, usd in attempts.items()}
    row.cost, row.priced, row.rate_ids = sum(attempts.values(), Decimal(0)), LlmCall.Priced.RECORD, None


def _name_attempt(status: str, response: object) -> str:
    """Return a short name of an attempt. Ids of responses may have any length, and callbacks before this version name none."""
    return (
        f"{status} {hashlib.sha256(response.encode()).hexdigest()[:16]}" if response and isinstance(response, str) else status
    )


def _replace_output(counts: Mapping[str, int], output_tokens: int) -> dict[str, int]:
    """Return counts by kind whose output is `output_tokens` in total. Reasoning and media keep their counts."""
    others = sum(counts.get(kind, 0) for kind in OUTPUT_KINDS if kind != TokenKind.OUTPUT)
    return {**counts, TokenKind.OUTPUT.value: max(output_tokens - others, 0)}


def parse_line(line: bytes) -> UpstreamRecord | None:
    """Parse one line. Return None if the line is malformed."""
    try:
        fields = json.loads(line, parse_float=Decimal)
    except (ValueError, RecursionError):
        return None
    if (
        not isinstance(fields, dict)
        or not isinstance(call_id := fields.get("call"), str)
        or not CALL_ID_PATTERN.fullmatch(call_id)
    ):
        return None
    cost = parse_usd(fields.get("cost"))
    if fields.get("status") not in ("success", "failure") or (cost is None and fields.get("cost") is not None):
        return None
    stated = [fields.get(name) for name in ("input", "cached", "output")]
    input_tokens, cached_tokens, output_tokens = map(parse_tokens, stated)
    return UpstreamRecord(
        call_id,
        fields["status"] == "failure",
        fields["status"] == "success" and not fields.get("error"),
        cost,
        input_tokens,
        cached_tokens,
        output_tokens,
        _name_attempt(fields["status"], fields.get("response")),
        any(count is not None and parse_tokens(count) is None for count in stated),
    )

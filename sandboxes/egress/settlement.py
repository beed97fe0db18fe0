"""Settlement of model calls: outcome, usage and price, written when a call ends. Runs in the server's database threads.

The price is written with the end of the call and not by a sweep, because the next call of the lease is checked against it. In
order of preference it is the cost that the upstream states, the reported usage at the model's rates, or an estimate where the
usage is unknown. The sweep `collect` only repairs: it prices calls whose rate was added later."""

import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from functools import cache
from pathlib import Path

import structlog
from django.db import connection
from django.db.models import Case, Field, QuerySet, Value, When
from django.db.models.functions import Coalesce

from sandboxes.db import sql, tracing
from sandboxes.egress import model_pricing
from sandboxes.egress.amounts import REFUSED_AMOUNT_CODE
from sandboxes.egress.estimates import TokenEstimate, estimate_usage
from sandboxes.egress.model_pricing import RateBook
from sandboxes.egress.token_usage import TokenUsage
from sandboxes.models import LlmCall

log = structlog.get_logger(__name__)
RELAY_HEARTBEAT_TIMEOUT = timedelta(minutes=3)  # a relay connection not seen for this long is treated as closed
ENDED_STATES = ("Z", "X")  # of a process in proc(5): zombie, dead
Priced = LlmCall.Priced


@dataclass
class CallResult:
    """Outcome, usage and cost of a finished call. None means unknown."""

    outcome: LlmCall.Outcome
    status: int | None = None
    code: str = ""
    usage: TokenUsage | None = None
    cost: Decimal | None = None
    has_refused_cost: bool = False  # the upstream stated a cost that is out of range, which is ignored
    first_byte_at: datetime | None = None
    received_bytes: int = 0
    sent_bytes: int | None = None
    estimate: TokenEstimate | None = None  # of the request; None for relay connections
    is_free: bool = False  # the upstream generated nothing: it was not reached, it refused the request, or it counted tokens
    is_settled: bool = False


@dataclass(frozen=True)
class CallPrice:
    """Cost of a call in USD, its source, and the keys of the rates that it was calculated from."""

    usd: Decimal
    source: LlmCall.Priced
    rates: tuple[int, ...] = ()


def settle_call(row: LlmCall, result: CallResult, *, now: datetime) -> bool:
    """Close an open call. Return whether this call closed it.

    Usage and cost already taken from the upstream's record are not overwritten. An answered call whose stated amounts are out
    of range has the code `amount_refused`."""
    code = result.code
    if result.has_refused_cost or (result.usage and result.usage.has_refused_counts):
        code = code or REFUSED_AMOUNT_CODE
        log.error("cost or tokens stated by the upstream are out of range", call=row.call_id)
    changes: dict[str, object] = {
        "ended_at": now, "outcome": str(result.outcome), "status": result.status, "code": code,
        "first_byte_at": result.first_byte_at, "received_bytes": result.received_bytes,
    }  # fmt: skip
    if result.sent_bytes is not None:
        changes["sent_bytes"] = result.sent_bytes
    metered = _describe_usage(result.usage) if result.usage else {}
    if result.estimate is not None:
        metered["tokens"] = 0 if result.is_free else _count_tokens(row, result, result.estimate).total
    if price := _price_result(row, result):
        metered |= {"cost": price.usd, "priced": str(price.source), "rate_ids": list(price.rates) or None}
    _trace(row, result, now=now)
    assignments = [f"{name} = %s" for name in changes]
    assignments += [f"{name} = CASE WHEN recorded_at IS NULL THEN %s ELSE {name} END" for name in metered]
    change = f"{', '.join(assignments)} WHERE id = %s AND ended_at IS NULL"
    closed = bool(sql.update(LlmCall, change, *changes.values(), *_prepare(metered), row.pk))
    result.is_settled = True
    return closed


def note_usage(row: LlmCall, usage: TokenUsage, request: TokenEstimate) -> None:
    """Write the usage of an open call that is known so far, for the case that this process dies during the call.

    The reservation becomes that of the reported input and of the maximal output."""
    known = {name: value for name, value in _describe_usage(usage).items() if value is not None}
    known["reserved_tokens"] = TokenEstimate(
        request.input_tokens if usage.input_tokens is None else usage.input_tokens,
        max(request.output_tokens, usage.output_tokens or 0),
    ).total
    reserved = _estimate_price(_load_rates(row, usage), request.input_tokens, request.output_tokens, usage)
    known |= {} if reserved is None else {"reserved": reserved}
    change = ", ".join(f"{name} = %s" for name in known)
    sql.update(LlmCall, f"{change} WHERE id = %s AND ended_at IS NULL AND recorded_at IS NULL", *_prepare(known), row.pk)


def _describe_usage(usage: TokenUsage) -> dict[str, object]:
    """Return the columns of a reported usage."""
    columns: dict[str, object] = {
        "input_tokens": usage.input_tokens, "cached_tokens": usage.cached_tokens, "output_tokens": usage.output_tokens,
        "usage": usage.document, "token_counts": usage.counts or None, "service_tier": usage.tier,
    }  # fmt: skip
    return columns | ({"model": usage.model} if usage.model else {})


def _prepare(columns: dict[str, object]) -> list[object]:
    return [_get_field(name).get_db_prep_save(value, connection) for name, value in columns.items()]


@cache
def _get_field(name: str) -> "Field[object, object]":
    field = LlmCall._meta.get_field(name)
    assert isinstance(field, Field)
    return field


def _price_result(row: LlmCall, result: CallResult) -> CallPrice | None:
    """Return the price of a finished call. None for relay connections, and for a model without a rate."""
    stated = result.cost if result.cost is not None or result.usage is None else result.usage.cost
    if stated is not None:
        return CallPrice(stated, Priced.UPSTREAM)
    if result.estimate is None:
        return None
    if result.is_free:
        return CallPrice(Decimal(0), Priced.FREE)
    usage = result.usage
    rates = _load_rates(row, usage)
    if usage and usage.is_complete:
        price = rates.price(usage.counts, usage.tier)
        if price is not None and not price.is_unknown:
            return CallPrice(price.usd, price.source, price.rates)
    tokens = _count_tokens(row, result, result.estimate)
    estimated = _estimate_price(rates, tokens.input_tokens, tokens.output_tokens, usage)
    return None if estimated is None else CallPrice(estimated, Priced.ESTIMATE)


def _count_tokens(row: LlmCall, result: CallResult, request: TokenEstimate) -> TokenEstimate:
    """Return the tokens of a finished call: those reported, or an estimate where the usage is incomplete."""
    usage = result.usage
    if usage and usage.is_complete:
        return TokenEstimate(usage.input_tokens or 0, usage.output_tokens or 0)
    answered = result.outcome == LlmCall.Outcome.OK
    return estimate_usage(request, usage, streamed=row.streamed, answered=answered, received_bytes=result.received_bytes)


def _load_rates(row: LlmCall, usage: TokenUsage | None) -> RateBook:
    names = model_pricing.find_candidate_names(usage.model if usage else "", row.requested_model or row.model)
    return model_pricing.load_rates(names, at=row.started_at)


def _estimate_price(rates: RateBook, input_tokens: int, output_tokens: int, usage: TokenUsage | None) -> Decimal | None:
    """Estimate the price of a call with incomplete usage. Reported counts are exact for the input, and lower bounds else."""
    if usage is None or usage.input_tokens is None:
        return rates.estimate(input_tokens, output_tokens, usage.tier if usage else "")
    output_tokens = max(output_tokens, usage.output_tokens or 0)
    return rates.estimate(usage.input_tokens, output_tokens, usage.tier, usage.counts)


def _trace(row: LlmCall, result: CallResult, *, now: datetime) -> None:
    """Record the span of a call in the trace of its run, if the call belongs to exactly one."""
    if row.run_id is None:
        return
    error = "" if result.outcome == LlmCall.Outcome.OK else result.code or str(result.outcome)
    attributes: dict[str, object] = {
        "gen_ai.operation.name": row.kind, "gen_ai.request.model": row.model, "http.response.status_code": result.status,
        "leasehold.call_id": row.call_id, "leasehold.lease_id": str(row.holder),
    }  # fmt: skip
    if result.usage:  # names of the semantic conventions of OpenTelemetry for generative AI
        attributes["gen_ai.usage.input_tokens"] = result.usage.input_tokens
        attributes["gen_ai.usage.output_tokens"] = result.usage.output_tokens
    tracing.record_child_span(f"call {row.kind}", row.run_id, row.started_at, now, attributes, error=error)


# --- calls whose server died ------------------------------------------------------------------------------------------


def extend_relay_deadlines(pks: Iterable[int], *, now: datetime) -> int:
    """Extend the deadlines of open relay connections to RELAY_HEARTBEAT_TIMEOUT from now. Return the number extended."""
    return LlmCall.objects.filter(pk__in=[*pks], ended_at__isnull=True).update(deadline_at=now + RELAY_HEARTBEAT_TIMEOUT)


def find_overdue(*, now: datetime) -> QuerySet[LlmCall]:
    """Return open calls past their deadline: the server process that forwarded them has died."""
    return LlmCall.objects.filter(ended_at__isnull=True, deadline_at__lt=now).order_by("deadline_at")


def close_abandoned(*, now: datetime, limit: int = 200) -> int:
    """Close up to `limit` calls past their deadline as lost, each at its estimated price. Return the number closed."""
    return _close_lost([*find_overdue(now=now).values_list("pk", flat=True)[:limit]], now=now)


def close_calls_of_dead_servers(*, now: datetime, is_alive: Callable[[str], bool] | None = None) -> int:
    """Close the open calls of processes of this host that have ended, as lost. Return the number closed.

    A new server process calls this before it serves: the calls of its predecessor would count as calls in flight until their
    deadline, and refuse those that their sandboxes repeat."""
    host = f"{socket.gethostname()}:"
    open_calls = LlmCall.objects.filter(ended_at__isnull=True, server__startswith=host)
    servers = {*open_calls.order_by().values_list("server", flat=True).distinct()}
    dead = [server for server in servers if not (is_alive or is_server_alive)(server)]
    return _close_lost([*open_calls.filter(server__in=dead).values_list("pk", flat=True)], now=now) if dead else 0


def _close_lost(pks: list[int], *, now: datetime) -> int:
    """Close calls as lost. What the upstream generated is unknown, so the estimates made at their start count."""
    has_estimate = When(cost__isnull=True, reserved__isnull=False, then=Value(str(Priced.ESTIMATE)))
    return LlmCall.objects.filter(pk__in=pks, ended_at__isnull=True).update(
        ended_at=now,
        outcome=LlmCall.Outcome.LOST,
        priced=Case(has_estimate, default="priced"),
        cost=Coalesce("cost", "reserved"),
        tokens=Coalesce("tokens", "reserved_tokens"),
    )


def describe_server() -> str:
    """Return the identity of this process: host, process id and start time, in clock ticks since the boot of the host."""
    return _describe_process(os.getpid())


@cache
def _describe_process(pid: int) -> str:
    return f"{socket.gethostname()}:{pid}:{_read_start_ticks(pid)}"


def is_server_alive(server: str) -> bool:
    """Return whether a process of this host is still running. Its id may belong to another process by now."""
    _, pid, ticks = server.rsplit(":", 2)
    return _read_start_ticks(int(pid)) == ticks


def _read_start_ticks(pid: int) -> str:
    """Return the start time of a process, field 22 of /proc/pid/stat (proc(5)), or an empty string if there is none.

    A zombie has ended: its parent has not waited for it yet."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in ENDED_STATES else fields[18]
    except (FileNotFoundError, ProcessLookupError):
        return ""

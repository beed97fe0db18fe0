"""Limits on the cost and the tokens of model calls.

The app that derives costs registers the check of budgets and the sums of a lease's calls.

A call is admitted only if what is spent, the reservations of all calls in flight, and its own reservation fit into every
limit. The reservation is the call's estimated price and tokens. Those that it had replace them when the call ends
(sandboxes.egress.settlement)."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from uuid import UUID

from sandboxes.call_limits import CallLimits, CallUnit
from sandboxes.egress.refusals import CallRefused


@dataclass(frozen=True)
class CallReservation:
    """Call to be admitted: its holder and agent, the requested model, its estimated price and tokens.

    Without a rate of the model `usd` is None."""

    holder: UUID
    agent_did: str
    model: str
    usd: Decimal | None
    tokens: int


@dataclass(frozen=True)
class Funds:
    """Result of a check: whether a limit applies, and the rest of the smallest limits that the agent may know."""

    has_limit: bool = False
    remaining_usd: Decimal | None = None
    remaining_tokens: Decimal | None = None


NO_LIMIT = Funds()
# Check of the budgets of a lease, in the admitting transaction. Raise CallRefused.
BudgetCheck = Callable[[CallReservation, datetime], Funds]
# Sum of a lease's ended calls and the reservations of its open ones, in a unit.
LeaseSum = Callable[[UUID, CallUnit], Decimal]


def _no_budgets(call: CallReservation, now: datetime) -> Funds:
    return NO_LIMIT


def _no_costs(holder: UUID, unit: CallUnit) -> Decimal:
    return Decimal(0)


_check_budgets: BudgetCheck = _no_budgets
_sum_lease: LeaseSum = _no_costs


def register(check_budgets: BudgetCheck, sum_lease: LeaseSum) -> None:
    """Set the check of budgets and the sums of a lease's calls."""
    global _check_budgets, _sum_lease
    _check_budgets, _sum_lease = check_budgets, sum_lease


def require_funds(call: CallReservation, limits: CallLimits, *, now: datetime) -> Funds:
    """Check a call against the lease's own limits and all budgets. Return what remains after its reservation.

    Raise CallRefused. Call it in the transaction that writes the call's row, with the sandbox's row locked. A call that is
    free of charge passes the limits in USD, and a call without tokens those in tokens."""
    if call.usd == 0 and call.tokens == 0:
        return NO_LIMIT
    if limits.usd is not None and call.usd is None:
        raise build_not_priced_refusal(call.model)
    usd = _check_limit("usd", call.holder, call.usd, limits.usd)
    tokens = _check_limit("tokens", call.holder, Decimal(call.tokens), limits.tokens)
    budgets = _check_budgets(call, now)
    return Funds(
        has_limit=budgets.has_limit or usd is not None or tokens is not None,
        remaining_usd=_get_smaller(usd, budgets.remaining_usd),
        remaining_tokens=_get_smaller(tokens, budgets.remaining_tokens),
    )


def _get_smaller(first: Decimal | None, second: Decimal | None) -> Decimal | None:
    return min((rest for rest in (first, second) if rest is not None), default=None)


def _check_limit(unit: CallUnit, holder: UUID, needed: Decimal | None, maximum: Decimal | int | None) -> Decimal | None:
    """Return what remains of a limit of the lease, or None if it does not apply. Raise CallRefused."""
    if maximum is None or not needed:
        return None
    limit, spent = Decimal(maximum), _sum_lease(holder, unit)
    if spent < limit and spent + needed <= limit:
        return limit - spent - needed
    code = "spend_limit_reached" if unit == "usd" else "token_limit_reached"
    amounts = {f"limit_{unit}": limit, f"spent_{unit}": spent, f"call_{unit}": needed}
    details = {name: format_amount(amount) for name, amount in amounts.items()}
    raise CallRefused(402, code, _describe_limit(unit, needed, spent, limit), **details)


def _describe_limit(unit: CallUnit, needed: Decimal, spent: Decimal, limit: Decimal) -> str:
    label = "USD" if unit == "usd" else "tokens"
    if spent >= limit:
        return f"This lease has reached its limit of {format_amount(limit)} {label} for model calls."
    call = f"{'cost' if unit == 'usd' else 'use'} {format_amount(needed)} {label}"
    return (
        f"This call may {call}, and {format_amount(limit - spent)} of the lease's limit of {format_amount(limit)} {label} are "
        f"left. Request fewer tokens (max_tokens), or have the limit raised."
    )


def build_not_priced_refusal(model: str) -> CallRefused:
    message = (
        f"The model {model} has no price, and this lease has a spending limit. An operator can add one: "
        f"manage.py rate add --model {model} --input USD --output USD (per million tokens)."
    )
    return CallRefused(402, "model_not_priced", message)


def format_amount(amount: Decimal) -> str:
    return f"{amount.normalize():f}"

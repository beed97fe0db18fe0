"""Limits on the cost and the tokens of model calls.

The app that derives costs registers the check of budgets and the sum of a lease's calls.

A call is admitted only if what is spent, the reservations of all calls in flight, and its own reservation fit into every
limit. The reservation is the call's estimated price and tokens. Those that it had replace them when the call ends
(sandboxes.egress.settlement)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from uuid import UUID

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
# Cost of a lease's ended calls and the reservations of its open ones, in USD.
LeaseSum = Callable[[UUID], Decimal]


def _no_budgets(call: CallReservation, now: datetime) -> Funds:
    return NO_LIMIT


def _no_costs(holder: UUID) -> Decimal:
    return Decimal(0)


_check_budgets: BudgetCheck = _no_budgets
_sum_lease: LeaseSum = _no_costs


def register(check_budgets: BudgetCheck, sum_lease: LeaseSum) -> None:
    """Set the check of budgets and the sum of a lease's calls."""
    global _check_budgets, _sum_lease
    _check_budgets, _sum_lease = check_budgets, sum_lease


def require_funds(call: CallReservation, limit: Decimal | None, *, now: datetime) -> Funds:
    """Check a call against the lease's spend limit and all budgets. Return what remains after its reservation.

    Raise CallRefused. Call it in the transaction that writes the call's row, with the sandbox's row locked. A call that is
    free of charge passes the limits in USD, and a call without tokens those in tokens."""
    is_limited = limit is not None and call.usd != 0
    remaining = [_check_spend_limit(call, limit)] if limit is not None and is_limited else []
    if call.usd == 0 and call.tokens == 0:
        return NO_LIMIT
    budgets = _check_budgets(call, now)
    remaining += [] if budgets.remaining_usd is None else [budgets.remaining_usd]
    return replace(budgets, has_limit=budgets.has_limit or is_limited, remaining_usd=min(remaining, default=None))


def _check_spend_limit(call: CallReservation, limit: Decimal) -> Decimal:
    """Return what remains of the limit. Raise CallRefused."""
    if call.usd is None:
        raise build_not_priced_refusal(call.model)
    spent = _sum_lease(call.holder)
    if spent >= limit or spent + call.usd > limit:
        amounts = {"limit_usd": format_amount(limit), "spent_usd": format_amount(spent), "call_usd": format_amount(call.usd)}
        raise CallRefused(402, "spend_limit_reached", _describe_spend_limit(call.usd, spent, limit), **amounts)
    return limit - spent - call.usd


def _describe_spend_limit(usd: Decimal, spent: Decimal, limit: Decimal) -> str:
    if spent >= limit:
        return f"This lease has reached its limit of {format_amount(limit)} USD for model calls."
    return (
        f"This call may cost {format_amount(usd)} USD, and {format_amount(limit - spent)} of the lease's limit of "
        f"{format_amount(limit)} USD are left. Request fewer tokens (max_tokens), or have the limit raised."
    )


def build_not_priced_refusal(model: str) -> CallRefused:
    message = (
        f"The model {model} has no price, and this lease has a spending limit. An operator can add one: "
        f"manage.py rate add --model {model} --input USD --output USD (per million tokens)."
    )
    return CallRefused(402, "model_not_priced", message)


def format_amount(usd: Decimal) -> str:
    return f"{usd.normalize():f}"

"""Limits on the cost of model calls. The app that derives costs registers the check of budgets and the sum of a lease's calls.

A call is admitted only if what is spent, the reservations of all calls in flight, and its own reservation fit into every
limit. The reservation is the call's estimated price, and becomes its cost when the call ends (sandboxes.egress.settlement)."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from uuid import UUID

from sandboxes.egress.refusals import CallRefused


@dataclass(frozen=True)
class CallReservation:
    """Call to be admitted: its holder and agent, the requested model, and its estimated price. None: the model has no rate."""

    holder: UUID
    agent_did: str
    model: str
    usd: Decimal | None


# Check of the budgets of a lease, in the admitting transaction. Return whether a budget in USD applies. Raise CallRefused.
BudgetCheck = Callable[[CallReservation, datetime], bool]
# Cost of a lease's ended calls and the reservations of its open ones, in USD.
LeaseSum = Callable[[UUID], Decimal]


def _no_budgets(call: CallReservation, now: datetime) -> bool:
    return False


def _no_costs(holder: UUID) -> Decimal:
    return Decimal(0)


_check_budgets: BudgetCheck = _no_budgets
_sum_lease: LeaseSum = _no_costs


def register(check_budgets: BudgetCheck, sum_lease: LeaseSum) -> None:
    """Set the check of budgets and the sum of a lease's calls."""
    global _check_budgets, _sum_lease
    _check_budgets, _sum_lease = check_budgets, sum_lease


def require_funds(call: CallReservation, limit: Decimal | None, *, now: datetime) -> bool:
    """Check a call against the lease's spend limit and all budgets. Return whether any limit in USD applies.

    Raise CallRefused. Call it in the transaction that writes the call's row, with the sandbox's row locked."""
    if call.usd == 0:
        return False  # free of charge
    if limit is not None:
        _check_spend_limit(call, limit)
    return _check_budgets(call, now) or limit is not None


def _check_spend_limit(call: CallReservation, limit: Decimal) -> None:
    if call.usd is None:
        raise build_not_priced_refusal(call.model)
    spent = _sum_lease(call.holder)
    if spent >= limit or spent + call.usd > limit:
        raise CallRefused(402, "spend_limit_reached", _describe_spend_limit(call.usd, spent, limit))


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

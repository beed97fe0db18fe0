"""Error for hard budgets without room, with the figures that an operator or an agent may read."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from billing.budgets.periods import get_limit, get_period_bounds, get_topped_up
from billing.dates import EPOCH
from billing.errors import BudgetExhausted
from billing.models import Budget
from billing.pricing import format_decimal


@dataclass(frozen=True)
class Shortage:
    """Amount that a budget has spent, and an explanation why the rest does not suffice, for a message."""

    spent: Decimal
    explanation: str = ""


def build_refusal(shortages: Mapping[Budget, Shortage], *, now: datetime) -> BudgetExhausted:
    """Build the error for budgets without room.

    The error names the strictest budget: the one that resets last; among those, the one with the largest fraction spent."""

    def strictness(budget: Budget) -> tuple[bool, datetime, Decimal]:
        ends = get_period_bounds(budget, now)[1]
        return ends is None, ends or EPOCH, shortages[budget].spent / get_limit(budget, now)

    budget = max(shortages, key=strictness)
    spent, ends, limit = shortages[budget].spent, get_period_bounds(budget, now)[1], get_limit(budget, now)
    topped_up = get_topped_up(budget, now)
    amounts = (
        f"{format_decimal(topped_up)} added, {format_decimal(spent)} spent" if topped_up else f"{format_decimal(spent)} spent"
    )
    if spent < limit and shortages[budget].explanation:
        amounts += f", {shortages[budget].explanation}"
    reset = f"Resets at {ends:%Y-%m-%d %H:%M} UTC." if ends else "It is a lifetime budget (no reset)."
    return BudgetExhausted(
        f"No room in the budget of {budget}: {amounts}. {reset}",
        scope=budget.scope,
        subject=budget.subject,
        detail_with_amount=f"No room in the budget of {budget}. {reset}",
        detail_without_figures=f"No room in a budget for {budget.subject_label}. {reset}",
        spent=format_decimal(spent),
        limit=format_decimal(limit),
        unit=budget.unit,
        resets_at=ends,
    )

"""Explanation of the possible overshoot of a budget."""

from datetime import datetime, timedelta
from decimal import Decimal

from billing import budgets
from billing.models import Budget
from billing.models.budgets import Unit
from sandboxes.admin.base.formatting import format_duration
from sandboxes.formatting import pluralize

READING_INTERVAL = timedelta(minutes=5)  # of the `read` sweep


def describe_overshoot(budget: Budget, count: int, now: datetime) -> list[str]:
    """Explain the bound on overspending derived in billing.budgets, with this budget's numbers, one sentence per paragraph."""
    if not budget.active:
        return ["The budget is inactive: nothing is refused and no lease is ended, so there is no bound."]
    if not budget.hard:
        return ["The budget only warns: nothing is refused and no lease is ended, so there is no bound."]
    if budget.counts_calls_alone:
        estimate = "tokens" if budget.unit == Unit.TOKENS else "price"
        return [
            f"Each model call reserves its estimated {estimate}: only the errors of the estimates of calls in progress add up."
        ]
    delay, open_ = budgets.get_stop_delay(budget), pluralize(count, "lease is", "leases are")
    sentences = [
        f"{open_} open. The time of running sandboxes is reserved for {format_duration(delay)} ahead, the grace period of "
        f"{format_duration(budget.grace)} included. A start or a running sandbox that would exceed the budget within this time "
        "is refused or stopped."
    ]
    sentences.append(
        f"The overshoot is the usage in the last {format_duration(2 * budgets.SWEEP_INTERVAL)} of leases that have ended, the "
        "time to store the state of each sandbox, one after another, and starts at the same instant."
    )
    if budget.unit == Unit.USD:
        sentences.append(
            "Model calls are reserved at their estimated price: the errors of the estimates of calls in progress add to the "
            f"overshoot. CPU and memory priced by measured use are read every {format_duration(READING_INTERVAL)}, so up to "
            "that much of their cost is added."
        )
    room = _count_lease_headroom(budget, now)
    if room > count:
        sentences.append(f"The remaining amount admits up to {room:,} open leases; the bound grows with each.")
    return sentences


def _count_lease_headroom(budget: Budget, now: datetime) -> int:
    """Count the leases that the remaining amount admits, given the minimum reserved for each."""
    minimum = budgets.get_minimum_reservation(budget.unit)
    left = max(budgets.get_limit(budget, now) - budgets.get_spent(budget, now), Decimal(0))
    return int(round(left / minimum, 6)) if minimum else 0  # one minute is not an exact decimal number of hours

"""Explanation of how far a budget may be overspent."""

from datetime import datetime, timedelta
from decimal import Decimal

from billing import budgets
from billing.admin.budget_usage import CENT
from billing.models import Budget
from billing.models.budgets import Unit
from sandboxes.admin.base.formatting import format_duration, format_usd
from sandboxes.formatting import pluralize

SWEEP_INTERVAL = timedelta(minutes=1)  # of the `meter` and `budgets` sweeps
READING_INTERVAL = timedelta(minutes=5)  # of the `read` sweep
MAX_DETECTION_DELAY = 3 * SWEEP_INTERVAL  # summing up usage, marking the budget, detecting the end of the grace period


def describe_overshoot(budget: Budget, count: int, now: datetime) -> list[str]:
    """Explain the bound on overspending derived in billing.budgets, with this budget's numbers, one sentence per paragraph."""
    if not budget.active:
        return ["The budget is inactive: nothing is refused and no lease is ended, so there is no bound."]
    if not budget.hard:
        return ["The budget only warns: nothing is refused and no lease is ended, so there is no bound."]
    delay, open_ = MAX_DETECTION_DELAY + budget.grace, pluralize(count, "lease is", "leases are")
    parts = (
        f"{format_duration(SWEEP_INTERVAL)} to sum up usage, "
        f"{format_duration(SWEEP_INTERVAL)} to mark the budget as exhausted, "
        f"{format_duration(budget.grace)} of grace period "
        f"and {format_duration(SWEEP_INTERVAL)} to detect the end of the grace period"
    )
    if budget.unit == Unit.HOURS:
        hours = format_usd((count * Decimal(delay // SWEEP_INTERVAL) / 60).quantize(CENT)) if count else "0"
        overshoot = f"at most {count:,} x {format_duration(delay)} = {hours} hours over"
    else:
        costs = pluralize(count, "sandbox costs", "sandboxes cost")
        overshoot = f"at most what {costs} in {format_duration(delay)}, and the model calls in that time"
    sentences = [f"{open_} open. After exhaustion they continue for at most {format_duration(delay)} ({parts}): {overshoot}."]
    sentences.append(
        "Storing the state of each sandbox, one after another, and model calls in progress add to this. Waiting sandboxes "
        "are evicted without a grace period."
    )
    if budget.unit == Unit.USD:
        sentences.append(
            f"CPU and memory priced by measured use are read every {format_duration(READING_INTERVAL)}, which adds up to "
            "that much of their cost."
        )
    room = _count_lease_headroom(budget, now)
    if room > count:
        sentences.append(f"The remaining amount admits up to {room:,} open leases; the bound grows with each.")
    return sentences


def _count_lease_headroom(budget: Budget, now: datetime) -> int:
    """Count the leases that the remaining amount admits, given the minimum reserved for each."""
    minimum = budgets.get_minimum_reservation(budget.unit)
    left = max(budget.amount - budgets.get_spent(budget, now), Decimal(0))
    return int(round(left / minimum, 6)) if minimum else 0  # one minute is not an exact decimal number of hours

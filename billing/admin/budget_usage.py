"""Level, amounts and forecast of a budget as text and HTML."""

from collections.abc import Iterable
from datetime import datetime
from decimal import ROUND_DOWN, Decimal

from django.utils.html import format_html
from django.utils.safestring import SafeString

from billing import budgets
from billing.forecast import FORECAST_WINDOW_DAYS, forecast_budget
from billing.models import Budget
from billing.models.budgets import Period, Unit
from sandboxes.admin.base.formatting import SummaryField, format_age, format_usd, render_badge, render_timestamp

PACE_NOTE = f"at the average of the last {FORECAST_WINDOW_DAYS} days"
CENT, SMALL_QUANTUM = Decimal("0.01"), Decimal("0.000001")
LEVEL_BADGES = {  # colour and word
    "exhausted": ("failed", "exhausted"), "warned": ("late", "warning"),
    "within": ("ok", "within"), "off": ("destroyed", "inactive"),
}  # fmt: skip


def get_level(budget: Budget, now: datetime) -> str:
    """Return "within", "warned", "exhausted" or "off" for the present period."""
    began = budgets.get_period_bounds(budget, now)[0]
    if not budget.active:
        return "off"
    if budget.exhausted_for == began:
        return "exhausted"
    return "warned" if budget.warned_for == began else "within"


def render_budget_state(budget: Budget, now: datetime) -> SafeString:
    return render_badge(*LEVEL_BADGES[get_level(budget, now)])


def format_amount(amount: Decimal, budget: Budget) -> str:
    """Format a spent amount, rounded down so that it never looks exhausted too early. Small budgets get six decimals."""
    if budget.unit == Unit.TOKENS:
        return f"{int(amount):,}"
    return format_usd(amount.quantize(CENT if budget.amount >= CENT * 10 else SMALL_QUANTUM, ROUND_DOWN)) if amount else "0"


def format_limit(amount: Decimal, budget: Budget) -> str:
    """Format an amount that an operator set, or a share of one."""
    return f"{amount:,.0f}" if budget.unit == Unit.TOKENS else format_usd(amount)


def describe_exhaustion(budget: Budget) -> str:
    """Return the consequence of an exhausted budget."""
    if not budget.hard:
        return "warning only"
    return "model calls are refused" if budget.counts_calls_alone else "new leases are refused and active ones end"


def format_usage(budget: Budget, now: datetime) -> str:
    limit = format_limit(budgets.get_limit(budget, now), budget)
    return f"{format_amount(budgets.get_spent(budget, now), budget)} of {limit} {budget.unit_label}"


def compute_percent_spent(budget: Budget, now: datetime) -> int:
    return int(100 * budgets.get_spent(budget, now) / budgets.get_limit(budget, now))


def format_percents(percents: Iterable[int]) -> str:
    """Format warnings: "50, 80, 100 %"."""
    return f"{', '.join(map(str, percents))} %"


def render_gauge(budget: Budget, now: datetime) -> SafeString:
    """Render the spent share as a bar with a mark at the lowest warning. The caller shows the numbers beside it."""
    share = min(budgets.get_spent(budget, now) / budgets.get_limit(budget, now), Decimal(1))
    return format_html(
        '<span class="lh-gauge" style="--warn: {}%"><meter class="lh-meter is-{}" min="0" max="1" value="{}"></meter></span>',
        min(budget.warn_percents, default=100),
        get_level(budget, now),
        f"{share:.4f}",
    )


def render_reset_time(budget: Budget, now: datetime) -> SafeString | str:
    ends = budgets.get_period_bounds(budget, now)[1]
    return render_timestamp(ends, f"resets in {format_age(ends - now)}") if ends else "no reset"


def build_forecast_fields(budget: Budget, now: datetime) -> list[SummaryField]:
    """Build the day on which the budget runs out at the present pace, and the spending expected at the end of the period."""
    if not budget.active:
        return [SummaryField("Runs out", "–", note="the budget is inactive")]
    day, pace, at_end = forecast_budget(budget, now)
    if budgets.is_exhausted(budget, now):
        return [SummaryField("Ran out", f"on {day}", note="day of detection")]
    if budget.period == Period.HOUR:
        note, value = "at the rate of this hour", "in this hour" if day else "not in this period"
    elif pace is None and day is None:
        return [SummaryField("Runs out", "no forecast yet", note="needs one full day of usage")]
    else:
        not_soon = "not expected" if budget.period == Period.EVER else "not in this period"
        note, value = PACE_NOTE, f"on {day}" if day else not_soon
    fields = [SummaryField("Runs out", value, note=note)]
    if at_end is not None:
        amount = f"{format_amount(at_end, budget)} {budget.unit_label}"
        fields.append(SummaryField("Expected", f"{amount} at the end of the period", note=note))
    return fields

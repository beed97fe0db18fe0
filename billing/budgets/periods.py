"""Budget periods: their bounds, their division into UTC days, and a budget's state in the current one.

A day, week or month begins at midnight in the budget's time zone. Usage and costs have UTC days, and within a day full UTC
hours (billing.hourly). A bound is therefore a full UTC hour: in a zone whose offset is not a whole number of hours, the one in
which local midnight falls."""

from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from decimal import Decimal
from typing import NamedTuple
from zoneinfo import ZoneInfo

from django.db.models import Q

from billing.dates import EPOCH, start_of_day, start_of_hour, start_of_next_month, to_utc_date
from billing.models import Budget
from billing.models.budgets import UTC_ZONE_NAME, Period
from billing.uncertainty import Uncertainty

DAY = timedelta(days=1)
Bounds = tuple[datetime, datetime | None]


class PeriodParts(NamedTuple):
    """Division of a period: full UTC days from `first_day` to before `until`, and the parts of UTC days at its edges.

    Each edge is within one UTC day. An hour is one edge without days. `until` is None for a lifetime."""

    first_day: date
    until: date | None
    edges: list[tuple[datetime, datetime]]

    @property
    def has_days(self) -> bool:
        return self.until is None or self.first_day < self.until

    @property
    def day_filter(self) -> Q:
        return Q(day__gte=self.first_day) & (Q(day__lt=self.until) if self.until else Q())


def get_period_bounds(budget: Budget, now: datetime) -> Bounds:
    """Return the start of a budget's current period and of the next one."""
    return compute_period_bounds(budget.period, now, budget.time_zone)


def compute_period_bounds(period: str, now: datetime, time_zone: str = UTC_ZONE_NAME) -> Bounds:
    """Return the start of the current period and of the next one. A lifetime starts at EPOCH and has no next period."""
    if period == Period.EVER:
        return EPOCH, None
    if period == Period.HOUR:
        began = start_of_hour(now)
        return began, began + timedelta(hours=1)
    zone: tzinfo = UTC if time_zone == UTC_ZONE_NAME else ZoneInfo(time_zone)
    first = _find_first_day(period, now.astimezone(zone).date())
    following = _find_next_first_day(period, first)
    # The hour in which local midnight falls belongs to the next period, also before midnight. In some zones a day was skipped.
    while now >= _find_midnight(following, zone):
        first, following = following, _find_next_first_day(period, following)
    return _find_midnight(first, zone), _find_midnight(following, zone)


def _find_first_day(period: str, day: date) -> date:
    if period == Period.WEEK:
        return day - timedelta(days=day.weekday())
    return day.replace(day=1) if period == Period.MONTH else day


def _find_next_first_day(period: str, first: date) -> date:
    return start_of_next_month(first) if period == Period.MONTH else first + (7 * DAY if period == Period.WEEK else DAY)


def _find_midnight(day: date, zone: tzinfo) -> datetime:
    """Return the full UTC hour in which a local day begins. A midnight that a clock change skips is the time of the change."""
    return start_of_hour(datetime.combine(day, time(), zone))


def split_period(began: datetime, ends: datetime | None) -> PeriodParts:
    """Divide a period into full UTC days, whose sums are stored, and the edges, which are summed by hour."""
    edges = []
    first_day, until = to_utc_date(began), to_utc_date(ends) if ends else None
    if began != start_of_day(first_day):
        first_day += DAY
        edges.append((began, min(start_of_day(first_day), ends or start_of_day(first_day))))
    if ends and until and start_of_day(until) != ends and start_of_day(until) >= began:
        edges.append((start_of_day(until), ends))
    return PeriodParts(first_day, until, edges)


def get_limit(budget: Budget, now: datetime) -> Decimal:
    """Return the amount of the current period: that of the budget, and the top-ups of the period."""
    return budget.amount + get_topped_up(budget, now)


def get_topped_up(budget: Budget, now: datetime) -> Decimal:
    """Return the sum of the top-ups of the current period."""
    is_current = budget.topped_up_for is not None and budget.topped_up_for == get_period_bounds(budget, now)[0]
    return budget.topped_up if is_current else Decimal(0)


def get_spent(budget: Budget, now: datetime) -> Decimal:
    """Return the recorded spending in the current period; 0 until a new period's first update."""
    return budget.spent if budget.period_began == get_period_bounds(budget, now)[0] else Decimal(0)


def get_uncertainty(budget: Budget, now: datetime) -> Uncertainty:
    """Return the uncertainty of `get_spent`."""
    is_current = budget.period_began == get_period_bounds(budget, now)[0]
    return Uncertainty(budget.unpriced, budget.estimated_usd, budget.estimated_tokens) if is_current else Uncertainty()


def build_marked_filter(mark: str, now: datetime) -> Q:
    """Match active budgets marked in their current period. `mark` is `warned_for` or `exhausted_for`. One query."""
    in_current_period = Q(pk__in=[])
    for period, time_zone in _iter_calendars():
        began = compute_period_bounds(period, now, time_zone)[0]
        in_current_period |= Q(period=period, time_zone=time_zone, **{mark: began})
    return in_current_period & Q(active=True)


def _iter_calendars() -> Iterator[tuple[str, str]]:
    yield from Budget.objects.filter(active=True).order_by().values_list("period", "time_zone").distinct()


def get_grace_deadline(budget: Budget) -> datetime:
    """Return the end of an exhausted budget's grace period, until which running work may continue."""
    assert budget.exhausted_at
    return budget.exhausted_at + budget.grace

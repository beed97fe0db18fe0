"""Reservation of a hard budget: the price of its sandboxes until they can be stopped. Derived when needed.

The spending is known up to the last metering. A sandbox goes on until the next pass of the sweep `budgets`, then for the grace
period, and until the pass that ends its lease. A budget is exhausted as soon as its spending and this time do not fit into its
amount. CPU and memory priced by use are reserved at the limits of the sandbox, and monthly allowances are not applied. Model
calls are reserved one by one (billing.budgets.call_admission), with the reservation of the last update in view."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from uuid import UUID

from django.db.models import Count, Q

from billing import pricing
from billing.budgets.periods import get_limit, get_period_bounds, get_spent
from billing.budgets.scopes import find_open_tabs
from billing.dates import EPOCH
from billing.instance_types import SandboxSize
from billing.intervals import MICROSECOND
from billing.models import Budget, Rate, Watermark
from billing.models.budgets import Period, Unit
from billing.totals import BILLABLE_STATES
from sandboxes.models import GONE_STATES, Sandbox, SandboxState

SWEEP_INTERVAL = timedelta(minutes=1)  # of the sweeps `meter` and `budgets`
HOUR = timedelta(hours=1)
RESERVING_STATES = (SandboxState.WARMING, *BILLABLE_STATES)


@dataclass(frozen=True)
class Applicant:
    """Lease whose sandbox is about to be started or woken, and the size of a new sandbox."""

    holder: UUID
    size: SandboxSize | None = None


@dataclass(frozen=True)
class ReservationBasis:
    """Rates, and the times up to which usage and costs are derived. Shared by the reservations of several budgets."""

    rates: list[Rate]
    marks: dict[str, datetime]

    @classmethod
    def load(cls) -> "ReservationBasis":
        marks = Watermark.objects.filter(name__in=("time", "costs"), at__gt=EPOCH)  # a lock before the first pass leaves EPOCH
        return cls([*Rate.objects.all()], dict(marks.values_list("name", "at")))


def get_stop_delay(budget: Budget) -> timedelta:
    """Return the longest time from now until a sandbox in scope is stopped, if the budget is exhausted in the next pass."""
    return SWEEP_INTERVAL + (budget.grace + SWEEP_INTERVAL if budget.grace else timedelta(0))


def compute_reservation(
    budget: Budget, *, now: datetime, applicant: Applicant | None = None, basis: ReservationBasis | None = None
) -> Decimal:
    """Return the amount reserved for the running sandboxes in a budget's scope, in its unit.

    0 for a soft budget, and for one that counts model calls alone. The sandbox of the applicant counts as if it were running.
    Takes one query for any number of sandboxes, one more for an applicant, and the two of the basis if it is not given."""
    if not budget.hard or not budget.active or budget.counts_calls_alone:
        return Decimal(0)
    sizes = _count_sandboxes(budget, now=now, applicant=applicant)
    if not sizes:
        return Decimal(0)
    basis = basis or ReservationBasis.load()
    began, ends = get_period_bounds(budget, now)
    until = min(now + get_stop_delay(budget), ends or now + get_stop_delay(budget))
    duration = until - max(_find_summed_until(budget, basis, now=now), began)
    hours = Fraction(duration // MICROSECOND, HOUR // MICROSECOND)
    if budget.unit == Unit.HOURS:
        return pricing.round_half_up(hours * sum(sizes.values()))
    price = sum((number * price_hour(size, basis.rates, now) for size, number in sizes.items()), Fraction(0))
    return pricing.round_half_up(hours * price)


def is_over(budget: Budget, spent: Decimal, reserved: Decimal, *, now: datetime) -> bool:
    """Return whether the amount is spent, or would be exceeded before the sandboxes in scope are stopped."""
    limit = get_limit(budget, now)
    return spent >= limit or spent + reserved > limit


def is_exhausted(budget: Budget, now: datetime, applicant: Applicant | None = None) -> bool:
    """Return whether an update marked the budget as exhausted in its current period, and the budget still has no room."""
    if budget.exhausted_for != get_period_bounds(budget, now)[0]:
        return False
    spent = get_spent(budget, now)
    if spent >= get_limit(budget, now):
        return True
    return is_over(budget, spent, compute_reservation(budget, now=now, applicant=applicant), now=now)


def _count_sandboxes(budget: Budget, *, now: datetime, applicant: Applicant | None) -> dict[SandboxSize, int]:
    """Count the sandboxes of active leases in scope that spend, or may spend soon, by size."""
    held = Sandbox.objects.filter(holder__in=find_open_tabs(budget, now=now).values("holder"))
    condition = Q(state__in=RESERVING_STATES)
    if applicant:
        condition |= Q(holder=applicant.holder) & ~Q(state__in=GONE_STATES)
    columns = ("provider", "memory_mib", "millicpus", "disk_mib", "gpus", "gpu_type")
    rows = held.filter(condition).order_by().values_list(*columns).annotate(number=Count("pk"))
    sizes = {SandboxSize(*size): number for *size, number in rows}
    if applicant and applicant.size and not held.filter(holder=applicant.holder).exclude(state__in=GONE_STATES).exists():
        sizes[applicant.size] = sizes.get(applicant.size, 0) + 1
    return sizes


def _find_summed_until(budget: Budget, basis: ReservationBasis, *, now: datetime) -> datetime:
    """Return the time up to which the usage of running sandboxes is part of the recorded spending."""
    names = ["time", "costs"] if budget.unit == Unit.USD and budget.period != Period.HOUR else ["time"]
    metered = min((basis.marks.get(name, now) for name in names), default=now)
    # Usage that was metered after the last sum is not part of the spending either.
    summed = now if budget.spent_at is None or budget.spent_at >= now else budget.spent_at - SWEEP_INTERVAL
    return min(metered, summed, now)


def price_hour(size: SandboxSize, rates: list[Rate], at: datetime) -> Fraction:
    """Return the USD of one hour of a sandbox at its limits."""
    quantities = size.compute_quantities(pricing.MICROSECONDS_PER_HOUR)
    item_rates = {item: pricing.find_rate(rates, size.provider, size.get_rate_type(item), item, at) for item in quantities}
    costs = (pricing.compute_cost(item, quantities[item], rate.usd) for item, rate in item_rates.items() if rate)
    return sum(costs, Fraction(0))

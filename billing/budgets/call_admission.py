"""Admission of model calls: what a lease or a budget has spent at this moment, with the calls that no sweep has metered yet.

The sum is exact at each admission: usage records of metered calls, and the calls that are not metered, in one statement. An
open call counts with its reservation. A call that was metered and whose cost changed later counts with the difference."""

from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from fractions import Fraction
from uuid import UUID

from django.db.models import DecimalField, IntegerField, Q, QuerySet, Value
from django.db.models.functions import Coalesce, TruncDate

from billing.budgets.disclosure import Disclosure, get_disclosure, restrict_refusal
from billing.budgets.model_patterns import is_model_match
from billing.budgets.periods import PeriodParts, get_limit, get_period_bounds, split_period
from billing.budgets.refusal import Shortage, build_refusal
from billing.budgets.scopes import build_call_filters, build_tab_filter
from billing.dates import start_of_day
from billing.errors import BudgetExhausted
from billing.hourly import sum_hourly_call_usd
from billing.models import Budget, Tab, UsageKind, UsageRecord
from billing.models.budgets import Unit
from billing.money_sums import nanos_to_decimal, sum_exact
from billing.pricing import round_half_up
from sandboxes.db import sql
from sandboxes.db.clock import format_optional_timestamp
from sandboxes.egress.amounts import MAX_USD
from sandboxes.egress.refusals import CallRefused
from sandboxes.egress.spending import NO_LIMIT, CallReservation, Funds, build_not_priced_refusal, format_amount
from sandboxes.models import LlmCall

ANY_HARD_USD_SQL = "active AND hard AND unit = 'usd'"
ZERO = Value(Decimal(0), output_field=DecimalField(max_digits=18, decimal_places=9))


def sum_lease_calls(holder: UUID) -> Decimal:
    """Return the cost of a lease's model calls: ended calls at their price, open ones at their reservation. In USD."""
    return _sum_calls(Q(holder=holder), Q(), Q())


def sum_calls_before(budget: Budget, began: datetime, ends: datetime | None, *, day: date) -> Decimal:
    """Return the cost of a budget's model calls from the period's start to the day before `day`, in USD.

    Kept with the budget, so that an admission sums one day. Full days count their metered calls, a part of a day all calls. 0
    for an hour, which is in one day."""
    if budget.unit != Unit.USD:
        return Decimal(0)
    parts, owners = split_period(began, ends), build_call_filters(budget, began)
    earlier = parts.day_filter & Q(day__lt=day)
    metered = (_sum_metered(owned & earlier) for owned in owners) if parts.first_day < day else ()
    edges = (_sum_edge(edge, owners) for edge in parts.edges if edge[0].date() < day)
    return sum((*metered, *edges), Decimal(0))


def check_call(call: CallReservation, now: datetime) -> Funds:
    """Check a model call against the hard USD budgets of its lease. Return what remains of them. Raise CallRefused.

    The budgets are locked until the transaction ends, so that concurrent calls count each other's reservation. Without a hard
    USD budget the check is one lookup."""
    if sql.find_first(Budget, ANY_HARD_USD_SQL) is None:
        return NO_LIMIT
    tab = sql.find_first(Tab, "holder = %s", call.holder)
    if tab is None:
        return NO_LIMIT
    hard = Budget.objects.filter(build_tab_filter(tab, now=now), active=True, hard=True, unit=Unit.USD)
    locked = hard.select_for_update(no_key=True, of=("self",)).order_by("pk")
    hard_budgets = [budget for budget in locked if is_model_match(budget.model, call.model)]
    if not hard_budgets:
        return NO_LIMIT
    if call.usd is None:
        raise build_not_priced_refusal(call.model)
    spent = {budget: sum_spent_now(budget, now=now) for budget in hard_budgets}
    limits = {budget: get_limit(budget, now) for budget in hard_budgets}
    shortages = {
        budget: Shortage(spent[budget], f"and this call may cost {format_amount(call.usd)}")
        for budget in hard_budgets
        if spent[budget] >= limits[budget] or spent[budget] + budget.reserved + call.usd > limits[budget]
    }
    if shortages:
        raise _to_call_refusal(build_refusal(shortages, now=now), call.agent_did)
    known = [
        limits[budget] - spent[budget] - budget.reserved - call.usd
        for budget in hard_budgets
        if _get_disclosure(budget.scope, budget.subject, call.agent_did) == Disclosure.SPENDING
    ]
    return Funds(has_limit=True, remaining=min(known, default=None))


def _get_disclosure(scope: str, subject: str, agent_did: str) -> Disclosure:
    return get_disclosure(scope, subject, operator=False, dids=[agent_did], key_id="")


def _to_call_refusal(error: BudgetExhausted, agent_did: str) -> CallRefused:
    restricted = restrict_refusal(error, operator=False, dids=[agent_did], key_id="")
    resets_at = format_optional_timestamp(restricted.extra["resets_at"])
    return CallRefused(402, "budget_exhausted", str(restricted), **restricted.extra | {"resets_at": resets_at})


def sum_spent_now(budget: Budget, *, now: datetime) -> Decimal:
    """Return the USD that a budget has spent at this moment: sandboxes as of its last update, and all model calls."""
    began, ends = get_period_bounds(budget, now)
    is_current = budget.period_began == began
    others = budget.spent - budget.calls_spent if is_current else Decimal(0)
    parts, owners = split_period(began, ends), build_call_filters(budget, began)
    since = budget.calls_day if is_current and budget.calls_day else began.date()
    before = budget.calls_before if is_current else Decimal(0)
    edges = (_sum_edge(edge, owners) for edge in parts.edges if edge[0].date() >= since)
    return others + before + sum(edges, Decimal(0)) + _sum_days(parts, owners, since)


def _sum_days(parts: PeriodParts, owners: Sequence[Q], since: date) -> Decimal:
    """Sum the calls of full days: the metered ones from the day `since` on, and all that are not metered."""
    if not parts.has_days:
        return Decimal(0)
    days = parts.day_filter & Q(day__gte=since)
    period = Q(started_at__gte=start_of_day(parts.first_day))
    period &= Q(started_at__lt=start_of_day(parts.until)) if parts.until else Q()
    return sum((_sum_calls(owned, days, period) for owned in owners), Decimal(0))


def _sum_edge(edge: tuple[datetime, datetime], owners: Sequence[Q]) -> Decimal:
    """Sum the calls of a part of a day."""
    return round_half_up(sum(sum_hourly_call_usd(*edge, owners).values(), Fraction(0)))


def _sum_metered(condition: Q) -> Decimal:
    rows = UsageRecord.objects.filter(condition, item=UsageKind.TOKENS)
    return nanos_to_decimal(rows.aggregate(nano=sum_exact("usd"))["nano"])


def _sum_calls(owned: Q, days: Q, period: Q) -> Decimal:
    """Sum metered and unmetered calls that match `owned`. `days` selects usage records, and `period` calls.

    One statement, because a metering pass that commits between two would be counted in neither or in both."""
    metered = UsageRecord.objects.filter(owned, days, item=UsageKind.TOKENS)
    unmetered = (
        LlmCall.objects.annotate(day=TruncDate("started_at", tzinfo=UTC))
        .filter(owned, period, kind=LlmCall.Kind.LLM, counted=False)
        .exclude(outcome=LlmCall.Outcome.REFUSED)
        .annotate(owed=Coalesce("cost", "reserved", ZERO) - Coalesce("metered_cost", ZERO))
        .filter(owed__lt=MAX_USD)
    )
    sums = _total(metered, "usd").union(_total(unmetered, "owed"), all=True)
    return nanos_to_decimal(sum(nano for (nano,) in sums))


def _total(rows: "QuerySet[UsageRecord] | QuerySet[LlmCall]", field: str) -> "QuerySet[UsageRecord, tuple[int]]":
    """Build a query of one row with the exact sum of a column, as part of a UNION."""
    grouped = rows.order_by().annotate(group=Value(0, output_field=IntegerField())).values("group")
    return grouped.annotate(nano=sum_exact(field)).values_list("nano")  # type: ignore[return-value]

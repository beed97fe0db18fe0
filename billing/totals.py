"""Totals of costs and sandbox time, grouped by agent, lease, environment, provider, day, account or item."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from typing import Any

from django.db.models import DurationField, ExpressionWrapper, F, OuterRef, Q, QuerySet, Subquery, Sum, Value
from django.db.models.functions import Coalesce
from django.db.models.lookups import Exact

from billing import membership
from billing.dates import EPOCH_DATE, start_of_next_month
from billing.intervals import MICROSECOND
from billing.models import HOUSE_ACCOUNT_NAME, Account, CostRecord, Membership, PeriodTotal, UsageKind, UsageRecord
from billing.money_sums import nanos_to_decimal, sum_exact
from sandboxes.models import AWAKE_STATES

# Sandbox time is charged while ready for use, not while warming, evicting, cold or destroying. Suspended time is charged by an
# item of its own (billing.costs).
BILLABLE_STATES = AWAKE_STATES
TOTAL_DURATION = Sum(ExpressionWrapper(F("ended_at") - F("began_at"), DurationField()))
SUMMED_AMOUNTS = ("quantity", "free", "usd", "unpriced", "estimated_usd")
GROUP_BY_COLUMNS = {
    "agent": "agent_did", "lease": "holder", "environment": "environment_id", "provider": "provider", "day": "day",
    "account": "account__name", "item": "item",
}  # fmt: skip


@dataclass(frozen=True)
class CostTotal:
    """Usage and costs of one group: quantities and free quantities by item, in units of the item, and USD.

    `estimated_usd` is the estimated part of `usd`, which does not include the model calls without a price (`unpriced`).
    `sandbox_time` is the billable sandbox time. It is None in totals by item or of one item."""

    key: str
    quantities: dict[str, Decimal]
    free: dict[str, Decimal]
    usd: Decimal
    unpriced: int
    estimated_usd: Decimal
    sandbox_time: timedelta | None


def sum_costs(
    by: str, *, since: date | None = None, until: date | None = None, agents: Collection[str] | None = None, **filters: Any
) -> list[CostTotal]:
    """Sum costs from day `since` up to but not including `until`, most expensive group first; by day in date order.

    `by` and the names in `filters` are keys of GROUP_BY_COLUMNS. `agents` limits the sum to those DIDs. Reads the totals by
    day and month, except by lease and environment, which have few records each."""
    without_time = by == "item" or "item" in filters
    periods = _find_period_totals([by], since, until, agents, filters)
    if periods is None:
        sandbox_time = None if without_time else sum_sandbox_time(by, since=since, until=until, agents=agents, **filters)
        return _build_totals(by, _sum_records(by, since, until, agents, filters), sandbox_time)
    amounts = map(Sum, (*SUMMED_AMOUNTS, "micros"))
    sums = [*periods.values_list(GROUP_BY_COLUMNS[by], "item").annotate(*amounts)]
    durations: dict[str, timedelta] = defaultdict(timedelta)
    for key, item, *_, micros in sums:
        if not item:
            durations[_format_key(key)] += int(micros) * MICROSECOND
    return _build_totals(by, [row[:-1] for row in sums if row[1]], None if without_time else durations)


def _sum_records(
    by: str, since: date | None, until: date | None, agents: Collection[str] | None, filters: Mapping[str, Any]
) -> QuerySet[CostRecord, tuple[Any, ...]]:
    """Sum cost records as rows of (group, item, and SUMMED_AMOUNTS in the units of PeriodTotal)."""
    rows = CostRecord.objects.filter(_build_range_filter(since, until, agents), **_get_columns(filters))
    sums = rows.order_by().values_list(GROUP_BY_COLUMNS[by], "item")
    return sums.annotate(
        a=sum_exact("quantity"), b=sum_exact("free"), c=sum_exact("usd"), d=Sum("unpriced"), e=sum_exact("estimated_usd")
    )


def _find_period_totals(
    groups: Collection[str], since: date | None, until: date | None, agents: Collection[str] | None, filters: Mapping[str, Any]
) -> QuerySet[PeriodTotal] | None:
    """Find the totals that make up a range of days, or None if there are none with these groups and filters.

    Full months of agents are single totals, and the other days of the range are totals of days."""
    names = {*groups, *filters}
    if not names.isdisjoint(("lease", "environment")) or not PeriodTotal.are_valid():
        return None
    in_range, period = _build_range_filter(since, until, agents), PeriodTotal.Period
    if "agent" not in names and agents is None:
        periods = Q(period=period.DAY)
    elif "day" in names:
        periods = Q(period=period.AGENT_DAY)
    else:
        begin = start_of_next_month(since) if since and since.day > 1 else since
        end = until.replace(day=1) if until else None
        months = _build_range_filter(begin, end, None)
        is_edge = Q(day__lt=begin) if begin else Q(pk__in=[])
        is_edge |= Q(day__gte=end) if end else Q(pk__in=[])
        if begin and end and begin >= end:
            months, is_edge = Q(pk__in=[]), Q()
        periods = Q(months, period=period.AGENT_MONTH) | Q(is_edge, period=period.AGENT_DAY)
    return PeriodTotal.objects.filter(in_range, periods, **_get_columns(filters)).order_by()


def _build_totals(by: str, sums: Iterable[tuple[Any, ...]], sandbox_time: Mapping[str, timedelta] | None) -> list[CostTotal]:
    quantities: dict[str, dict[str, Decimal]] = defaultdict(dict)
    free: dict[str, dict[str, Decimal]] = defaultdict(dict)
    usd: Counter[str] = Counter()
    unpriced: Counter[str] = Counter()
    estimated: Counter[str] = Counter()
    for key, item, quantity, free_quantity, nano, unpriced_calls, estimated_nano in sums:
        name = _format_key(key)
        quantities[name][item] = nanos_to_decimal(int(quantity))
        if free_quantity:
            free[name][item] = nanos_to_decimal(int(free_quantity))
        usd[name] += int(nano)
        unpriced[name] += int(unpriced_calls)
        estimated[name] += int(estimated_nano)
    names = sorted({*quantities, *(sandbox_time or {})}, key=lambda name: (0 if by == "day" else -usd[name], name))
    return [
        CostTotal(
            name,
            quantities.get(name, {}),
            free.get(name, {}),
            nanos_to_decimal(usd[name]),
            unpriced[name],
            nanos_to_decimal(estimated[name]),
            None if sandbox_time is None else sandbox_time.get(name, timedelta(0)),
        )
        for name in names
    ]


def sum_usd_by_day(
    *, since: date, until: date, agents: Collection[str] | None = None, **filters: Any
) -> dict[date, dict[str, Decimal]]:
    """Sum costs in USD by day and item. The parameters are those of `sum_costs`."""
    days: dict[date, dict[str, Decimal]] = defaultdict(dict)
    for day, item, nano in sum_usd("day", "item", since=since, until=until, agents=agents, **filters):
        days[day][item] = nanos_to_decimal(nano)
    return dict(days)


def sum_usd(*groups: str, **selection: Any) -> list[tuple[Any, ...]]:
    """Sum costs by several groups, as rows of (group, ..., billionths of USD). The parameters are those of `sum_amounts`."""
    return [row[:-2] for row in sum_amounts(*groups, **selection)]


def sum_amounts(
    *groups: str, since: date | None, until: date | None, agents: Collection[str] | None = None, **filters: Any
) -> list[tuple[Any, ...]]:
    """Sum costs by several groups. The parameters are those of `sum_costs`.

    Return rows of (group, ..., billionths of USD, number of calls without a price, billionths of estimated USD)."""
    columns = [GROUP_BY_COLUMNS[name] for name in groups]
    periods = _find_period_totals(groups, since, until, agents, filters)
    if periods is not None:
        sums: Any = periods.exclude(item="").values_list(*columns).annotate(*map(Sum, SUMMED_AMOUNTS[2:]))
    else:
        rows = CostRecord.objects.filter(_build_range_filter(since, until, agents), **_get_columns(filters)).order_by()
        sums = rows.values_list(*columns).annotate(a=sum_exact("usd"), b=Sum("unpriced"), c=sum_exact("estimated_usd"))
    return [(*row[:-3], *map(int, row[-3:])) for row in sums]


def find_first_day_of_time(*, since: date, until: date, agents: Collection[str] | None = None, **filters: Any) -> date | None:
    """Return the first day with billable sandbox time. The parameters are those of `sum_sandbox_time`. Reads no sums."""
    found = (build_time_filter(since, until, agents, filters).filter(part) for part in _build_account_parts(since, filters))
    days = [day for rows in found for day in rows.order_by("day").values_list("day", flat=True)[:1]]
    return min(days, default=None)


def sum_sandbox_time(
    by: str, *, since: date | None = None, until: date | None = None, agents: Collection[str] | None = None, **filters: Any
) -> dict[str, timedelta]:
    """Sum billable sandbox time by group. The parameters are those of `sum_costs`, except that there is no item."""
    rows = build_time_filter(since, until, agents, filters)
    if by == "account":
        account = filters.get("account")
        return {name: duration for name, duration in _sum_time_by_account(rows, since).items() if account in (None, name)}
    total: dict[str, timedelta] = defaultdict(timedelta)
    for part in _build_account_parts(since, filters):
        for key, duration in rows.filter(part).values_list(GROUP_BY_COLUMNS[by]).annotate(duration=TOTAL_DURATION):
            total[_format_key(key)] += duration
    return dict(total)


def build_time_filter(
    since: date | None, until: date | None, agents: Collection[str] | None, filters: Mapping[str, Any]
) -> QuerySet[UsageRecord]:
    """Find the records of billable sandbox time, of every account."""
    columns = _get_columns({name: value for name, value in filters.items() if name != "account"})
    rows = UsageRecord.objects.filter(
        _build_range_filter(since, until, agents), item=UsageKind.TIME, state__in=BILLABLE_STATES, **columns
    )
    return rows.order_by()


def build_account_lookup() -> Callable[[str, date], int]:
    """Return a function (agent, day) -> account id."""
    house = Account.objects.get_or_create(name=HOUSE_ACCOUNT_NAME)[0].pk
    histories: dict[str, list[tuple[date, int]]] = defaultdict(list)
    for agent, since, account in Membership.objects.order_by("since").values_list("agent_did", "since", "account"):
        histories[agent].append((since, account))
    return lambda agent, day: membership.find_account_on(histories.get(agent, ()), day, house)


def _build_account_parts(since: date | None, filters: Mapping[str, Any]) -> list[Q]:
    """Build disjoint filters of the usage of the account in `filters`, or of all usage."""
    account = filters.get("account")
    return [Q()] if account is None else build_account_filters(account, since)


def _sum_time_by_account(rows: QuerySet[UsageRecord], since: date | None) -> dict[str, timedelta]:
    total: dict[str, timedelta] = defaultdict(timedelta)
    accounts = dict(Membership.objects.on(since or EPOCH_DATE).values_list("agent_did", "account__name"))
    moved = _build_moved_filter(since)
    for agent, duration in rows.exclude(moved).values_list("agent_did").annotate(duration=TOTAL_DURATION):
        total[accounts.get(agent, HOUSE_ACCOUNT_NAME)] += duration
    for account, duration in rows.filter(moved).values_list(_build_account_on_day()).annotate(duration=TOTAL_DURATION):
        total[account] += duration
    return total


def build_account_filters(account: str, since: date | None) -> list[Q]:
    """Build filters of the usage records that belong to an account, as two disjoint parts.

    The first part has the agents whose account does not change after `since`, and is cheap. The second has the agents that
    move, and looks up the account of each record's day."""
    members, candidates = Membership.objects.on(since or EPOCH_DATE), Q()
    if account == HOUSE_ACCOUNT_NAME:
        unmoved = ~Q(agent_did__in=members.exclude(account__name=HOUSE_ACCOUNT_NAME).values("agent_did"))
    else:
        unmoved = Q(agent_did__in=members.filter(account__name=account).values("agent_did"))
        candidates = Q(agent_did__in=Membership.objects.filter(account__name=account).values("agent_did"))
    moved = _build_moved_filter(since)
    return [~moved & unmoved, moved & candidates & Q(Exact(_build_account_on_day(), account))]


def _build_moved_filter(since: date | None) -> Q:
    """Match the usage of agents with a membership that begins after `since`."""
    return Q(agent_did__in=Membership.objects.filter(since__gt=since or EPOCH_DATE).values("agent_did"))


def _build_account_on_day() -> Coalesce:
    begun = Membership.objects.filter(agent_did=OuterRef("agent_did"), since__lte=OuterRef("day")).order_by("-since")
    return Coalesce(Subquery(begun.values("account__name")[:1]), Value(HOUSE_ACCOUNT_NAME))


def _build_range_filter(since: date | None, until: date | None, agents: Collection[str] | None) -> Q:
    condition = Q() if agents is None else Q(agent_did__in=[*agents])
    if since:
        condition &= Q(day__gte=since)
    if until:
        condition &= Q(day__lt=until)
    return condition


def _get_columns(filters: Mapping[str, Any]) -> dict[str, Any]:
    return {GROUP_BY_COLUMNS[name]: value for name, value in filters.items()}


def _format_key(key: object) -> str:
    return "" if key is None else str(key)

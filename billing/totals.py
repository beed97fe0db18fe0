"""Totals of costs and sandbox time, grouped by any attribute of billing.grouping."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from typing import Any

from django.db.models import (
    BigIntegerField,
    Case,
    DurationField,
    ExpressionWrapper,
    F,
    OuterRef,
    Q,
    QuerySet,
    Subquery,
    Sum,
    Value,
    When,
)
from django.db.models.functions import Cast, Coalesce
from django.db.models.lookups import Exact

from billing import membership, pricing
from billing.dates import EPOCH_DATE
from billing.errors import TotalsPending
from billing.grouping import GROUP_BY_COLUMNS, MODEL_GROUPS, Selection, format_key
from billing.intervals import MICROSECOND
from billing.model_sums import TokenCounts, sum_model_calls
from billing.model_usage import NO_USAGE, ModelUsage
from billing.models import (
    HOUSE_ACCOUNT_NAME,
    Account,
    BillableItem,
    CostRecord,
    Membership,
    PeriodTotal,
    UsageKind,
    UsageRecord,
)
from billing.money_sums import NANOS_PER_UNIT, nanos_to_decimal, sum_exact
from sandboxes.models import AWAKE_STATES

# Sandbox time is charged while ready for use, not while warming, evicting, cold or destroying. Suspended time is charged by an
# item of its own (billing.costs).
BILLABLE_STATES = AWAKE_STATES
TOTAL_DURATION = Sum(ExpressionWrapper(F("ended_at") - F("began_at"), DurationField()))
# Exact sandbox time of cost records: the sum of their quantities, rounded one by one, would differ from the sandbox hours.
# Other items may have more base units than fit into 64 bits.
PRICED_MICROS = Sum(Case(When(item=BillableItem.TIME, then=Cast("whole", BigIntegerField())), default=Value(0)))
SUMMED_AMOUNTS = ("quantity", "free", "usd", "unpriced", "estimated_usd", "micros")


@dataclass(frozen=True)
class CostTotal:
    """Usage and costs of one group: quantities and free quantities by item, in units of the item, and USD.

    `estimated_usd` is the estimated part of `usd`, which does not include the model calls without a price (`unpriced`).
    `sandbox_time` is the billable sandbox time. It is None in totals by item or model, and of one item or model. `tokens` are
    those of the model calls. They are None while the totals by model are not derived, such as in the first minute after an
    upgrade."""

    key: str
    quantities: dict[str, Decimal]
    free: dict[str, Decimal]
    usd: Decimal
    unpriced: int
    estimated_usd: Decimal
    sandbox_time: timedelta | None
    tokens: TokenCounts | None


def sum_costs(
    by: str, *, since: date | None = None, until: date | None = None, agents: Collection[str] | None = None, **filters: Any
) -> list[CostTotal]:
    """Sum costs from day `since` up to but not including `until`, most expensive group first; by day in date order.

    `by` and the names in `filters` are keys of GROUP_BY_COLUMNS. `agents` limits the sum to those DIDs. Reads the totals by
    day and month, except by lease, environment and project, which have few records each. Costs other than of model calls have
    an empty model. Raise TotalsPending for costs by model or of one model that are not derived yet."""
    selection = Selection(since, until, agents, filters)
    model_calls = sum_model_calls(by, selection)
    if by in MODEL_GROUPS or "model" in filters:
        if model_calls is None:
            raise TotalsPending
        others = [] if "model" in filters else _sum_other_items(selection)
        return _build_totals(by, [*others, *_build_call_rows(model_calls)], None, model_calls)
    sums, sandbox_time = _sum_items(by, selection)
    return _build_totals(by, sums, sandbox_time, model_calls)


def _sum_items(by: str, selection: Selection) -> tuple[list[tuple[Any, ...]], Mapping[str, timedelta] | None]:
    """Sum costs as rows of (group, item, and SUMMED_AMOUNTS in the units of PeriodTotal). Return also the time by group."""
    without_time = by == "item" or "item" in selection.filters
    periods = _find_period_totals([by], selection)
    if periods is None:
        return [*_sum_records(by, selection)], None if without_time else _sum_time(by, selection)
    sums = [*periods.values_list(GROUP_BY_COLUMNS[by], "item").annotate(*map(Sum, SUMMED_AMOUNTS))]
    durations: dict[str, timedelta] = defaultdict(timedelta)
    for key, item, *_, micros in sums:
        if not item:
            durations[format_key(key)] += int(micros) * MICROSECOND
    return [row for row in sums if row[1]], None if without_time else durations


def _sum_other_items(selection: Selection) -> list[tuple[Any, ...]]:
    """Sum the costs other than of model calls, by item, as rows of an empty group."""
    sums, _ = _sum_items("item", selection)
    return [("", *row[1:]) for row in sums if row[1] != BillableItem.LLM]


def _build_call_rows(model_calls: Mapping[str, ModelUsage]) -> list[tuple[Any, ...]]:
    """Convert sums of model calls to rows like those of other items."""
    return [
        (name, BillableItem.LLM, usage.calls * NANOS_PER_UNIT, 0, usage.usd, usage.unpriced, usage.estimated_usd, 0)
        for name, usage in model_calls.items()
    ]


def _sum_records(by: str, selection: Selection) -> QuerySet[CostRecord, tuple[Any, ...]]:
    sums = CostRecord.objects.filter(selection.build_filter()).order_by().values_list(GROUP_BY_COLUMNS[by], "item")
    return sums.annotate(
        a=sum_exact("quantity"), b=sum_exact("free"), c=sum_exact("usd"), d=Sum("unpriced"), e=sum_exact("estimated_usd"),
        f=PRICED_MICROS,
    )  # fmt: skip


def _find_period_totals(groups: Collection[str], selection: Selection) -> QuerySet[PeriodTotal] | None:
    """Find the totals that make up a selection, or None if there are none with these groups and filters."""
    periods = selection.build_period_filter(groups)
    if periods is None or not PeriodTotal.are_valid():
        return None
    return PeriodTotal.objects.filter(selection.build_filter(), periods).order_by()


def _build_totals(
    by: str, sums: Iterable[tuple[Any, ...]], sandbox_time: Mapping[str, timedelta] | None,
    model_calls: Mapping[str, ModelUsage] | None,
) -> list[CostTotal]:  # fmt: skip
    quantities: dict[str, Counter[str]] = defaultdict(Counter)
    free: dict[str, Counter[str]] = defaultdict(Counter)
    usd: Counter[str] = Counter()
    unpriced: Counter[str] = Counter()
    estimated: Counter[str] = Counter()
    micros: Counter[str] = Counter()
    for key, item, quantity, free_quantity, nano, unpriced_calls, estimated_nano, item_micros in sums:
        name = format_key(key)
        quantities[name][item] += int(quantity)
        if free_quantity:
            free[name][item] += int(free_quantity)
        usd[name] += int(nano)
        unpriced[name] += int(unpriced_calls)
        estimated[name] += int(estimated_nano)
        micros[name] += int(item_micros)
    names = sorted({*quantities, *(sandbox_time or {})}, key=lambda name: (0 if by == "day" else -usd[name], name))
    return [
        CostTotal(
            name,
            {item: _get_quantity(item, nano, micros[name]) for item, nano in quantities.get(name, {}).items()},
            {item: nanos_to_decimal(quantity) for item, quantity in free.get(name, {}).items()},
            nanos_to_decimal(usd[name]),
            unpriced[name],
            nanos_to_decimal(estimated[name]),
            None if sandbox_time is None else sandbox_time.get(name, timedelta(0)),
            None if model_calls is None else TokenCounts.of(model_calls.get(name, NO_USAGE)),
        )
        for name in names
    ]


def _get_quantity(item: str, billionths: int, micros: int) -> Decimal:
    if item == BillableItem.TIME:
        return pricing.round_half_up(pricing.to_units(item, micros))
    return nanos_to_decimal(billionths)


def sum_usd(*groups: str, **selection: Any) -> list[tuple[Any, ...]]:
    """Sum costs by several groups, as rows of (group, ..., billionths of USD). The parameters are those of `sum_amounts`."""
    return [row[:-2] for row in sum_amounts(*groups, **selection)]


def sum_amounts(
    *groups: str, since: date | None, until: date | None, agents: Collection[str] | None = None, **filters: Any
) -> list[tuple[Any, ...]]:
    """Sum costs by several groups. The parameters are those of `sum_costs`.

    Return rows of (group, ..., billionths of USD, number of calls without a price, billionths of estimated USD)."""
    columns, selection = [GROUP_BY_COLUMNS[name] for name in groups], Selection(since, until, agents, filters)
    periods = _find_period_totals(groups, selection)
    if periods is not None:
        sums: Any = periods.exclude(item="").values_list(*columns).annotate(*map(Sum, SUMMED_AMOUNTS[2:5]))
    else:
        rows = CostRecord.objects.filter(selection.build_filter()).order_by()
        sums = rows.values_list(*columns).annotate(a=sum_exact("usd"), b=Sum("unpriced"), c=sum_exact("estimated_usd"))
    return [(*row[:-3], *map(int, row[-3:])) for row in sums]


def find_first_day_of_time(*, since: date, until: date, agents: Collection[str] | None = None, **filters: Any) -> date | None:
    """Return the first day with billable sandbox time. The parameters are those of `sum_sandbox_time`. Reads no sums."""
    rows = build_time_filter(Selection(since, until, agents, filters))
    found = (rows.filter(part) for part in _build_account_parts(since, filters))
    days = [day for rows in found for day in rows.order_by("day").values_list("day", flat=True)[:1]]
    return min(days, default=None)


def sum_sandbox_time(
    by: str, *, since: date | None = None, until: date | None = None, agents: Collection[str] | None = None, **filters: Any
) -> dict[str, timedelta]:
    """Sum billable sandbox time by group. The parameters are those of `sum_costs`, without item and model."""
    return _sum_time(by, Selection(since, until, agents, filters))


def _sum_time(by: str, selection: Selection) -> dict[str, timedelta]:
    rows, since, filters = build_time_filter(selection), selection.since, selection.filters
    if by == "account":
        account = filters.get("account")
        return {name: duration for name, duration in _sum_time_by_account(rows, since).items() if account in (None, name)}
    total: dict[str, timedelta] = defaultdict(timedelta)
    for part in _build_account_parts(since, filters):
        for key, duration in rows.filter(part).values_list(GROUP_BY_COLUMNS[by]).annotate(duration=TOTAL_DURATION):
            total[format_key(key)] += duration
    return dict(total)


def build_time_filter(selection: Selection) -> QuerySet[UsageRecord]:
    """Find the records of billable sandbox time, of every account."""
    rows = UsageRecord.objects.filter(
        selection.build_filter(without=["account"]), item=UsageKind.TIME, state__in=BILLABLE_STATES
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

"""Cost and sandbox-time totals, grouped by agent, lease, environment, provider, day, account or item."""

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from typing import Any

from django.db.models import DurationField, ExpressionWrapper, F, OuterRef, Q, QuerySet, Subquery, Sum, Value
from django.db.models.functions import Coalesce
from django.db.models.lookups import Exact

from billing.dates import EPOCH_DATE
from billing.models import (
    HOUSE_ACCOUNT_NAME,
    CostRecord,
    Membership,
    UsageKind,
    UsageRecord,
)
from billing.money_sums import nanos_to_decimal, sum_exact
from sandboxes.models import ALIVE_STATES

BILLABLE_STATES = ALIVE_STATES  # ready for somebody; what starts, is put to sleep, sleeps or is destroyed costs nothing as time
TOTAL_DURATION = Sum(ExpressionWrapper(F("ended_at") - F("began_at"), DurationField()))


GROUP_BY_COLUMNS = {
    "agent": "agent_did", "lease": "holder", "environment": "environment_id", "provider": "provider", "day": "day",
    "account": "account__name", "item": "item",
}  # fmt: skip


@dataclass(frozen=True)
class CostTotal:
    """What was used under one key, by item, how much of that was free, and what it cost. `lasted` is the time for which
    sandboxes were there; of an item it is None."""

    key: str
    quantities: dict[str, Decimal]
    free: dict[str, Decimal]
    usd: Decimal
    lasted: timedelta | None


def sum_costs(
    by: str, *, since: date | None = None, until: date | None = None, agents: Collection[str] | None = None, **only: Any
) -> list[CostTotal]:
    """Costs from one day up to, not including, another: the dearest first, days in their order.

    `by` and the names in `only` are those of BY; `agents` limits it to some."""
    rows = CostRecord.objects.filter(
        _build_range_filter(since, until, agents), **{GROUP_BY_COLUMNS[name]: value for name, value in only.items()}
    )
    sums = rows.order_by().values_list(GROUP_BY_COLUMNS[by], "item")
    sums = sums.annotate(a=sum_exact("quantity"), b=sum_exact("free"), c=sum_exact("usd"))
    quantities: dict[str, dict[str, Decimal]] = defaultdict(dict)
    free: dict[str, dict[str, Decimal]] = defaultdict(dict)
    usd: Counter[str] = Counter()
    for key, item, quantity, unpaid, nano in sums:
        name = _format_key(key)
        quantities[name][item] = nanos_to_decimal(quantity)
        if unpaid:
            free[name][item] = nanos_to_decimal(unpaid)
        usd[name] += nano
    lasted = None if by == "item" or "item" in only else sum_sandbox_time(by, since=since, until=until, agents=agents, **only)
    names = sorted({*quantities, *(lasted or {})}, key=lambda name: (0 if by == "day" else -usd[name], name))
    return [
        CostTotal(
            name,
            quantities.get(name, {}),
            free.get(name, {}),
            nanos_to_decimal(usd[name]),
            None if lasted is None else lasted.get(name, timedelta(0)),
        )
        for name in names
    ]


def sum_sandbox_time(
    by: str, *, since: date | None = None, until: date | None = None, agents: Collection[str] | None = None, **only: Any
) -> dict[str, timedelta]:
    """How long sandboxes were there and ready, those of one key together, in the same days."""
    account = only.pop("account", None)
    rows = UsageRecord.objects.filter(
        _build_range_filter(since, until, agents), item=UsageKind.TIME, state__in=BILLABLE_STATES
    ).order_by()
    rows = rows.filter(**{GROUP_BY_COLUMNS[name]: value for name, value in only.items()})
    if by == "account":
        return {name: time_ for name, time_ in _sum_time_by_account(rows, since).items() if account in (None, name)}
    total: dict[str, timedelta] = defaultdict(timedelta)
    for some in [Q()] if account is None else build_account_filters(account, since):
        for key, time_ in rows.filter(some).values_list(GROUP_BY_COLUMNS[by]).annotate(lasted=TOTAL_DURATION):
            total[_format_key(key)] += time_
    return dict(total)


def _sum_time_by_account(rows: QuerySet[UsageRecord], since: date | None) -> dict[str, timedelta]:
    total: dict[str, timedelta] = defaultdict(timedelta)
    stays = dict(Membership.objects.on(since or EPOCH_DATE).values_list("agent_did", "account__name"))
    for agent, time_ in rows.exclude(_build_moved_filter(since)).values_list("agent_did").annotate(lasted=TOTAL_DURATION):
        total[stays.get(agent, HOUSE_ACCOUNT_NAME)] += time_
    for account, time_ in (
        rows.filter(_build_moved_filter(since)).values_list(_build_account_on_day()).annotate(lasted=TOTAL_DURATION)
    ):
        total[account] += time_
    return total


def build_account_filters(account: str, since: date | None) -> list[Q]:
    """The usage from that day on that is an account's, in two parts, which have no agent in common: that of agents which stay
    where they are, and, looked at record by record, that of the days on which the others belonged to it."""
    stays, ever = Membership.objects.on(since or EPOCH_DATE), Q()
    if account == HOUSE_ACCOUNT_NAME:
        whole = ~Q(agent_did__in=stays.exclude(account__name=HOUSE_ACCOUNT_NAME).values("agent_did"))
    else:
        whole = Q(agent_did__in=stays.filter(account__name=account).values("agent_did"))
        ever = Q(agent_did__in=Membership.objects.filter(account__name=account).values("agent_did"))
    return [~_build_moved_filter(since) & whole, _build_moved_filter(since) & ever & Q(Exact(_build_account_on_day(), account))]


def _build_moved_filter(since: date | None) -> Q:
    """The usage of agents that came to an account after that day."""
    return Q(agent_did__in=Membership.objects.filter(since__gt=since or EPOCH_DATE).values("agent_did"))


def _build_account_on_day() -> Coalesce:
    begun = Membership.objects.filter(agent_did=OuterRef("agent_did"), since__lte=OuterRef("day")).order_by("-since")
    return Coalesce(Subquery(begun.values("account__name")[:1]), Value(HOUSE_ACCOUNT_NAME))


def _build_range_filter(since: date | None, until: date | None, agents: Collection[str] | None) -> Q:
    within = Q() if agents is None else Q(agent_did__in=[*agents])
    if since:
        within &= Q(day__gte=since)
    if until:
        within &= Q(day__lt=until)
    return within


def _format_key(key: object) -> str:
    return "" if key is None else str(key)

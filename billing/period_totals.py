"""Derivation of the totals by day and month that reports read in place of all records: CostRecord, UsageRecord -> PeriodTotal.

A pricing pass derives the totals of the days that it prices, in the same transaction and under the same lock. Totals of costs
are therefore always the sums of the cost records. Totals of sandbox time are those of the usage at the last pricing pass.

The totals are valid while their watermark is that of the costs. A pass of the version before, which writes no totals, advances
the watermark of the costs alone: the next pass of this version derives all totals anew."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from datetime import date, datetime
from typing import NamedTuple

from django.db import transaction
from django.db.models import Count, Max, Min, Sum

from billing.dates import EPOCH, start_of_next_month
from billing.grouping import Selection
from billing.intervals import MICROSECOND
from billing.model_totals import delete_model_totals, update_model_totals
from billing.models import CostRecord, ModelTotal, PeriodTotal, UsageRecord, Watermark
from billing.models.period_totals import COSTS_WATERMARK, TOTALS_WATERMARK
from billing.money_sums import sum_exact
from billing.totals import PRICED_MICROS, TOTAL_DURATION, build_account_lookup, build_time_filter
from sandboxes.claims import note_progress

Period = PeriodTotal.Period
SQL_BATCH_SIZE = 500  # rows per statement; SQLite limits the number of values
AMOUNTS = ("records", "quantity", "free", "usd", "unpriced", "estimated_usd", "micros")
NOTHING = (0,) * len(AMOUNTS)


class TotalKey(NamedTuple):
    """Unique key of a total."""

    period: str
    day: date
    account: int
    provider: str
    item: str
    agent_did: str


Sums = dict[TotalKey, tuple[int, ...]]


def hold_costs(now: datetime) -> bool:
    """Lock and advance the watermark of the costs, as `Watermark.hold`. Return whether the totals were valid.

    If so they stay valid: the caller has to call `update_totals` for each day whose records it changes, in this transaction."""
    before = Watermark.hold(COSTS_WATERMARK, EPOCH)
    valid = Watermark.objects.filter(name=TOTALS_WATERMARK, at=before).exists()
    at = Watermark.hold(COSTS_WATERMARK, now)
    if valid and at != before:
        Watermark.objects.filter(name=TOTALS_WATERMARK).update(at=at)
    return valid


def derive_missing_totals() -> None:
    """Derive all totals unless they are valid, such as after an upgrade. Other pricing passes wait meanwhile.

    Totals by model that a version before wrote are derived anew, as these lack the estimated tokens.

    Before the first pass that prices a day there is nothing to derive, and no watermark of the costs: one in the past would
    say that the usage since then is not priced yet, and budgets would reserve it."""
    if not Watermark.objects.filter(name=COSTS_WATERMARK).exists() or (
        PeriodTotal.are_valid() and not ModelTotal.are_outdated()
    ):
        return
    with transaction.atomic(durable=True):
        if not hold_costs(EPOCH):
            delete_totals()
            _update_all(update_totals)
        elif ModelTotal.are_outdated():
            delete_model_totals()
            _update_all(update_model_totals)


def _update_all(update: Callable[[Collection[date]], None]) -> None:
    for begin in _list_months():
        update(_list_days(begin))
        note_progress()


def delete_totals() -> None:
    """Delete all totals. Those of no records are valid: call it in the transaction that deletes the cost records."""
    PeriodTotal.objects.all().delete()
    delete_model_totals()
    at = Watermark.hold(COSTS_WATERMARK, EPOCH)
    Watermark.objects.update_or_create(name=TOTALS_WATERMARK, defaults={"at": at})


def update_totals(days: Collection[date]) -> None:
    """Derive the totals of days of one month from their records, and those of the month from the difference.

    The totals of model calls by model are derived with them, unless some of those lack amounts: `derive_missing_totals` has to
    derive them all."""
    before, after = _load(Period.AGENT_DAY, days), _sum_records(days)
    changed = _find_changes(before, after)
    months = _load_months(changed)
    for key in changed:
        month = key._replace(period=Period.AGENT_MONTH, day=key.day.replace(day=1))
        sums = zip(months.get(month, NOTHING), after.get(key, NOTHING), before.get(key, NOTHING), strict=True)
        months[month] = tuple(total + new - old for total, new, old in sums)
    _write(changed | _find_changes(_load(Period.DAY, days), _sum_agents(after)) | months)
    if not ModelTotal.are_outdated():
        update_model_totals(days)


def _find_changes(before: Sums, after: Sums) -> Sums:
    """Return the new amounts of the totals that differ; NOTHING for those that have no record any more."""
    return {key: after.get(key, NOTHING) for key in (before | after) if before.get(key) != after.get(key)}


def _sum_records(days: Collection[date]) -> Sums:
    """Sum the cost records and the billable time of days by agent.

    One day at a time: for a month at once PostgreSQL would read all records."""
    account_on, total = build_account_lookup(), dict[TotalKey, tuple[int, ...]]()
    for day in sorted(days):
        rows = CostRecord.objects.filter(day=day).order_by().values_list("provider", "agent_did", "account", "item")
        for provider, agent, account, item, *amounts in rows.annotate(
            a=Count("pk"), b=sum_exact("quantity"), c=sum_exact("free"), d=sum_exact("usd"), e=Sum("unpriced"),
            f=sum_exact("estimated_usd"), g=PRICED_MICROS,
        ):  # fmt: skip
            total[TotalKey(Period.AGENT_DAY, day, account, provider, item, agent)] = tuple(map(int, amounts))
        times = build_time_filter(Selection()).filter(day=day).values_list("provider", "agent_did")
        for provider, agent, number, duration in times.annotate(a=Count("pk"), b=TOTAL_DURATION):
            key = TotalKey(Period.AGENT_DAY, day, account_on(agent, day), provider, "", agent)
            total[key] = (number, 0, 0, 0, 0, 0, duration // MICROSECOND)
    return total


def _sum_agents(sums: Sums) -> Sums:
    total: Sums = defaultdict(lambda: NOTHING)
    for key, amounts in sums.items():
        whole = key._replace(period=Period.DAY, agent_did="")
        total[whole] = tuple(map(sum, zip(total[whole], amounts, strict=True)))
    return dict(total)


def _load_months(changed: Iterable[TotalKey]) -> Sums:
    """Return the stored totals of the months and agents of changed totals of days."""
    agents: dict[date, set[str]] = defaultdict(set)
    for key in changed:
        agents[key.day.replace(day=1)].add(key.agent_did)
    found: Sums = {}
    for begin, dids in agents.items():
        few = {"agent_did__in": sorted(dids)} if len(dids) <= SQL_BATCH_SIZE else {}
        found |= _load(Period.AGENT_MONTH, [begin], **few)
    return found


def _load(period: Period, days: Collection[date], **filters: object) -> Sums:
    rows = PeriodTotal.objects.filter(period=period, day__in=sorted(days), **filters).order_by()
    size = len(TotalKey._fields)
    return {TotalKey(*row[:size]): row[size:] for row in rows.values_list(*TotalKey._fields, *AMOUNTS)}


def _write(sums: Sums) -> None:
    """Store totals, and delete those without a record."""
    rows = [
        PeriodTotal(account_id=key.account, **_get_plain_columns(key), **dict(zip(AMOUNTS, amounts, strict=True)))
        for key, amounts in sums.items()
        if amounts[0]
    ]
    gone = [key for key, amounts in sums.items() if not amounts[0]]
    for key in gone:
        PeriodTotal.objects.filter(**key._asdict()).delete()
    PeriodTotal.objects.bulk_create(
        rows, batch_size=SQL_BATCH_SIZE, update_conflicts=True, unique_fields=[*TotalKey._fields], update_fields=AMOUNTS
    )


def _get_plain_columns(key: TotalKey) -> dict[str, object]:
    return {name: value for name, value in key._asdict().items() if name != "account"}


def _list_months() -> list[date]:
    """Return the first days of the months from the earliest record to the latest."""
    bounds: list[date] = []
    for model in (CostRecord, UsageRecord):
        bounds += [day for day in model._base_manager.aggregate(a=Min("day"), b=Max("day")).values() if day]
    months = []
    if bounds:
        begin = min(bounds).replace(day=1)
        while begin <= max(bounds):
            months.append(begin)
            begin = start_of_next_month(begin)
    return months


def _list_days(begin: date) -> list[date]:
    last = start_of_next_month(begin).toordinal()
    return [date.fromordinal(number) for number in range(begin.toordinal(), last)]

"""What usage costs: UsageRecord x Rate -> CostRecord, a day at a time, and the sums of that.

Costs follow from usage, rates and memberships alone. Whatever changes one of them notes the days whose costs it changes
(models.Unpriced), and `price` derives those days anew."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import date, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from typing import Any, NamedTuple
from uuid import UUID

from django.db import transaction
from django.db.models import DurationField, ExpressionWrapper, F, Q, QuerySet, Sum, Value
from django.db.models.functions import Greatest, Least

from billing import membership, pricing
from billing.dates import EPOCH, start_of_day, start_of_next_month
from billing.instance_types import find_instance_type, get_disk_mb
from billing.intervals import MICROSECOND, prorate
from billing.models import (
    HOUSE_ACCOUNT_NAME,
    Account,
    BillableItem,
    CostRecord,
    Membership,
    Rate,
    Unpriced,
    UsageKind,
    UsageRecord,
    Watermark,
)
from billing.money_sums import nanos_to_decimal, sum_exact
from billing.totals import BILLABLE_STATES
from sandboxes.lifecycle import checkpoint

SQL_BATCH_SIZE = 500  # in one statement: SQLite takes so many values
OWNER_COLUMNS = ("agent_did", "environment_id", "holder", "provider")
AllowanceGroup = tuple[int, str, str]  # account, provider, item: who shares an allowance


class CostKey(NamedTuple):
    """What one cost record is about: there is one of each."""

    day: date
    account: int
    provider: str
    item: str
    agent_did: str
    environment_id: str
    holder: UUID | None
    rate: int | None


class CostAmount(NamedTuple):
    whole: str
    quantity: Decimal
    free: Decimal
    usd: Decimal


def price_usage(*, now: datetime) -> Counter[str]:
    """Bring the cost records up to the usage records: how many were written and removed.

    It may stop at any step, run twice, or beside itself: each month is one transaction, under the lock of the watermark. What
    is metered meanwhile has noted its day again, which the next pass derives."""
    counts: Counter[str] = Counter()
    for begin in sorted({day.replace(day=1) for day in Unpriced.objects.values_list("day", flat=True).distinct()}):
        with transaction.atomic(durable=True):
            Watermark.hold("costs", now)
            noted = [*Unpriced.objects.filter(day__gte=begin, day__lt=start_of_next_month(begin))]  # before any usage is read
            written, removed = _derive_month(begin, sorted({row.day for row in noted})) if noted else (0, 0)
            for at in range(0, len(noted), SQL_BATCH_SIZE):
                Unpriced.objects.filter(pk__in=[row.pk for row in noted[at : at + SQL_BATCH_SIZE]]).delete()
            checkpoint("priced", begin)
        counts.update(written=written, removed=removed)
    return +counts


def reset_costs() -> None:
    """Throw the cost records away. The next `price` derives them all again."""
    with transaction.atomic(durable=True):
        Watermark.hold("costs", EPOCH)
        CostRecord.objects.all().delete()
        Unpriced.note(UsageRecord.objects.order_by().values_list("day", flat=True).distinct())


# --- one month --------------------------------------------------------------------------------------------------------


def _derive_month(begin: date, days: list[date]) -> tuple[int, int]:
    """Write what some days of a month cost, and what changes by that on its other days: allowances are used up in order."""
    rates = {rate.pk: rate for rate in Rate.objects.all()}
    account_on = _build_account_lookup()
    lines: dict[CostKey, int] = defaultdict(int)
    called: dict[CostKey, CostAmount] = {}
    for day in days:
        for (agent, environment, holder, provider), quantities in _iter_day_usage(day, rates.values()):
            account = account_on(agent, day)
            for (item, rate), whole in quantities:
                lines[CostKey(day, account, provider, item, agent, environment, holder, rate)] += whole
        for (agent, environment, holder, provider), calls, usd in _iter_llm_calls(day):
            key = CostKey(day, account_on(agent, day), provider, BillableItem.LLM, agent, environment, holder, None)
            called[key] = CostAmount(str(calls), Decimal(calls), Decimal(0), usd)
    lines = {key: whole for key, whole in lines.items() if whole}
    there = _load_records(day__in=days)
    touched = {key.account for each in (lines, called, there) for key in each}
    month = Q(day__gte=begin, day__lt=start_of_next_month(begin), account__in=touched) & ~Q(day__in=days)
    spent = _find_exhausted_allowances(month & Q(day__lt=days[0]), rates)
    kept = _load_records(month & ~Q(item=BillableItem.PLAN) & ~_build_group_filter(spent) & Q(rate__allowance__gt=0))
    lines.update({key: int(amount.whole) for key, (_, amount) in kept.items()})
    plans = {rate.provider for rate in rates.values() if rate.item == BillableItem.PLAN}
    if plans:
        there |= _load_records(month & Q(item=BillableItem.PLAN))
        used = CostRecord.objects.filter(month, provider__in=plans).exclude(item__in=[BillableItem.PLAN, BillableItem.LLM])
        in_use = {*used.order_by().values_list("account", "provider", "day").distinct()}
        in_use |= {(key.account, key.provider, key.day) for key in lines if key.provider in plans}
        lines.update(dict.fromkeys(_iter_plan_charges(in_use, rates.values()), 1))
    return _write_records(_price_lines(lines, rates, spent) | called, there | kept)


def _find_exhausted_allowances(before: Q, rates: Mapping[int, Rate]) -> set[AllowanceGroup]:
    """Whose allowances were used up before: not all of some line was free, so of later ones nothing is, whatever changes
    there. This spares a pass in the middle of a month from reading what came before."""
    most: dict[tuple[str, str], Decimal] = defaultdict(Decimal)
    for rate in rates.values():
        most[rate.provider, rate.item] = max(most[rate.provider, rate.item], rate.allowance)
    paid = CostRecord.objects.filter(before, free__lt=F("quantity"), rate__allowance__gt=0).order_by()
    found = paid.values_list("account", "provider", "item", "rate").distinct()
    return {(account, provider, item) for account, provider, item, pk in found if rates[pk].allowance == most[provider, item]}


def _build_group_filter(groups: Iterable[AllowanceGroup]) -> Q:
    some = Q(pk__in=[])
    for account, provider, item in groups:
        some |= Q(account=account, provider=provider, item=item)
    return some


def _build_account_lookup() -> Callable[[str, date], int]:
    """The account of an agent on a day."""
    house = Account.objects.get_or_create(name=HOUSE_ACCOUNT_NAME)[0].pk
    histories: dict[str, list[tuple[date, int]]] = defaultdict(list)
    for agent, since, account in Membership.objects.order_by("since").values_list("agent_did", "since", "account"):
        histories[agent].append((since, account))
    return lambda agent, day: membership.find_account_on(histories.get(agent, ()), day, house)


def _iter_day_usage(day: date, rates: Collection[Rate]) -> Iterator[tuple[tuple[Any, ...], list[tuple[tuple[str, int], int]]]]:
    """Who used what on a day: ((agent, environment, lease, provider), [((item, rate), quantity in the smallest units)]).

    A rate that begins in the middle of the day cuts all time in two there, and use with it. A request costs what one does at
    the day's beginning."""
    first = start_of_day(day)
    last = first + timedelta(days=1)
    cuts = sorted({first, last, *(rate.valid_from for rate in rates if first < rate.valid_from < last)})
    for begin, end in pairwise(cuts):
        sizes = ("memory_mib", "millicpus", "measured")
        for *who, memory_mib, millicpus, measured, lasted in _query_durations(day, begin, end, *sizes, item=UsageKind.TIME):
            size = find_instance_type(who[-1], memory_mib, millicpus)
            quantities = pricing.compute_allocated_quantities(
                lasted // MICROSECOND, memory_mib=memory_mib, millicpus=millicpus, disk_mb=get_disk_mb(who[-1], size)
            )
            yield tuple(who), [*_apply_rates(quantities, rates, who[-1], size, begin, by_use=False if measured else None)]
        for *who, memory_mib, millicpus, cpu_micros, mib_micros in _iter_measured_use(day, begin, end):
            quantities = pricing.compute_used_quantities(cpu_micros=cpu_micros, mib_micros=mib_micros)
            size = find_instance_type(who[-1], memory_mib, millicpus)
            yield tuple(who), [*_apply_rates(quantities, rates, who[-1], size, begin, by_use=True)]
        for *who, size_bytes, lasted in _query_durations(day, begin, end, "size_bytes", item=UsageKind.STORAGE):
            quantities = {BillableItem.STORAGE: lasted // MICROSECOND * size_bytes}
            yield tuple(who), [*_apply_rates(quantities, rates, who[-1], "", begin)]
    requests = (
        UsageRecord.objects.filter(day=day, item=UsageKind.RUNS)
        .order_by()
        .values_list(*OWNER_COLUMNS, "memory_mib", "millicpus")
    )
    for *who, memory_mib, millicpus, runs in requests.annotate(runs=Sum("calls")):
        size = find_instance_type(who[-1], memory_mib, millicpus)
        yield tuple(who), [*_apply_rates({BillableItem.REQUEST: runs}, rates, who[-1], size, first)]


def _apply_rates(
    quantities: Mapping[str, int], rates: Collection[Rate], provider: str, size: str, at: datetime, by_use: bool | None = None
) -> Iterator[tuple[tuple[str, int], int]]:
    """By the rates that count then; those that say so alone, if `by_use` is not None."""
    for item, whole in quantities.items():
        rate = pricing.find_rate(rates, provider, size, item, at)
        if rate and by_use in (None, rate.by_use):
            yield (str(item), rate.pk), whole


def _query_durations(
    day: date, begin: datetime, end: datetime, *sizes: str, item: str
) -> QuerySet[UsageRecord, tuple[Any, ...]]:
    """How long each lease had what it is paid for, between two moments of a day, by these sizes."""
    paid = Q(state__in=BILLABLE_STATES) if item == UsageKind.TIME else Q()
    rows = UsageRecord.objects.filter(paid, day=day, item=item, began_at__lt=end, ended_at__gt=begin)
    lasted = Least(F("ended_at"), Value(end)) - Greatest(F("began_at"), Value(begin))
    total = Sum(ExpressionWrapper(lasted, DurationField()))
    return rows.order_by().values_list(*OWNER_COLUMNS, *sizes).annotate(lasted=total)


def _iter_measured_use(day: date, begin: datetime, end: datetime) -> Iterator[tuple[Any, ...]]:
    """What each lease used of CPU and memory between two moments of a day, by the size that its sandbox was given."""
    sizes = ("sandbox__memory_mib", "sandbox__millicpus")
    rows = UsageRecord.objects.filter(day=day, item=UsageKind.USE).order_by()
    whole = rows.filter(began_at__gte=begin, ended_at__lte=end).values_list(*OWNER_COLUMNS, *sizes)
    yield from whole.annotate(cpu=Sum("cpu_micros"), memory=Sum("mib_micros"))
    cut = rows.filter(began_at__lt=end, ended_at__gt=begin).exclude(began_at__gte=begin, ended_at__lte=end)
    for *who, cpu, memory, since, until in cut.values_list(
        *OWNER_COLUMNS, *sizes, "cpu_micros", "mib_micros", "began_at", "ended_at"
    ):
        within = (since, until, max(since, begin), min(until, end))
        yield *who, prorate(cpu, *within), prorate(memory, *within)


def _iter_llm_calls(day: date) -> Iterator[tuple[tuple[Any, ...], int, Decimal]]:
    rows = UsageRecord.objects.filter(day=day, item=UsageKind.TOKENS).order_by().values_list(*OWNER_COLUMNS)
    for *who, calls, nano in rows.annotate(number=Sum("calls"), nano=sum_exact("usd")):
        yield tuple(who), calls, nanos_to_decimal(nano)


def _iter_plan_charges(in_use: Iterable[tuple[int, str, date]], rates: Collection[Rate]) -> Iterator[CostKey]:
    """One for each account and provider: on the first day of the month on which it is used and has a plan."""
    found: set[tuple[int, str]] = set()
    for account, provider, day in sorted(in_use, key=lambda each: each[2]):
        rate = pricing.find_rate(rates, provider, "", BillableItem.PLAN, start_of_day(day))
        if rate and (account, provider) not in found:
            found.add((account, provider))
            yield CostKey(day, account, provider, BillableItem.PLAN, "", "", None, rate.pk)


def _price_lines(
    lines: Mapping[CostKey, int], rates: Mapping[int, Rate], spent: Collection[AllowanceGroup]
) -> dict[CostKey, CostAmount]:
    """What each line costs, once the allowances of its account are used up in the order of time; those of `spent` are."""

    def order(key: CostKey) -> tuple[Any, ...]:
        rate = rates[key.rate or 0]
        return key.day, rate.valid_from, str(key.holder or ""), key.agent_did, key.environment_id, rate.instance_type

    groups: dict[AllowanceGroup, list[CostKey]] = defaultdict(list)
    for key in sorted(lines, key=order):
        groups[key.account, key.provider, key.item].append(key)
    priced = {}
    for group, keys in groups.items():
        item, used = group[2], [rates[key.rate or 0] for key in keys]
        limits = [0 if group in spent else pricing.to_base_units(item, rate.allowance) for rate in used]
        frees = pricing.apply_allowances(zip((lines[key] for key in keys), limits, strict=True))
        for key, rate, free in zip(keys, used, frees, strict=True):
            whole = lines[key]
            priced[key] = CostAmount(
                str(whole),
                pricing.round_half_up(pricing.to_units(item, whole)),
                pricing.round_half_up(pricing.to_units(item, free)),
                pricing.round_half_up(pricing.compute_cost(item, whole - free, rate.usd)),
            )
    return priced


def _load_records(*conditions: Q, **fields: Any) -> dict[CostKey, tuple[int, CostAmount]]:
    """Cost records that are there: what each is about -> its id and its amounts."""
    rows = CostRecord.objects.filter(*conditions, **fields).order_by()
    names = [*CostKey._fields, "pk", *CostAmount._fields]
    found = {}
    for row in rows.values_list(*names):
        found[CostKey(*row[:8])] = (row[8], CostAmount(*row[9:]))
    return found


def _write_records(wanted: Mapping[CostKey, CostAmount], there: Mapping[CostKey, tuple[int, CostAmount]]) -> tuple[int, int]:
    """Make the records these, and leave those alone that are so already: how many were written and removed."""
    outdated = [pk for key, (pk, amount) in there.items() if wanted.get(key) != amount]
    fresh = [
        CostRecord(account_id=key.account, rate_id=key.rate, **_get_plain_columns(key), **amount._asdict())
        for key, amount in wanted.items()
        if key not in there or there[key][1] != amount
    ]
    for at in range(0, len(outdated), SQL_BATCH_SIZE):
        CostRecord.objects.filter(pk__in=outdated[at : at + SQL_BATCH_SIZE]).delete()
    checkpoint("repriced", len(outdated))
    CostRecord.objects.bulk_create(fresh, batch_size=SQL_BATCH_SIZE)
    return len(fresh), len(outdated)


def _get_plain_columns(key: CostKey) -> dict[str, Any]:
    return {name: value for name, value in key._asdict().items() if name not in ("account", "rate")}

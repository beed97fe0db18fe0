"""Derivation of cost records by day: UsageRecord x Rate -> CostRecord.

Costs follow only from usage, rates and memberships. Each change of one of them marks the affected days as unpriced
(models.Unpriced), and `price_usage` derives the costs of those days again."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import date, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from typing import Any, NamedTuple
from uuid import UUID

from django.db import transaction
from django.db.models import DurationField, ExpressionWrapper, F, Q, QuerySet, Sum, Value
from django.db.models.functions import Greatest, Least

from billing import period_totals, pricing
from billing.dates import EPOCH, start_of_day, start_of_next_month
from billing.instance_types import SandboxSize
from billing.intervals import MICROSECOND, prorate
from billing.model_usage import LeaseUsage, iter_model_usage
from billing.models import (
    BillableItem,
    CostRecord,
    PeriodTotal,
    Rate,
    Unpriced,
    UsageKind,
    UsageRecord,
    Watermark,
)
from billing.money_sums import MAX_RECORD_USD, limit_usd, nanos_to_decimal
from billing.totals import BILLABLE_STATES, build_account_lookup
from sandboxes.claims import note_progress
from sandboxes.lifecycle import checkpoint
from sandboxes.models import SandboxState

SQL_BATCH_SIZE = 500  # rows per statement; SQLite limits the number of values
OWNER_COLUMNS = ("agent_did", "environment_id", "holder", "provider")
AllowanceGroup = tuple[int, str, str]  # (account, provider, item): records that share an allowance


class CostKey(NamedTuple):
    """Unique key of a cost record."""

    day: date
    account: int
    provider: str
    item: str
    agent_did: str
    environment_id: str
    holder: UUID | None
    rate: int | None


class CostAmount(NamedTuple):
    """Amounts of a cost record. `whole` is the quantity in base units, as text; the others are rounded to nine places.

    unpriced: number of model calls with unknown cost. estimated_usd: estimated part of `usd`."""

    whole: str
    quantity: Decimal
    free: Decimal
    usd: Decimal
    unpriced: int = 0
    estimated_usd: Decimal = Decimal(0)


def price_usage(*, now: datetime) -> Counter[str]:
    """Derive the costs of unpriced days. Return the numbers of records "written" and "removed".

    Safe to interrupt, repeat and run concurrently: each month is one transaction under the lock of the watermark. Usage
    metered during the pass marks its day again, for the next pass."""
    counts: Counter[str] = Counter()
    if not PeriodTotal.are_valid():
        _note_days_without_details()
    for begin in sorted({day.replace(day=1) for day in Unpriced.objects.values_list("day", flat=True).distinct()}):
        with transaction.atomic(durable=True):
            has_totals = period_totals.hold_costs(now)
            # Read before any usage: a mark that is written later stays for the next pass.
            marks = [*Unpriced.objects.filter(day__gte=begin, day__lt=start_of_next_month(begin))]
            days = sorted({row.day for row in marks})
            written, removed, changed = _derive_month(begin, days) if marks else (0, 0, set())
            if has_totals:
                period_totals.update_totals({*days, *changed})
            for start in range(0, len(marks), SQL_BATCH_SIZE):
                Unpriced.objects.filter(pk__in=[row.pk for row in marks[start : start + SQL_BATCH_SIZE]]).delete()
            checkpoint("priced", begin)
        note_progress()
        counts.update(written=written, removed=removed)
    period_totals.derive_missing_totals()
    return +counts


def _note_days_without_details() -> None:
    """Mark the days with unpriced or estimated model calls: a pass of the version before wrote only their costs."""
    incomplete = UsageRecord.objects.filter(Q(unpriced__gt=0) | Q(estimated__gt=0), item=UsageKind.TOKENS)
    Unpriced.note(incomplete.order_by().values_list("day", flat=True).distinct())


def reset_costs() -> None:
    """Delete all cost records. The next `price_usage` derives them again."""
    with transaction.atomic(durable=True):
        Watermark.hold("costs", EPOCH)
        CostRecord.objects.all().delete()
        period_totals.delete_totals()
        Unpriced.note(UsageRecord.objects.order_by().values_list("day", flat=True).distinct())


# --- one month --------------------------------------------------------------------------------------------------------


def _derive_month(begin: date, days: list[date]) -> tuple[int, int, set[date]]:
    """Derive the costs of `days` of one month. Return the numbers of records written and removed, and their days.

    Other days of the month are priced again where their share of an allowance, or the day of a plan's charge, may have
    changed.

    1. Collect the lines (key -> quantity in base units) of `days` from usage, and the amounts of model calls, which need no
       rate.
    2. Add the lines of the other days of the touched accounts that draw on an allowance.
    3. Add one line for each plan charged in the month.
    4. Price all lines in time order and write the records that differ."""
    rates = {rate.pk: rate for rate in Rate.objects.all()}
    lines, model_calls = _collect_lines(days, rates.values())
    existing = _load_records(day__in=days)
    touched = {key.account for each in (lines, model_calls, existing) for key in each}
    others = Q(day__gte=begin, day__lt=start_of_next_month(begin), account__in=touched) & ~Q(day__in=days)
    exhausted = _find_exhausted_allowances(others & Q(day__lt=days[0]), rates)
    reallocated = _load_records(
        others & ~Q(item=BillableItem.PLAN) & ~_build_group_filter(exhausted) & Q(rate__allowance__gt=0)
    )
    lines.update({key: int(amount.whole) for key, (_, amount) in reallocated.items()})
    providers = {rate.provider for rate in rates.values() if rate.item == BillableItem.PLAN}
    if providers:
        existing |= _load_records(others & Q(item=BillableItem.PLAN))
        in_use = _find_days_in_use(others, lines, providers)
        lines.update(dict.fromkeys(_iter_plan_charges(in_use, rates.values()), 1))
    return _write_records(_price_lines(lines, rates, exhausted) | model_calls, existing | reallocated)


def _collect_lines(days: Collection[date], rates: Collection[Rate]) -> tuple[dict[CostKey, int], dict[CostKey, CostAmount]]:
    """Return the quantities of `days` that have a rate, in base units, and the amounts of their model calls."""
    account_on = build_account_lookup()
    lines: dict[CostKey, int] = defaultdict(int)
    model_calls: dict[CostKey, CostAmount] = {}
    for day in days:
        for (agent, environment, holder, provider), quantities in _iter_day_usage(day, rates):
            account = account_on(agent, day)
            for (item, rate), base_units in quantities:
                lines[CostKey(day, account, provider, item, agent, environment, holder, rate)] += base_units
    for day, leases in iter_model_usage(days):
        for (agent, environment, holder, provider), usage in leases:
            key = CostKey(day, account_on(agent, day), provider, BillableItem.LLM, agent, environment, holder, None)
            model_calls[key] = _build_calls_amount(usage, agent, day)
    return {key: base_units for key, base_units in lines.items() if base_units}, model_calls


def _build_calls_amount(usage: LeaseUsage, agent: str, day: date) -> CostAmount:
    """Return the amounts of the model calls of a lease and day. `agent` and `day` identify a limited record in the log."""
    total = usage.total
    limit_usd(nanos_to_decimal(usage.stated_usd), agent=agent, day=str(day))
    usd, estimated_usd = nanos_to_decimal(total.usd), nanos_to_decimal(total.estimated_usd)
    return CostAmount(str(total.calls), Decimal(total.calls), Decimal(0), usd, total.unpriced, estimated_usd)


def _find_days_in_use(others: Q, lines: Iterable[CostKey], providers: Collection[str]) -> set[tuple[int, str, date]]:
    """Return (account, provider, day) of usage at these providers: in `lines`, and in the records that match `others`."""
    used = CostRecord.objects.filter(others, provider__in=providers).exclude(item__in=[BillableItem.PLAN, BillableItem.LLM])
    in_use = {*used.order_by().values_list("account", "provider", "day").distinct()}
    return in_use | {(key.account, key.provider, key.day) for key in lines if key.provider in providers}


def _find_exhausted_allowances(before: Q, rates: Mapping[int, Rate]) -> set[AllowanceGroup]:
    """Find the groups whose allowance was used up by the records that match `before`.

    After a partly billed record no later usage is free, even if that usage changes. A pass in the middle of a month therefore
    need not read the days before it. Only records by a rate with the largest allowance count: a later rate with a larger
    allowance may extend a smaller one."""
    largest: dict[tuple[str, str], Decimal] = defaultdict(Decimal)
    for rate in rates.values():
        largest[rate.provider, rate.item] = max(largest[rate.provider, rate.item], rate.allowance)
    paid = CostRecord.objects.filter(before, free__lt=F("quantity"), rate__allowance__gt=0).order_by()
    groups = paid.values_list("account", "provider", "item", "rate").distinct()
    return {
        (account, provider, item) for account, provider, item, pk in groups if rates[pk].allowance == largest[provider, item]
    }


def _build_group_filter(groups: Iterable[AllowanceGroup]) -> Q:
    condition = Q(pk__in=[])
    for account, provider, item in groups:
        condition |= Q(account=account, provider=provider, item=item)
    return condition


def _iter_day_usage(day: date, rates: Collection[Rate]) -> Iterator[tuple[tuple[Any, ...], list[tuple[tuple[str, int], int]]]]:
    """Yield a day's usage as ((agent, environment, lease, provider), [((item, rate id), quantity in base units)]).

    A rate that begins within the day splits time and use at its start. Requests are priced by the rate at the start of the
    day."""
    first = start_of_day(day)
    last = first + timedelta(days=1)
    for begin, end in split_by_rate(first, last, rates):
        yield from iter_sandbox_usage(day, begin, end, rates)
        for *owner, size_bytes, duration in _query_durations(day, begin, end, "size_bytes", item=UsageKind.STORAGE):
            stored: dict[str, int] = {BillableItem.STORAGE: duration // MICROSECOND * size_bytes}
            yield tuple(owner), [*_apply_rates(stored, rates, SandboxSize(owner[-1], 0, 0), begin)]
    requests = (
        UsageRecord.objects.filter(day=day, item=UsageKind.RUNS)
        .order_by()
        .values_list(*OWNER_COLUMNS, "memory_mib", "millicpus")
    )
    for *owner, memory_mib, millicpus, runs in requests.annotate(runs=Sum("calls")):
        size = SandboxSize(owner[-1], memory_mib, millicpus)
        yield tuple(owner), [*_apply_rates({BillableItem.REQUEST: runs}, rates, size, first)]


def split_by_rate(first: datetime, last: datetime, rates: Collection[Rate]) -> Iterator[tuple[datetime, datetime]]:
    """Split a time range at the starts of the rates that begin within it."""
    return pairwise(sorted({first, last, *(rate.valid_from for rate in rates if first < rate.valid_from < last)}))


def iter_sandbox_usage(
    day: date, begin: datetime, end: datetime, rates: Collection[Rate], condition: Q | None = None
) -> Iterator[tuple[tuple[Any, ...], list[tuple[tuple[str, int], int]]]]:
    """Yield the time and the use of sandboxes within a part of a day, in the form of `_iter_day_usage`.

    No rate may begin within that part. `condition` limits the usage records."""
    owned = condition or Q()
    requested = ("sandbox__disk_mib", "sandbox__gpus", "sandbox__gpu_type")
    sizes = ("memory_mib", "millicpus", *requested)
    durations = _query_durations(day, begin, end, *sizes, "measured", "state", item=UsageKind.TIME).filter(owned)
    for *columns, measured, state, duration in durations:
        owner, (memory_mib, millicpus, disk_mib, gpus, gpu_type) = columns[: -len(sizes)], columns[-len(sizes) :]
        size = SandboxSize(owner[-1], memory_mib, millicpus, disk_mib, gpus or 0, gpu_type or "")
        quantities = size.compute_quantities(duration // MICROSECOND, is_suspended=state == SandboxState.SUSPENDED)
        by_use = False if measured else None
        yield tuple(owner), [*_apply_rates(quantities, rates, size, begin, by_use=by_use)]
    for *owner, memory_mib, millicpus, cpu_micros, mib_micros in _iter_measured_use(day, begin, end, owned):
        quantities = pricing.compute_used_quantities(cpu_micros=cpu_micros, mib_micros=mib_micros)
        size = SandboxSize(owner[-1], memory_mib, millicpus)
        yield tuple(owner), [*_apply_rates(quantities, rates, size, begin, by_use=True)]


def _apply_rates(
    quantities: Mapping[str, int], rates: Collection[Rate], size: SandboxSize, at: datetime, by_use: bool | None = None
) -> Iterator[tuple[tuple[str, int], int]]:
    """Yield ((item, rate id), base units) of the quantities that have a rate at `at`.

    If `by_use` is not None, only rates with that value of `by_use` apply."""
    for item, base_units in quantities.items():
        rate = pricing.find_rate(rates, size.provider, size.get_rate_type(item), item, at)
        if rate and by_use in (None, rate.by_use):
            yield (str(item), rate.pk), base_units


def _query_durations(
    day: date, begin: datetime, end: datetime, *sizes: str, item: str
) -> QuerySet[UsageRecord, tuple[Any, ...]]:
    """Sum billable and suspended time within a part of a day, by owner and by the columns in `sizes`."""
    billable = Q(state__in=(*BILLABLE_STATES, SandboxState.SUSPENDED)) if item == UsageKind.TIME else Q()
    rows = UsageRecord.objects.filter(billable, day=day, item=item, began_at__lt=end, ended_at__gt=begin)
    duration = Least(F("ended_at"), Value(end)) - Greatest(F("began_at"), Value(begin))
    total = Sum(ExpressionWrapper(duration, DurationField()))
    return rows.order_by().values_list(*OWNER_COLUMNS, *sizes).annotate(duration=total)


def _iter_measured_use(day: date, begin: datetime, end: datetime, owned: Q) -> Iterator[tuple[Any, ...]]:
    """Yield measured use within a part of a day: (owner columns, MiB, millicpus, CPU microseconds, microseconds x MiB)."""
    sizes = ("sandbox__memory_mib", "sandbox__millicpus")
    rows = UsageRecord.objects.filter(owned, day=day, item=UsageKind.USE).order_by()
    whole = rows.filter(began_at__gte=begin, ended_at__lte=end).values_list(*OWNER_COLUMNS, *sizes)
    yield from whole.annotate(cpu=Sum("cpu_micros"), memory=Sum("mib_micros"))
    cut = rows.filter(began_at__lt=end, ended_at__gt=begin).exclude(began_at__gte=begin, ended_at__lte=end)
    for *owner, cpu, memory, since, until in cut.values_list(
        *OWNER_COLUMNS, *sizes, "cpu_micros", "mib_micros", "began_at", "ended_at"
    ):
        within = (since, until, max(since, begin), min(until, end))
        yield *owner, prorate(cpu, *within), prorate(memory, *within)


def _iter_plan_charges(in_use: Iterable[tuple[int, str, date]], rates: Collection[Rate]) -> Iterator[CostKey]:
    """Yield one plan charge for each account and provider, on the first day of use on which the provider has a plan."""
    charged: set[tuple[int, str]] = set()
    for account, provider, day in sorted(in_use, key=lambda each: each[2]):
        rate = pricing.find_rate(rates, provider, "", BillableItem.PLAN, start_of_day(day))
        if rate and (account, provider) not in charged:
            charged.add((account, provider))
            yield CostKey(day, account, provider, BillableItem.PLAN, "", "", None, rate.pk)


def _price_lines(
    lines: Mapping[CostKey, int], rates: Mapping[int, Rate], exhausted: Collection[AllowanceGroup]
) -> dict[CostKey, CostAmount]:
    """Price lines (quantities in base units), applying allowances in time order. `exhausted` groups have none left."""

    def sort_key(key: CostKey) -> tuple[Any, ...]:
        rate = rates[key.rate or 0]
        return key.day, rate.valid_from, str(key.holder or ""), key.agent_did, key.environment_id, rate.instance_type

    groups: dict[AllowanceGroup, list[CostKey]] = defaultdict(list)
    for key in sorted(lines, key=sort_key):
        groups[key.account, key.provider, key.item].append(key)
    priced = {}
    for group, keys in groups.items():
        item, line_rates = group[2], [rates[key.rate or 0] for key in keys]
        allowances = [0 if group in exhausted else pricing.to_base_units(item, rate.allowance) for rate in line_rates]
        free_parts = pricing.apply_allowances(zip((lines[key] for key in keys), allowances, strict=True))
        for key, rate, free in zip(keys, line_rates, free_parts, strict=True):
            base_units = lines[key]
            priced[key] = CostAmount(
                str(base_units),
                pricing.round_half_up(pricing.to_units(item, base_units)),
                pricing.round_half_up(pricing.to_units(item, free)),
                limit_usd(
                    pricing.round_half_up(pricing.compute_cost(item, base_units - free, rate.usd)),
                    agent=key.agent_did, day=str(key.day), item=item,
                ),
            )  # fmt: skip
    return priced


def _load_records(*conditions: Q, **fields: Any) -> dict[CostKey, tuple[int, CostAmount]]:
    """Return existing cost records by key, as (id, amounts)."""
    rows = CostRecord.objects.filter(*conditions, **fields).order_by()
    names = [*CostKey._fields, "pk", *CostAmount._fields]
    records = {}
    for row in rows.values_list(*names):
        records[CostKey(*row[:8])] = (row[8], CostAmount(*row[9:]))
    return records


def _write_records(
    expected: Mapping[CostKey, CostAmount], existing: Mapping[CostKey, tuple[int, CostAmount]]
) -> tuple[int, int, set[date]]:
    """Replace the existing records that differ from `expected`. Return the result of `_derive_month`."""
    replaced = {key: pk for key, (pk, amount) in existing.items() if expected.get(key) != amount}
    outdated = [*replaced.values()]
    fresh = [
        CostRecord(account_id=key.account, rate_id=key.rate, **_get_plain_columns(key), **amount._asdict())
        for key, amount in expected.items()
        if key not in existing or existing[key][1] != amount
    ]
    for start in range(0, len(outdated), SQL_BATCH_SIZE):
        CostRecord.objects.filter(pk__in=outdated[start : start + SQL_BATCH_SIZE]).delete()
    checkpoint("repriced", len(outdated))
    CostRecord.objects.bulk_create(fresh, batch_size=SQL_BATCH_SIZE)
    return len(fresh), len(outdated), {*(key.day for key in replaced), *(record.day for record in fresh)}


def find_limited_records(*, after: int) -> QuerySet[CostRecord]:
    """Find the cost records with ids above `after` whose amount was limited to MAX_RECORD_USD."""
    return CostRecord.objects.filter(pk__gt=after, usd__gte=MAX_RECORD_USD).order_by("pk")


def _get_plain_columns(key: CostKey) -> dict[str, Any]:
    return {name: value for name, value in key._asdict().items() if name not in ("account", "rate")}

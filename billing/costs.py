"""What usage costs: UsageRecord x Rate -> CostRecord, a day at a time, and the sums of that.

Costs follow from usage, rates and memberships alone. Whatever changes one of them notes the days whose costs it changes
(models.Unpriced), and `price` derives those days anew."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from typing import Any, NamedTuple
from uuid import UUID

from django.db import transaction
from django.db.models import DurationField, ExpressionWrapper, F, OuterRef, Q, QuerySet, Subquery, Sum, Value
from django.db.models.functions import Coalesce, Greatest, Least
from django.db.models.lookups import Exact

from billing import membership, pricing
from billing.dates import BEGINNING, LONG_AGO, following, midnight
from billing.instance_types import disk_mb, instance_type
from billing.metering import MICROSECOND, part
from billing.models import HOUSE, Account, CostRecord, Item, Membership, Priced, Rate, Unpriced, UsageRecord, Watermark
from billing.money_sums import exactly, nano_usd
from sandboxes.lifecycle import step
from sandboxes.models import ALIVE

PAID = ALIVE  # ready for somebody; what starts, is put to sleep, sleeps or is destroyed costs nothing as time
ROWS = 500  # in one statement: SQLite takes so many values
WHO = ("agent_did", "environment_id", "holder", "provider")
LASTED = Sum(ExpressionWrapper(F("ended_at") - F("began_at"), DurationField()))
Group = tuple[int, str, str]  # account, provider, item: who shares an allowance


class Key(NamedTuple):
    """What one cost record is about: there is one of each."""

    day: date
    account: int
    provider: str
    item: str
    agent_did: str
    environment_id: str
    holder: UUID | None
    rate: int | None


class Amount(NamedTuple):
    whole: str
    quantity: Decimal
    free: Decimal
    usd: Decimal


def price(*, now: datetime) -> Counter[str]:
    """Bring the cost records up to the usage records: how many were written and removed.

    It may stop at any step, run twice, or beside itself: each month is one transaction, under the lock of the watermark. What
    is metered meanwhile has noted its day again, which the next pass derives."""
    counts: Counter[str] = Counter()
    for begin in sorted({day.replace(day=1) for day in Unpriced.objects.values_list("day", flat=True).distinct()}):
        with transaction.atomic(durable=True):
            Watermark.hold("costs", now)
            noted = [*Unpriced.objects.filter(day__gte=begin, day__lt=following(begin))]  # before any usage is read
            written, removed = _derive(begin, sorted({row.day for row in noted})) if noted else (0, 0)
            for at in range(0, len(noted), ROWS):
                Unpriced.objects.filter(pk__in=[row.pk for row in noted[at : at + ROWS]]).delete()
            step("priced", begin)
        counts.update(written=written, removed=removed)
    return +counts


def start_over() -> None:
    """Throw the cost records away. The next `price` derives them all again."""
    with transaction.atomic(durable=True):
        Watermark.hold("costs", LONG_AGO)
        CostRecord.objects.all().delete()
        Unpriced.note(UsageRecord.objects.order_by().values_list("day", flat=True).distinct())


# --- one month --------------------------------------------------------------------------------------------------------


def _derive(begin: date, days: list[date]) -> tuple[int, int]:
    """Write what some days of a month cost, and what changes by that on its other days: allowances are used up in order."""
    rates = {rate.pk: rate for rate in Rate.objects.all()}
    account_on = _accounts()
    lines: dict[Key, int] = defaultdict(int)
    called: dict[Key, Amount] = {}
    for day in days:
        for (agent, environment, holder, provider), quantities in _of_day(day, rates.values()):
            account = account_on(agent, day)
            for (item, rate), whole in quantities:
                lines[Key(day, account, provider, item, agent, environment, holder, rate)] += whole
        for (agent, environment, holder, provider), calls, usd in _calls(day):
            key = Key(day, account_on(agent, day), provider, Priced.LLM, agent, environment, holder, None)
            called[key] = Amount(str(calls), Decimal(calls), Decimal(0), usd)
    lines = {key: whole for key, whole in lines.items() if whole}
    there = _records(day__in=days)
    touched = {key.account for each in (lines, called, there) for key in each}
    month = Q(day__gte=begin, day__lt=following(begin), account__in=touched) & ~Q(day__in=days)
    spent = _exhausted(month & Q(day__lt=days[0]), rates)
    kept = _records(month & ~Q(item=Priced.PLAN) & ~_groups(spent) & Q(rate__allowance__gt=0))
    lines.update({key: int(amount.whole) for key, (_, amount) in kept.items()})
    plans = {rate.provider for rate in rates.values() if rate.item == Priced.PLAN}
    if plans:
        there |= _records(month & Q(item=Priced.PLAN))
        used = CostRecord.objects.filter(month, provider__in=plans).exclude(item__in=[Priced.PLAN, Priced.LLM])
        in_use = {*used.order_by().values_list("account", "provider", "day").distinct()}
        in_use |= {(key.account, key.provider, key.day) for key in lines if key.provider in plans}
        lines.update(dict.fromkeys(_plans(in_use, rates.values()), 1))
    return _write(_priced(lines, rates, spent) | called, there | kept)


def _exhausted(before: Q, rates: Mapping[int, Rate]) -> set[Group]:
    """Whose allowances were used up before: not all of some line was free, so of later ones nothing is, whatever changes
    there. This spares a pass in the middle of a month from reading what came before."""
    most: dict[tuple[str, str], Decimal] = defaultdict(Decimal)
    for rate in rates.values():
        most[rate.provider, rate.item] = max(most[rate.provider, rate.item], rate.allowance)
    paid = CostRecord.objects.filter(before, free__lt=F("quantity"), rate__allowance__gt=0).order_by()
    found = paid.values_list("account", "provider", "item", "rate").distinct()
    return {(account, provider, item) for account, provider, item, pk in found if rates[pk].allowance == most[provider, item]}


def _groups(groups: Iterable[Group]) -> Q:
    some = Q(pk__in=[])
    for account, provider, item in groups:
        some |= Q(account=account, provider=provider, item=item)
    return some


def _accounts() -> Callable[[str, date], int]:
    """The account of an agent on a day."""
    house = Account.objects.get_or_create(name=HOUSE)[0].pk
    histories: dict[str, list[tuple[date, int]]] = defaultdict(list)
    for agent, since, account in Membership.objects.order_by("since").values_list("agent_did", "since", "account"):
        histories[agent].append((since, account))
    return lambda agent, day: membership.account_on(histories.get(agent, ()), day, house)


def _of_day(day: date, rates: Collection[Rate]) -> Iterator[tuple[tuple[Any, ...], list[tuple[tuple[str, int], int]]]]:
    """Who used what on a day: ((agent, environment, lease, provider), [((item, rate), quantity in the smallest units)]).

    A rate that begins in the middle of the day cuts all time in two there, and use with it. A request costs what one does at
    the day's beginning."""
    first = midnight(day)
    last = first + timedelta(days=1)
    cuts = sorted({first, last, *(rate.valid_from for rate in rates if first < rate.valid_from < last)})
    for begin, end in pairwise(cuts):
        sizes = ("memory_mib", "millicpus", "measured")
        for *who, memory_mib, millicpus, measured, lasted in _lasted(day, begin, end, *sizes, item=Item.TIME):
            size = instance_type(who[-1], memory_mib, millicpus)
            quantities = pricing.given(
                lasted // MICROSECOND, memory_mib=memory_mib, millicpus=millicpus, disk_mb=disk_mb(who[-1], size)
            )
            yield tuple(who), [*_rated(quantities, rates, who[-1], size, begin, by_use=False if measured else None)]
        for *who, memory_mib, millicpus, cpu_micros, mib_micros in _used(day, begin, end):
            quantities = pricing.used(cpu_micros=cpu_micros, mib_micros=mib_micros)
            size = instance_type(who[-1], memory_mib, millicpus)
            yield tuple(who), [*_rated(quantities, rates, who[-1], size, begin, by_use=True)]
        for *who, size_bytes, lasted in _lasted(day, begin, end, "size_bytes", item=Item.STORAGE):
            quantities = {Priced.STORAGE: lasted // MICROSECOND * size_bytes}
            yield tuple(who), [*_rated(quantities, rates, who[-1], "", begin)]
    requests = UsageRecord.objects.filter(day=day, item=Item.RUNS).order_by().values_list(*WHO, "memory_mib", "millicpus")
    for *who, memory_mib, millicpus, runs in requests.annotate(runs=Sum("calls")):
        size = instance_type(who[-1], memory_mib, millicpus)
        yield tuple(who), [*_rated({Priced.REQUEST: runs}, rates, who[-1], size, first)]


def _rated(
    quantities: Mapping[str, int], rates: Collection[Rate], provider: str, size: str, at: datetime, by_use: bool | None = None
) -> Iterator[tuple[tuple[str, int], int]]:
    """By the rates that count then; those that say so alone, if `by_use` is not None."""
    for item, whole in quantities.items():
        rate = pricing.rate_for(rates, provider, size, item, at)
        if rate and by_use in (None, rate.by_use):
            yield (str(item), rate.pk), whole


def _lasted(day: date, begin: datetime, end: datetime, *sizes: str, item: str) -> QuerySet[UsageRecord, tuple[Any, ...]]:
    """How long each lease had what it is paid for, between two moments of a day, by these sizes."""
    paid = Q(state__in=PAID) if item == Item.TIME else Q()
    rows = UsageRecord.objects.filter(paid, day=day, item=item, began_at__lt=end, ended_at__gt=begin)
    lasted = Least(F("ended_at"), Value(end)) - Greatest(F("began_at"), Value(begin))
    total = Sum(ExpressionWrapper(lasted, DurationField()))
    return rows.order_by().values_list(*WHO, *sizes).annotate(lasted=total)


def _used(day: date, begin: datetime, end: datetime) -> Iterator[tuple[Any, ...]]:
    """What each lease used of CPU and memory between two moments of a day, by the size that its sandbox was given."""
    sizes = ("sandbox__memory_mib", "sandbox__millicpus")
    rows = UsageRecord.objects.filter(day=day, item=Item.USE).order_by()
    whole = rows.filter(began_at__gte=begin, ended_at__lte=end).values_list(*WHO, *sizes)
    yield from whole.annotate(cpu=Sum("cpu_micros"), memory=Sum("mib_micros"))
    cut = rows.filter(began_at__lt=end, ended_at__gt=begin).exclude(began_at__gte=begin, ended_at__lte=end)
    for *who, cpu, memory, since, until in cut.values_list(*WHO, *sizes, "cpu_micros", "mib_micros", "began_at", "ended_at"):
        within = (since, until, max(since, begin), min(until, end))
        yield *who, part(cpu, *within), part(memory, *within)


def _calls(day: date) -> Iterator[tuple[tuple[Any, ...], int, Decimal]]:
    rows = UsageRecord.objects.filter(day=day, item=Item.TOKENS).order_by().values_list(*WHO)
    for *who, calls, nano in rows.annotate(number=Sum("calls"), nano=exactly("usd")):
        yield tuple(who), calls, nano_usd(nano)


def _plans(in_use: Iterable[tuple[int, str, date]], rates: Collection[Rate]) -> Iterator[Key]:
    """One for each account and provider: on the first day of the month on which it is used and has a plan."""
    found: set[tuple[int, str]] = set()
    for account, provider, day in sorted(in_use, key=lambda each: each[2]):
        rate = pricing.rate_for(rates, provider, "", Priced.PLAN, midnight(day))
        if rate and (account, provider) not in found:
            found.add((account, provider))
            yield Key(day, account, provider, Priced.PLAN, "", "", None, rate.pk)


def _priced(lines: Mapping[Key, int], rates: Mapping[int, Rate], spent: Collection[Group]) -> dict[Key, Amount]:
    """What each line costs, once the allowances of its account are used up in the order of time; those of `spent` are."""

    def order(key: Key) -> tuple[Any, ...]:
        rate = rates[key.rate or 0]
        return key.day, rate.valid_from, str(key.holder or ""), key.agent_did, key.environment_id, rate.instance_type

    groups: dict[Group, list[Key]] = defaultdict(list)
    for key in sorted(lines, key=order):
        groups[key.account, key.provider, key.item].append(key)
    priced = {}
    for group, keys in groups.items():
        item, used = group[2], [rates[key.rate or 0] for key in keys]
        limits = [0 if group in spent else pricing.whole_of(item, rate.allowance) for rate in used]
        frees = pricing.allot(zip((lines[key] for key in keys), limits, strict=True))
        for key, rate, free in zip(keys, used, frees, strict=True):
            whole = lines[key]
            priced[key] = Amount(
                str(whole),
                pricing.rounded(pricing.units(item, whole)),
                pricing.rounded(pricing.units(item, free)),
                pricing.rounded(pricing.cost(item, whole - free, rate.usd)),
            )
    return priced


def _records(*conditions: Q, **fields: Any) -> dict[Key, tuple[int, Amount]]:
    """Cost records that are there: what each is about -> its id and its amounts."""
    rows = CostRecord.objects.filter(*conditions, **fields).order_by()
    names = [*Key._fields, "pk", *Amount._fields]
    found = {}
    for row in rows.values_list(*names):
        found[Key(*row[:8])] = (row[8], Amount(*row[9:]))
    return found


def _write(wanted: Mapping[Key, Amount], there: Mapping[Key, tuple[int, Amount]]) -> tuple[int, int]:
    """Make the records these, and leave those alone that are so already: how many were written and removed."""
    outdated = [pk for key, (pk, amount) in there.items() if wanted.get(key) != amount]
    fresh = [
        CostRecord(account_id=key.account, rate_id=key.rate, **_without(key), **amount._asdict())
        for key, amount in wanted.items()
        if key not in there or there[key][1] != amount
    ]
    for at in range(0, len(outdated), ROWS):
        CostRecord.objects.filter(pk__in=outdated[at : at + ROWS]).delete()
    step("repriced", len(outdated))
    CostRecord.objects.bulk_create(fresh, batch_size=ROWS)
    return len(fresh), len(outdated)


def _without(key: Key) -> dict[str, Any]:
    return {name: value for name, value in key._asdict().items() if name not in ("account", "rate")}


# --- sums -------------------------------------------------------------------------------------------------------------


BY = {
    "agent": "agent_did", "lease": "holder", "environment": "environment_id", "provider": "provider", "day": "day",
    "account": "account__name", "item": "item",
}  # fmt: skip


@dataclass(frozen=True)
class Total:
    """What was used under one key, by item, how much of that was free, and what it cost. `lasted` is the time for which
    sandboxes were there; of an item it is None."""

    key: str
    quantities: dict[str, Decimal]
    free: dict[str, Decimal]
    usd: Decimal
    lasted: timedelta | None


def costs(
    by: str, *, since: date | None = None, until: date | None = None, agents: Collection[str] | None = None, **only: Any
) -> list[Total]:
    """Costs from one day up to, not including, another: the dearest first, days in their order.

    `by` and the names in `only` are those of BY; `agents` limits it to some."""
    rows = CostRecord.objects.filter(_within(since, until, agents), **{BY[name]: value for name, value in only.items()})
    sums = rows.order_by().values_list(BY[by], "item")
    sums = sums.annotate(a=exactly("quantity"), b=exactly("free"), c=exactly("usd"))
    quantities: dict[str, dict[str, Decimal]] = defaultdict(dict)
    free: dict[str, dict[str, Decimal]] = defaultdict(dict)
    usd: Counter[str] = Counter()
    for key, item, quantity, unpaid, nano in sums:
        name = _name(key)
        quantities[name][item] = nano_usd(quantity)
        if unpaid:
            free[name][item] = nano_usd(unpaid)
        usd[name] += nano
    lasted = None if by == "item" or "item" in only else hours(by, since=since, until=until, agents=agents, **only)
    names = sorted({*quantities, *(lasted or {})}, key=lambda name: (0 if by == "day" else -usd[name], name))
    return [
        Total(
            name,
            quantities.get(name, {}),
            free.get(name, {}),
            nano_usd(usd[name]),
            None if lasted is None else lasted.get(name, timedelta(0)),
        )
        for name in names
    ]


def hours(
    by: str, *, since: date | None = None, until: date | None = None, agents: Collection[str] | None = None, **only: Any
) -> dict[str, timedelta]:
    """How long sandboxes were there and ready, those of one key together, in the same days."""
    account = only.pop("account", None)
    rows = UsageRecord.objects.filter(_within(since, until, agents), item=Item.TIME, state__in=PAID).order_by()
    rows = rows.filter(**{BY[name]: value for name, value in only.items()})
    if by == "account":
        return {name: time_ for name, time_ in _by_account(rows, since).items() if account in (None, name)}
    total: dict[str, timedelta] = defaultdict(timedelta)
    for some in [Q()] if account is None else billed_to(account, since):
        for key, time_ in rows.filter(some).values_list(BY[by]).annotate(lasted=LASTED):
            total[_name(key)] += time_
    return dict(total)


def _by_account(rows: QuerySet[UsageRecord], since: date | None) -> dict[str, timedelta]:
    total: dict[str, timedelta] = defaultdict(timedelta)
    stays = dict(Membership.objects.on(since or BEGINNING).values_list("agent_did", "account__name"))
    for agent, time_ in rows.exclude(_moved(since)).values_list("agent_did").annotate(lasted=LASTED):
        total[stays.get(agent, HOUSE)] += time_
    for account, time_ in rows.filter(_moved(since)).values_list(_account_of_the_day()).annotate(lasted=LASTED):
        total[account] += time_
    return total


def billed_to(account: str, since: date | None) -> list[Q]:
    """The usage from that day on that is an account's, in two parts, which have no agent in common: that of agents which stay
    where they are, and, looked at record by record, that of the days on which the others belonged to it."""
    stays, ever = Membership.objects.on(since or BEGINNING), Q()
    if account == HOUSE:
        whole = ~Q(agent_did__in=stays.exclude(account__name=HOUSE).values("agent_did"))
    else:
        whole = Q(agent_did__in=stays.filter(account__name=account).values("agent_did"))
        ever = Q(agent_did__in=Membership.objects.filter(account__name=account).values("agent_did"))
    return [~_moved(since) & whole, _moved(since) & ever & Q(Exact(_account_of_the_day(), account))]


def _moved(since: date | None) -> Q:
    """The usage of agents that came to an account after that day."""
    return Q(agent_did__in=Membership.objects.filter(since__gt=since or BEGINNING).values("agent_did"))


def _account_of_the_day() -> Coalesce:
    begun = Membership.objects.filter(agent_did=OuterRef("agent_did"), since__lte=OuterRef("day")).order_by("-since")
    return Coalesce(Subquery(begun.values("account__name")[:1]), Value(HOUSE))


def _within(since: date | None, until: date | None, agents: Collection[str] | None) -> Q:
    within = Q() if agents is None else Q(agent_did__in=[*agents])
    if since:
        within &= Q(day__gte=since)
    if until:
        within &= Q(day__lt=until)
    return within


def _name(key: object) -> str:
    return "" if key is None else str(key)

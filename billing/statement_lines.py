"""Lines of statements: their keys, and the sums of derived and of billed costs by line."""

from collections import Counter
from collections.abc import Collection
from datetime import date
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

from django.db.models import Count, Q, Sum
from django.db.models.functions import TruncMonth

from billing import pricing
from billing.grouping import Selection
from billing.model_sums import TokenCounts
from billing.model_usage import NO_USAGE, ModelUsage
from billing.models import Account, BillableItem, CostRecord, ModelTotal, StatementLine
from billing.money_sums import nanos_to_decimal, sum_exact

ZERO_USD = Decimal("0.00")
LineGroup = tuple[date, str, str, str]  # (month, agent, provider, item): lines by rate or model


class LineKey(NamedTuple):
    """Unique key of a line within a statement. `month` is the first day of the month of use."""

    month: date
    agent_did: str
    provider: str
    item: str
    model: str
    rate: int | None

    @property
    def group(self) -> LineGroup:
        return (self.month, self.agent_did, self.provider, self.item)


class LineAmount(NamedTuple):
    """Amounts of a line. unpriced: number of model calls without a price. estimated_usd: estimated part of `usd`, in cents.

    `has_estimated_tokens` is False for lines that were billed before lines had estimated tokens, and their corrections."""

    quantity: Decimal = Decimal(0)
    free: Decimal = Decimal(0)
    usd: Decimal = ZERO_USD
    unpriced: int = 0
    estimated_usd: Decimal = ZERO_USD
    tokens: TokenCounts = TokenCounts()
    has_estimated_tokens: bool = True

    def minus(self, other: "LineAmount") -> "LineAmount":
        return LineAmount(
            self.quantity - other.quantity, self.free - other.free, self.usd - other.usd, self.unpriced - other.unpriced,
            self.estimated_usd - other.estimated_usd,
            TokenCounts(*(a - b for a, b in zip(self.tokens, other.tokens, strict=True))),
            self.has_estimated_tokens and other.has_estimated_tokens,
        )  # fmt: skip


ZERO_AMOUNT = LineAmount()


def find_whole_groups(billed: Collection[LineKey]) -> set[LineGroup]:
    """Find the groups that were billed as one line: of all rates, or of model calls of all models.

    Statements that were closed before lines had a rate, or a model, have such lines. Their corrections have them, too."""
    by_model = {key.group for key in billed if key.model}
    return {key.group for key in billed if key.rate is None and (key.item != BillableItem.LLM or key.group not in by_model)}


def sum_derived_costs(
    account: Account, *, until: date, since: date | None = None, whole: Collection[LineGroup] = ()
) -> dict[LineKey, LineAmount]:
    """Sum an account's derived costs by line, each rounded half up to cents. `since` and `until` are first days of months.

    A line's amount follows from its own quantity and rate. The groups in `whole` have one line of all rates or models. So do
    model calls while the totals by model are not derived."""
    selection = Selection(since, until, filters={"account": account.name})
    by_model = ModelTotal.are_derived()
    derived = _sum_rated_costs(selection, whole, with_calls=not by_model)
    return derived | (_sum_model_costs(selection, whole) if by_model else {})


def _sum_rated_costs(selection: Selection, whole: Collection[LineGroup], *, with_calls: bool) -> dict[LineKey, LineAmount]:
    """Sum the costs by rate. `with_calls` adds those of model calls, without their models."""
    rows = CostRecord.objects.filter(selection.build_filter()).annotate(month=TruncMonth("day")).order_by()
    rows = rows if with_calls else rows.exclude(item=BillableItem.LLM)
    groups = rows.values_list("month", "agent_did", "provider", "item", "rate", "rate__usd")
    derived: dict[LineKey, LineAmount] = {}
    nano_sums: Counter[LineKey] = Counter()
    for month, agent, provider, item, rate, rate_usd, quantity, free, nano, unpriced, estimated in groups.annotate(
        a=sum_exact("quantity"), b=sum_exact("free"), c=sum_exact("usd"), d=Sum("unpriced"), e=sum_exact("estimated_usd")
    ):
        group = (month, agent, provider, item)
        key = LineKey(*group, "", None if group in whole else rate)
        before = derived.get(key, ZERO_AMOUNT)
        nano_sums[key] += nano
        derived[key] = LineAmount(
            before.quantity + nanos_to_decimal(quantity),
            before.free + nanos_to_decimal(free),
            round_line_usd(nano_sums[key], quantity - free, rate_usd if key.rate else None),
            before.unpriced + int(unpriced),
            before.estimated_usd + round_to_cents(int(estimated)),
        )
    return derived


def _sum_model_costs(selection: Selection, whole: Collection[LineGroup]) -> dict[LineKey, LineAmount]:
    """Sum the costs of model calls by model."""
    rows = ModelTotal.objects.filter(selection.build_filter(), period=ModelTotal.Period.AGENT_MONTH).order_by()
    sums: dict[LineKey, ModelUsage] = {}
    for month, agent, provider, model, *amounts in rows.values_list(
        "day", "agent_did", "provider", "model", *ModelUsage._fields
    ):
        group = (month, agent, provider, str(BillableItem.LLM))
        key = LineKey(*group, "" if group in whole else model, None)
        sums[key] = sums.get(key, NO_USAGE).plus(ModelUsage(*amounts))
    return {
        key: LineAmount(
            Decimal(usage.calls), Decimal(0), round_to_cents(usage.usd), usage.unpriced, round_to_cents(usage.estimated_usd),
            TokenCounts.of(usage),
        )
        for key, usage in sums.items()
    }  # fmt: skip


def round_to_cents(nanos: int) -> Decimal:
    return pricing.round_half_up(Fraction(nanos, 10**9), pricing.CENT_PLACES)


def round_line_usd(recorded: int, billable: int, rate_usd: Decimal | None) -> Decimal:
    """Return a line's amount in cents: billable quantity x rate, or the recorded costs if one of the records was limited.

    The recorded costs and the billable quantity are in billionths. The product and the recorded costs of records without a
    limit differ only by the rounding of the records to nine decimal places. Without a rate the recorded costs count."""
    if rate_usd is None:
        return round_to_cents(recorded)
    usd, product = Fraction(recorded, 10**9), Fraction(billable, 10**9) * Fraction(rate_usd)
    return pricing.round_half_up(product if abs(product - usd) < 1 else usd, pricing.CENT_PLACES)


def sum_billed_costs(account: Account) -> dict[LineKey, LineAmount]:
    """Sum the lines of an account's statements, corrections included."""
    rows = StatementLine.objects.filter(statement__account=account).order_by()
    groups = rows.values_list("for_month", "agent_did", "provider", "item", "model", "rate")
    sums = groups.annotate(
        a=sum_exact("quantity"), b=sum_exact("free"), c=sum_exact("usd"), d=Sum("unpriced"), e=sum_exact("estimated_usd"),
        f=Sum("input_tokens"), g=Sum("cached_tokens"), h=Sum("cache_written_tokens"), i=Sum("output_tokens"),
        j=Sum("estimated_tokens", default=0), k=Count("pk", filter=Q(estimated_tokens=None)),
    )  # fmt: skip
    return {
        LineKey(*key): LineAmount(
            nanos_to_decimal(quantity),
            nanos_to_decimal(free),
            nanos_to_decimal(nano).quantize(ZERO_USD),
            int(unpriced),
            nanos_to_decimal(estimated).quantize(ZERO_USD),
            TokenCounts(*map(int, tokens)),
            not unrecorded,
        )
        for *key, quantity, free, nano, unpriced, estimated, tokens, unrecorded in (
            (*row[:-6], row[-6:-1], row[-1]) for row in sums
        )
    }

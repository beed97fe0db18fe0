"""Text of amounts and quantities on billing pages."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

from django.db.models import Sum

from billing import pricing
from billing.model_sums import TokenCounts
from billing.models import CostRecord
from billing.money_sums import nanos_to_decimal, sum_exact
from billing.pricing import format_decimal
from billing.uncertainty import Uncertainty
from sandboxes.admin.base.formatting import SummaryField, build_changelist_url, format_usd


def format_money(amount: Decimal) -> str:
    """Format an amount in cents, or in full if it would round to zero."""
    cents = pricing.round_half_up(Fraction(amount), pricing.CENT_PLACES)
    return f"{cents:,.2f}" if cents or not amount else format_usd(amount)


def format_cents(amount: Decimal) -> str:
    """Format an amount that is already in whole cents."""
    return f"{amount:,.2f}"


def format_money_brief(amount: Decimal) -> str:
    """Format an amount in cents for a table column, "< 0.01" for less."""
    return "< 0.01" if 0 < amount < Decimal("0.005") else format_money(amount)


def format_money_aligned(amount: Decimal) -> str:
    """Format a small amount with four decimals, so that a column aligns."""
    return "< 0.0001" if 0 < amount < Decimal("0.00005") else f"{pricing.round_half_up(Fraction(amount), 4):,.4f}"


def format_quantity(quantity: Decimal) -> str:
    """Format a quantity in full."""
    return f"{Decimal(format_decimal(quantity)):,f}"


def format_quantity_brief(quantity: Decimal) -> str:
    """Format a quantity with at most three decimals for a table column."""
    shown = format_quantity(quantity.quantize(Decimal("0.001")))
    return shown if shown != "0" or not quantity else "< 0.001"


def describe_tokens(tokens: TokenCounts, *, signed: bool = False) -> str:
    """Describe tokens by kind, such as "1,200 in (800 cached), 40 out". Empty without tokens; `signed` for a difference.

    Estimated tokens are named as further ones: the counts of the input and the output do not include them."""
    sign = "+" if signed else ""
    if not any(tokens):
        return ""
    kinds = ((tokens.cached, "cached"), (tokens.cache_written, "written to the cache"))
    parts = ", ".join(f"{count:{sign},} {label}" for count, label in kinds if count)
    estimated = f", {tokens.estimated:{sign},} further tokens estimated" if tokens.estimated else ""
    return f"{tokens.input:{sign},} in{f' ({parts})' if parts else ''}, {tokens.output:{sign},} out{estimated}"


def build_total_cost_field(**filters: Any) -> SummaryField:
    """Build the total of the matching cost records, with a link to them. One query."""
    sums = CostRecord.objects.filter(**filters).aggregate(
        usd=sum_exact("usd"), unpriced=Sum("unpriced", default=0), estimated=sum_exact("estimated_usd")
    )
    return SummaryField(
        "Total cost",
        f"{format_money(nanos_to_decimal(sums['usd']))} USD",
        note=str(Uncertainty(int(sums["unpriced"]), nanos_to_decimal(sums["estimated"]))),
        href=build_changelist_url("billing_costrecord", slice="all", **filters),
    )

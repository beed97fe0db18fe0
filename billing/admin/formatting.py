"""How operators' pages here write money, and what something has cost."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

from billing import pricing
from billing.models import CostRecord
from billing.money_sums import nanos_to_decimal, sum_exact
from billing.pricing import format_decimal
from sandboxes.admin.base import SummaryField
from sandboxes.admin.formatting import build_changelist_url, format_usd


def format_money(amount: Decimal) -> str:
    """In cents; what is less than one, but something, in full."""
    cents = pricing.round_half_up(Fraction(amount), pricing.CENT_PLACES)
    return f"{cents:,.2f}" if cents or not amount else format_usd(amount)


def format_money_brief(amount: Decimal) -> str:
    """Money for a column: whole cents."""
    return "< 0.01" if 0 < amount < Decimal("0.005") else format_money(amount)


def format_money_aligned(amount: Decimal) -> str:
    """Money for a column of small amounts: they stand under one another."""
    return "< 0.0001" if 0 < amount < Decimal("0.00005") else f"{pricing.round_half_up(Fraction(amount), 4):,.4f}"


def format_quantity(quantity: Decimal) -> str:
    """All of a quantity."""
    return f"{Decimal(format_decimal(quantity)):,f}"


def format_quantity_brief(quantity: Decimal) -> str:
    """A quantity as far as a list needs it; its page has all of it."""
    shown = format_quantity(quantity.quantize(Decimal("0.001")))
    return shown if shown != "0" or not quantity else "< 0.001"


def build_total_cost_field(**only: Any) -> SummaryField:
    """What a lease or an agent has cost, with a link to exactly these rows. One query."""
    nano = CostRecord.objects.filter(**only).aggregate(nano=sum_exact("usd"))["nano"]
    return SummaryField(
        "Cost so far",
        f"{format_money(nanos_to_decimal(nano))} USD",
        href=build_changelist_url("billing_costrecord", slice="all", **only),
    )

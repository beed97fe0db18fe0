"""How operators' pages here write money, and what something has cost."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

from billing import pricing
from billing.models import CostRecord
from billing.money_sums import exactly, nano_usd
from billing.pricing import plain
from sandboxes.admin.base import Fact
from sandboxes.admin.formatting import rows, usd


def money(amount: Decimal) -> str:
    """In cents; what is less than one, but something, in full."""
    cents = pricing.rounded(Fraction(amount), pricing.CENTS)
    return f"{cents:,.2f}" if cents or not amount else usd(amount)


def brief(amount: Decimal) -> str:
    """Money for a column: whole cents."""
    return "< 0.01" if 0 < amount < Decimal("0.005") else money(amount)


def fixed(amount: Decimal) -> str:
    """Money for a column of small amounts: they stand under one another."""
    return "< 0.0001" if 0 < amount < Decimal("0.00005") else f"{pricing.rounded(Fraction(amount), 4):,.4f}"


def whole(quantity: Decimal) -> str:
    """All of a quantity."""
    return f"{Decimal(plain(quantity)):,f}"


def short(quantity: Decimal) -> str:
    """A quantity as far as a list needs it; its page has all of it."""
    shown = whole(quantity.quantize(Decimal("0.001")))
    return shown if shown != "0" or not quantity else "< 0.001"


def cost_so_far(**only: Any) -> Fact:
    """What a lease or an agent has cost, with a link to exactly these rows. One query."""
    nano = CostRecord.objects.filter(**only).aggregate(nano=exactly("usd"))["nano"]
    return Fact("Cost so far", f"{money(nano_usd(nano))} USD", href=rows("billing_costrecord", slice="all", **only))

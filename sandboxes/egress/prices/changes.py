"""Comparison of a price file with the rates in force, and its application: new rows for new and changed prices."""

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from sandboxes.audit import Actor
from sandboxes.db.message_fields import fit_column
from sandboxes.egress.prices.additions import add_rates
from sandboxes.egress.prices.files import PriceFile, StatedPrice
from sandboxes.models import TokenRate

KEY = ("pattern", "kind", "tokens_from", "tier")


@dataclass(frozen=True)
class PriceChange:
    """A price of a file, and the price in force that it replaces. None: there is no such rate."""

    price: StatedPrice
    present: Decimal | None

    @property
    def is_change(self) -> bool:
        return self.present != self.price.usd_per_million


def compare(file: PriceFile, *, at: datetime) -> list[PriceChange]:
    """Return each price of the file with the rate in force at a time, in the order of the file. One query."""
    patterns = {price.model for price in file.prices}
    rates = TokenRate.objects.filter(valid_from__lte=at).order_by("valid_from", "pk").values_list(*KEY, "usd_per_million")
    present = {key: usd for *key, usd in rates.iterator() if key[0] in patterns for key in [tuple(key)]}
    return [PriceChange(price, present.get((price.model, price.kind, price.tokens_from, price.tier))) for price in file.prices]


def apply_changes(
    changes: list[PriceChange], file: PriceFile, *, valid_from: datetime, note: str, actor: Actor, now: datetime
) -> int:
    """Add a rate for each new or changed price, all or none. Return their number. Raise ValidationError if one is invalid."""
    source = f"{file.source}, as of {file.as_of}" if file.as_of else file.source
    rates = [
        TokenRate(
            pattern=change.price.model, kind=change.price.kind, tokens_from=change.price.tokens_from, tier=change.price.tier,
            usd_per_million=change.price.usd_per_million, valid_from=valid_from, note=fit_column(TokenRate, "note", note),
            source=fit_column(TokenRate, "source", source if change.price.source == file.source else change.price.source),
        )
        for change in changes
        if change.is_change
    ]  # fmt: skip
    add_rates(rates, actor=actor, now=now)
    return len(rates)

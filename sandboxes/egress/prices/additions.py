"""Addition of model rates by API keys and commands, recorded with the price that each one supersedes."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from django.db import transaction

from sandboxes import audit
from sandboxes.models import TokenRate
from sandboxes.models.token_rates import find_present, save_rates


def add_rates(rates: Sequence[TokenRate], *, actor: audit.Actor, now: datetime) -> None:
    """Save new rates, all or none, and record each. Raise the errors of `save_rates`."""
    with transaction.atomic():
        present = find_present(rates)
        save_rates(rates)
        audit.record_each(((rate, _describe(rate, present)) for rate in rates), "Add model rate", actor=actor, now=now)


def _describe(rate: TokenRate, present: Mapping[Any, TokenRate]) -> str:
    before = present.get(rate.key)
    price = f"{audit.format_value(rate.stated_usd)} USD per {rate.unit_name}"
    if before is not None:
        price = f"{audit.format_value(before.stated_usd)} → {price}"
    return f"{price}, from {rate.valid_from:%Y-%m-%d %H:%M} UTC, {rate.source}"

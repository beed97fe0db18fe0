"""Builders of model rates for tests."""

from datetime import datetime, timedelta
from decimal import Decimal

from sandboxes.models import TokenRate
from tests.conftest import NOW


def build_rates(
    pattern: str, *, since: datetime = NOW - timedelta(days=1), tier: str = "", tokens_from: int = 0, **usd: str | float
) -> list[TokenRate]:
    """Return unsaved rows, one for each kind: `build_rates("gpt-*", input=2.5, output=10)`."""
    return [
        TokenRate(
            pattern=pattern,
            kind=kind,
            usd_per_million=Decimal(str(price)),
            valid_from=since,
            tier=tier,
            tokens_from=tokens_from,
        )
        for kind, price in usd.items()
    ]


def create_rates(pattern: str, *, since: datetime = NOW - timedelta(days=1), **usd: str | float) -> list[TokenRate]:
    """Insert rows, one for each kind."""
    return TokenRate.objects.bulk_create(build_rates(pattern, since=since, **usd))

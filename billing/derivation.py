"""Derivation of usage and costs in one step, and their reset for a rebuild."""

from collections import Counter
from datetime import datetime

from billing import costs, metering
from billing.horizon import REBUILD_WATERMARK, advance_horizon
from billing.models import Watermark
from sandboxes.db import database_time


def derive_usage_and_costs(*, now: datetime) -> tuple[Counter[str], Counter[str]]:
    """Derive usage up to `now`, then costs. Return the counts of `metering.meter_usage` and of `costs.price_usage`."""
    mark = Watermark.objects.filter(name=REBUILD_WATERMARK).first()
    counts = metering.meter_usage(now=now), costs.price_usage(now=now)
    if mark:  # the filter by time keeps the mark of a reset during this pass, whose rebuild is not complete
        Watermark.objects.filter(name=REBUILD_WATERMARK, at=mark.at).delete()
    advance_horizon(now=now)
    return counts


def reset_usage_and_costs() -> None:
    """Delete usage from the horizon on, and all costs. The next `derive_usage_and_costs` rebuilds the same records.

    Until then `horizon.is_rebuilding` is true and budgets ignore the incomplete sums."""
    Watermark.objects.update_or_create(name=REBUILD_WATERMARK, defaults={"at": database_time.now()})
    metering.reset_usage()
    costs.reset_costs()

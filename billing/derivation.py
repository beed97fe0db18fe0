"""Usage and costs together: brought up to date, or thrown away to be derived anew."""

from collections import Counter
from datetime import datetime

from django.utils import timezone

from billing import costs, metering
from billing.models import Watermark

REBUILD_WATERMARK = "anew"  # this mark is there from when all was thrown away until all of it is there again


def derive_usage_and_costs(*, now: datetime) -> tuple[Counter[str], Counter[str]]:
    """Bring usage, and then costs, up to now; what `metering.meter` and `costs.price` did."""
    mark = Watermark.objects.filter(name=REBUILD_WATERMARK).first()
    done = metering.meter_usage(now=now), costs.price_usage(now=now)
    if mark:  # and not another one, if all was thrown away again meanwhile
        Watermark.objects.filter(name=REBUILD_WATERMARK, at=mark.at).delete()
    return done


def reset_usage_and_costs() -> None:
    """Throw usage and costs away. The next `derive` makes both what they were; until it has, nobody judges by their sums."""
    Watermark.objects.update_or_create(name=REBUILD_WATERMARK, defaults={"at": timezone.now()})
    metering.reset_usage()
    costs.reset_costs()


def is_rebuilding() -> bool:
    """Is some of what was used or spent not there, because all is derived anew?"""
    return Watermark.objects.filter(name=REBUILD_WATERMARK).exists()

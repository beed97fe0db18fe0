"""Usage and costs together: brought up to date, or thrown away to be derived anew."""

from collections import Counter
from datetime import datetime

from django.utils import timezone

from billing import costs, metering
from billing.models import Watermark

ANEW = "anew"  # this mark is there from when all was thrown away until all of it is there again


def derive(*, now: datetime) -> tuple[Counter[str], Counter[str]]:
    """Bring usage, and then costs, up to now; what `metering.meter` and `costs.price` did."""
    mark = Watermark.objects.filter(name=ANEW).first()
    done = metering.meter(now=now), costs.price(now=now)
    if mark:  # and not another one, if all was thrown away again meanwhile
        Watermark.objects.filter(name=ANEW, at=mark.at).delete()
    return done


def start_over() -> None:
    """Throw usage and costs away. The next `derive` makes both what they were; until it has, nobody judges by their sums."""
    Watermark.objects.update_or_create(name=ANEW, defaults={"at": timezone.now()})
    metering.start_over()
    costs.start_over()


def unfinished() -> bool:
    """Is some of what was used or spent not there, because all is derived anew?"""
    return Watermark.objects.filter(name=ANEW).exists()

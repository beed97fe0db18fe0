"""Horizon of the derivation: usage of the days before it is final, because the facts that it is derived from may be deleted.

The horizon is a watermark that only advances. `find_facts_end` says up to when facts may be deleted."""

from datetime import datetime, timedelta

from django.conf import settings
from django.db import transaction

from billing.dates import EPOCH, start_of_day, to_utc_date
from billing.models import Unpriced, Watermark

HORIZON_WATERMARK = "facts"
REBUILD_WATERMARK = "anew"  # a row with this name exists from a reset until the derivation after it is complete
MIN_PERIOD = timedelta(days=2)  # the usage of today and yesterday still changes
CLOCK_MARGIN = timedelta(days=1)  # clocks of hosts, and of one host after a correction, differ by less


def get_horizon() -> datetime:
    """Return the horizon, midnight UTC of a day; EPOCH before the first one.

    Metering reads it in each batch, under the lock of its watermark: a reset between two batches deletes usage from a later
    horizon on, and an earlier value would add usage to final days."""
    return Watermark.objects.filter(name=HORIZON_WATERMARK).values_list("at", flat=True).first() or EPOCH


def hold_horizon() -> datetime:
    """Like `get_horizon`. The horizon does not change until the transaction ends."""
    return Watermark.hold(HORIZON_WATERMARK, EPOCH)


def advance_horizon(*, now: datetime) -> None:
    """Move the horizon to LEASEHOLD_KEEP_HISTORY before `now`, at the start of a day. Call it after a complete derivation.

    Without effect during a rebuild, which needs the facts that the usage of its days is derived from, and while a day before it
    is not priced."""
    until = start_of_day(to_utc_date(now - max(settings.KEEP_HISTORY, MIN_PERIOD)))
    with transaction.atomic(durable=True):
        hold_horizon()  # a reset sets its mark before it waits for this lock
        if not is_rebuilding() and not Unpriced.objects.filter(day__lt=until.date()).exists():
            Watermark.hold(HORIZON_WATERMARK, until)


def find_facts_end() -> datetime:
    """Return the time before which facts are not needed for the derivation any more."""
    return get_horizon() - CLOCK_MARGIN


def is_rebuilding() -> bool:
    """Return whether usage and costs are incomplete because a reset has not been followed by a full derivation."""
    return Watermark.objects.filter(name=REBUILD_WATERMARK).exists()

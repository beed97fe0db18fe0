"""Days and months of the calendar, UTC."""

from datetime import UTC, date, datetime, time, timedelta

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)  # before all there is
EPOCH_DATE = EPOCH.date()


def to_utc_date(at: datetime) -> date:
    return at.astimezone(UTC).date()


def start_of_day(day: date) -> datetime:
    """When a day begins."""
    return datetime.combine(day, time(), UTC)


def start_of_next_month(month: date) -> date:
    """The first day of the month after the one of this day."""
    return (month.replace(day=1) + timedelta(days=32)).replace(day=1)

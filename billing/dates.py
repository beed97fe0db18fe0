"""Days and months of the calendar, UTC."""

from datetime import UTC, date, datetime, time, timedelta

LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)  # before all there is
BEGINNING = LONG_AGO.date()


def day_of(at: datetime) -> date:
    return at.astimezone(UTC).date()


def midnight(day: date) -> datetime:
    """When a day begins."""
    return datetime.combine(day, time(), UTC)


def following(month: date) -> date:
    """The first day of the month after the one of this day."""
    return (month.replace(day=1) + timedelta(days=32)).replace(day=1)

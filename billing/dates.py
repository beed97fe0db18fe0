"""Calendar days and months in UTC."""

from datetime import UTC, date, datetime, time, timedelta

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)  # earlier than any recorded fact
EPOCH_DATE = EPOCH.date()


def to_utc_date(at: datetime) -> date:
    return at.astimezone(UTC).date()


def start_of_day(day: date) -> datetime:
    """Return midnight UTC at the start of `day`."""
    return datetime.combine(day, time(), UTC)


def start_of_hour(at: datetime) -> datetime:
    """Return the last full hour UTC."""
    return at.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


def start_of_next_month(day: date) -> date:
    """Return the first day of the month after the month of `day`."""
    return (day.replace(day=1) + timedelta(days=32)).replace(day=1)

"""State intervals of a sandbox and their division into UTC days. No database access."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from uuid import UUID

from billing.dates import start_of_day, start_of_hour
from sandboxes.models import SandboxState

MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True)
class StateInterval:
    """Time of one sandbox in one state. `transition` is the id of the transition that began it.

    An open interval lasts beyond `ended_at`, which is the end of metering."""

    transition: int
    state: str
    holder: UUID | None
    began_at: datetime
    ended_at: datetime
    open: bool = False


def build_intervals(
    transitions: Iterable[tuple[int, str, UUID | None, datetime]], *, until: datetime
) -> Iterator[StateInterval]:
    """Yield the intervals of one sandbox up to `until`, from its transitions (id, to, holder, at) ordered by id.

    An open interval in the state cold ends at the last full hour: this time is not billed, and there are more cold sandboxes
    than others, whose records would otherwise be written again by each pass. Its end is exact once the state has changed.
    If the clock jumped back between two transitions, the second one takes the time of the first. Intervals therefore never
    overlap, and their sum never exceeds the range of the recorded times."""
    last: tuple[int, str, UUID | None, datetime] | None = None
    for pk, to, holder, at in transitions:
        if last is not None:
            at = max(at, last[3])
            yield StateInterval(last[0], last[1], last[2], last[3], at)
        last = (pk, to, holder, at)
    if last is not None and last[1] != SandboxState.DESTROYED:
        ended = start_of_hour(until) if last[1] == SandboxState.COLD else until
        yield StateInterval(*last, max(ended, last[3]), open=True)


def split_by_day(began: datetime, ended: datetime) -> Iterator[tuple[date, datetime, datetime]]:
    """Yield (day, start, end) for each UTC day of an interval. An empty interval yields nothing."""
    began, ended = began.astimezone(UTC), ended.astimezone(UTC)
    while began < ended:
        end = start_of_day(began.date() + timedelta(days=1))
        yield began.date(), began, min(end, ended)
        began = end


def prorate(amount: int, since: datetime, until: datetime, began: datetime, ended: datetime) -> int:
    """Return the part from `began` to `ended` of an amount used evenly from `since` to `until`.

    Parts are rounded so that adjacent parts add up to the whole amount."""
    duration = (until - since) // MICROSECOND
    first, last = ((moment - since) // MICROSECOND for moment in (began, ended))
    return amount * last // duration - amount * first // duration

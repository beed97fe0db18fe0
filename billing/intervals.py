"""State intervals of a sandbox and their division into days. No database access."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from uuid import UUID

from billing.dates import start_of_day
from sandboxes.models import SandboxState

MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True)
class StateInterval:
    """One sandbox's time in one state. `transition` is the one that began it; open: it is not over yet."""

    transition: int
    state: str
    holder: UUID | None
    began_at: datetime
    ended_at: datetime
    open: bool = False


def build_intervals(
    transitions: Iterable[tuple[int, str, UUID | None, datetime]], *, until: datetime
) -> Iterator[StateInterval]:
    """The life of one sandbox from its transitions (id, to, holder, at), in the order of their ids, up to `until`.

    A clock may have jumped back between two of them. Then the earlier one's moment counts for both: so the intervals never
    overlap, and their sum is what the clock has shown at most."""
    last: tuple[int, str, UUID | None, datetime] | None = None
    for pk, to, holder, at in transitions:
        if last is not None:
            at = max(at, last[3])
            yield StateInterval(last[0], last[1], last[2], last[3], at)
        last = (pk, to, holder, at)
    if last is not None and last[1] != SandboxState.DESTROYED:
        yield StateInterval(*last, max(until, last[3]), open=True)


def split_by_day(began: datetime, ended: datetime) -> Iterator[tuple[date, datetime, datetime]]:
    """The parts of a time, one for each day of UTC; none of no time at all."""
    began, ended = began.astimezone(UTC), ended.astimezone(UTC)
    while began < ended:
        end = start_of_day(began.date() + timedelta(days=1))
        yield began.date(), began, min(end, ended)
        began = end


def prorate(whole: int, since: datetime, until: datetime, began: datetime, ended: datetime) -> int:
    """How much of what was used evenly from `since` to `until` was used in a time within: parts that follow one another add
    up to the whole."""
    lasted = (until - since) // MICROSECOND
    first, last = ((moment - since) // MICROSECOND for moment in (began, ended))
    return whole * last // lasted - whole * first // lasted

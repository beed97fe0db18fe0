"""Roll-up of usage: one record for all facts of one sandbox, lease and state within one part of an hour.

A record for each fact would add two rows for each command. Facts that lie within one UTC hour, and on one side of every start
of a rate of their provider, are summed instead. Hours, days and rates therefore divide rolled-up usage exactly as they divide
its facts. Other facts, such as hours of idle time, have a record of their own for each day."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime, timedelta

from billing.dates import start_of_hour
from billing.models import Rate, UsageKind, UsageRecord

BATCH_SIZE = 500  # rows per statement; SQLite limits the number of values
HOUR = timedelta(hours=1)
ADDED_FIELDS = ("began_at", "ended_at", "memory_mib", "cpu_micros", "mib_micros")


class HourParts:
    """Division of time at the full hours UTC, and at the starts of each provider's rates.

    A rate never begins in the past (Rate.clean), so the parts of time that has passed do not change."""

    def __init__(self) -> None:
        self._rate_starts: dict[str, list[datetime]] = defaultdict(list)
        for provider, start in Rate.objects.order_by("valid_from").values_list("provider", "valid_from"):
            self._rate_starts[provider].append(start)

    def find_start(self, provider: str, began: datetime, ended: datetime) -> datetime | None:
        """Return the start of the part that contains a whole time range, or None."""
        start = start_of_hour(began)
        end, starts = start + HOUR, self._rate_starts.get(provider, [])
        following = bisect_right(starts, began)
        if following:
            start = max(start, starts[following - 1])
        if following < len(starts):
            end = min(end, starts[following])
        return start if ended <= end else None


def add_usage(records: Iterable[UsageRecord], parts: HourParts) -> int:
    """Add the records of facts that have ended to the usage. Return the number of rows written.

    Not idempotent: call it in the transaction that marks the facts as metered, under the lock of their watermark. The order in
    which facts are added does not change the result."""
    rolled_up: dict[tuple[str, object], UsageRecord] = {}
    others: list[UsageRecord] = []
    for record in records:
        start = parts.find_start(record.provider, record.began_at, record.ended_at)
        if start is None:
            others.append(record)
            continue
        record.source = _format_source(record, start)
        earlier = rolled_up.setdefault((record.source, record.day), record)
        if earlier is not record:
            _add(earlier, record)
    sums = [*rolled_up.values()]
    for first in range(0, len(sums), BATCH_SIZE):
        batch = {(each.source, each.day): each for each in sums[first : first + BATCH_SIZE]}
        same = UsageRecord.objects.filter(source__in={source for source, _ in batch}, day__in={day for _, day in batch})
        for stored in same.order_by().only("source", "day", "item", *ADDED_FIELDS):
            if total := batch.get((stored.source, stored.day)):
                _add(total, stored)
    UsageRecord.objects.bulk_create(
        sums, batch_size=BATCH_SIZE, update_conflicts=True, unique_fields=["source", "day"], update_fields=ADDED_FIELDS
    )
    UsageRecord.objects.bulk_create(others, batch_size=BATCH_SIZE)
    return len(sums) + len(others)


def _add(total: UsageRecord, record: UsageRecord) -> None:
    """Add a record to another of the same part of an hour.

    Time ends at its start plus its duration. The facts of a sandbox do not overlap, so that end is within the part as well."""
    began = min(total.began_at, record.began_at)
    if total.item == UsageKind.TIME:
        total.ended_at = began + (total.ended_at - total.began_at) + (record.ended_at - record.began_at)
    else:
        total.ended_at = max(total.ended_at, record.ended_at)
    total.began_at = began
    total.memory_mib = max(total.memory_mib, record.memory_mib)
    total.cpu_micros += record.cpu_micros
    total.mib_micros += record.mib_micros


def _format_source(record: UsageRecord, start: datetime) -> str:
    """Name the facts of a rolled-up record. Together with the day the name is unique."""
    kind, holder = record.state or record.item, record.holder or "no lease"
    return f"{kind} in {record.sandbox_id} for {holder} from {start.time().isoformat()}"

"""Event logs of a lease (chat history, audit log), stored as one key per event or as a journal."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sandboxes.storage.base import KeyValueStore
from sandboxes.stores.journal import Journal, Record, Stamp, create_stamp
from sandboxes.stores.limits import (
    COMPACTION_MIN_SEGMENTS,
    DEFAULT_LIMITS,
    PruneResult,
    RetentionBounds,
    StoreLimits,
    check_size,
    compact_journal,
    count_segments,
    encode_json,
    parse_stamped_key,
)


class EventLog(ABC):
    """Storage of event payloads, in the order of their stamps."""

    @abstractmethod
    def append(self, payload: bytes, *, now: datetime) -> Stamp:
        """Store a payload durably until it is pruned."""

    @abstractmethod
    def read(self, stamp: Stamp) -> bytes | None: ...

    @abstractmethod
    def page(self, *, after: Stamp | None, newest_first: bool, limit: int) -> tuple[list[Record], bool]:
        """Return up to `limit` records that follow the stamp `after` in the given order, and whether there are more."""

    @abstractmethod
    def prune(self, bounds: RetentionBounds) -> PruneResult: ...


class KeyEventLog(EventLog):
    """Event log with one key per event. A page costs one listing of all keys and one read per event of the page."""

    def __init__(self, store: KeyValueStore, prefix: str) -> None:
        self.store, self.prefix = store, f"{prefix}/events"

    def append(self, payload: bytes, *, now: datetime) -> Stamp:
        stamp = create_stamp(now)
        self.store.set(f"{self.prefix}/{stamp}.{len(payload)}", payload)
        return stamp

    def read(self, stamp: Stamp) -> bytes | None:
        entries = self.store.page(f"{self.prefix}/{stamp}.", limit=1).entries
        return self.store.get(entries[0].key) if entries else None

    def page(self, *, after: Stamp | None, newest_first: bool, limit: int) -> tuple[list[Record], bool]:
        keys, has_more = _paginate([*self._keys()], after, newest_first, limit)
        values = ((stamp, self.store.get(key)) for stamp, _, key in keys)
        return [Record(stamp, value) for stamp, value in values if value is not None], has_more  # None: pruned since

    def prune(self, bounds: RetentionBounds) -> PruneResult:
        keys = [*self._keys()]
        removable = keys[: bounds.count_surplus([(stamp.at, size) for stamp, size, _ in keys])]
        self.store.remove_many([key for _, _, key in removable])
        return PruneResult.from_sizes(size for _, size, _ in removable)

    def _keys(self) -> Iterator[tuple[Stamp, int, str]]:
        return ((*parse_stamped_key(key), key) for key in self.store.list(f"{self.prefix}/"))


class JournalEventLog(EventLog):
    """Event log with one journal record per event. A page replays the whole journal."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def append(self, payload: bytes, *, now: datetime) -> Stamp:
        return self.journal.append(payload, now=now)[0]

    def read(self, stamp: Stamp) -> bytes | None:
        return next((record.payload for record in self.journal.replay().records if record.stamp == stamp), None)

    def page(self, *, after: Stamp | None, newest_first: bool, limit: int) -> tuple[list[Record], bool]:
        return _paginate(self.journal.replay().records, after, newest_first, limit)

    def prune(self, bounds: RetentionBounds) -> PruneResult:
        def count_surplus(records: Sequence[Record]) -> int:
            return bounds.count_surplus([(record.stamp.at, len(record.payload)) for record in records])

        is_compaction_due = count_segments(self.journal) >= COMPACTION_MIN_SEGMENTS
        if not is_compaction_due and not count_surplus(self.journal.replay().records):
            return PruneResult()
        dropped = compact_journal(self.journal, lambda records: records[count_surplus(records) :])
        return PruneResult.from_sizes(len(record.payload) for record in dropped)


@dataclass(frozen=True)
class Event:
    """A document in an event log."""

    stamp: Stamp
    actor: str
    document: dict[str, Any]

    @property
    def id(self) -> str:
        return str(self.stamp)

    @property
    def at(self) -> datetime:
        return self.stamp.at


class EventStore:
    """Append-only JSON documents, ordered by their stamps: by the clocks of the processes that appended them."""

    def __init__(self, log: EventLog, limits: StoreLimits = DEFAULT_LIMITS) -> None:
        self.log, self.limits = log, limits

    def append(self, document: Mapping[str, Any], *, now: datetime, actor: str = "") -> Event:
        """Append a document. Raise StoreRefused if it is too large."""
        check_size("append", "event", len(encode_json(document)), self.limits.max_event_bytes)
        payload = encode_json({"actor": actor, "said": document})
        return self._event(self.log.append(payload, now=now), payload)

    def read(self, event_id: str) -> Event | None:
        """Return an event; None if the id is unknown or malformed."""
        stamp = parse_stamp(event_id)
        payload = self.log.read(stamp) if stamp else None
        return self._event(stamp, payload) if stamp and payload is not None else None

    def page(self, *, after: Stamp | None = None, newest_first: bool = True, limit: int = 50) -> tuple[list[Event], bool]:
        """Return up to `limit` events that follow the stamp `after`, and whether there are more.

        A process whose clock is behind may append an event with a stamp before the end of the last page. A reader that pages
        oldest first misses this event."""
        records, has_more = self.log.page(after=after, newest_first=newest_first, limit=limit)
        return [self._event(record.stamp, record.payload) for record in records], has_more

    def prune(self, bounds: RetentionBounds) -> PruneResult:
        """Remove the oldest events beyond the bounds."""
        return self.log.prune(bounds)

    def _event(self, stamp: Stamp, payload: bytes) -> Event:
        row = json.loads(payload)
        return Event(stamp, row["actor"], row["said"])


def parse_stamp(text: str) -> Stamp | None:
    """Return the stamp of an event id; None if the id is malformed."""
    try:
        return Stamp.parse(text)
    except ValueError:
        return None


def _paginate(records: Sequence[Any], after: Stamp | None, newest_first: bool, limit: int) -> tuple[list[Any], bool]:
    """Return one page of `records`, which begin with a stamp and are sorted oldest first, and whether there are more."""
    ordered = records[::-1] if newest_first else records
    rest = [record for record in ordered if after is None or (record[0] < after if newest_first else record[0] > after)]
    return rest[:limit], len(rest) > limit

"""Events of one kind of a lease, its chat history or its audit log, on a key for each or on a journal."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sandboxes.storage.base import KeyValueStore
from sandboxes.stores.journal import WRITER, Journal, Record, Stamp
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
    """Payloads in the order of their stamps."""

    @abstractmethod
    def append(self, payload: bytes, *, now: datetime) -> Stamp:
        """It is stored, to stay until it is pruned."""

    @abstractmethod
    def read(self, stamp: Stamp) -> bytes | None: ...

    @abstractmethod
    def page(self, *, behind: Stamp | None, newest_first: bool, limit: int) -> tuple[list[Record], bool]:
        """Some records, those behind a stamp in this order, and whether there are more."""

    @abstractmethod
    def prune(self, bounds: RetentionBounds) -> PruneResult: ...


class KeyEventLog(EventLog):
    """A key for each. A page reads the keys of them all and the values of its own."""

    def __init__(self, store: KeyValueStore, prefix: str) -> None:
        self.store, self.prefix = store, f"{prefix}/events"

    def append(self, payload: bytes, *, now: datetime) -> Stamp:
        stamp = WRITER.stamp(now)
        self.store.set(f"{self.prefix}/{stamp}.{len(payload)}", payload)
        return stamp

    def read(self, stamp: Stamp) -> bytes | None:
        found = self.store.page(f"{self.prefix}/{stamp}.", limit=1).entries
        return self.store.get(found[0].key) if found else None

    def page(self, *, behind: Stamp | None, newest_first: bool, limit: int) -> tuple[list[Record], bool]:
        keys, more = _paginate([*self._keys()], behind, newest_first, limit)
        values = ((stamp, self.store.get(key)) for stamp, _, key in keys)
        return [Record(stamp, value) for stamp, value in values if value is not None], more  # None: pruned since

    def prune(self, bounds: RetentionBounds) -> PruneResult:
        keys = [*self._keys()]
        doomed = keys[: bounds.surplus([(stamp.at, size) for stamp, size, _ in keys])]
        self.store.remove_many([key for _, _, key in doomed])
        return PruneResult.of(size for _, size, _ in doomed)

    def _keys(self) -> Iterator[tuple[Stamp, int, str]]:
        return ((*parse_stamped_key(key), key) for key in self.store.list(f"{self.prefix}/"))


class JournalEventLog(EventLog):
    """A record of a journal for each. A page replays all of it."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def append(self, payload: bytes, *, now: datetime) -> Stamp:
        return self.journal.append(payload, now=now)[0]

    def read(self, stamp: Stamp) -> bytes | None:
        return next((record.payload for record in self.journal.replay().records if record.stamp == stamp), None)

    def page(self, *, behind: Stamp | None, newest_first: bool, limit: int) -> tuple[list[Record], bool]:
        return _paginate(self.journal.replay().records, behind, newest_first, limit)

    def prune(self, bounds: RetentionBounds) -> PruneResult:
        def surplus(records: Sequence[Record]) -> int:
            return bounds.surplus([(record.stamp.at, len(record.payload)) for record in records])

        many = count_segments(self.journal) >= COMPACTION_MIN_SEGMENTS
        if not many and not surplus(self.journal.replay().records):
            return PruneResult()
        dropped = compact_journal(self.journal, lambda records: records[surplus(records) :])
        return PruneResult.of(len(record.payload) for record in dropped)


@dataclass(frozen=True)
class Event:
    stamp: Stamp
    actor: str
    said: dict[str, Any]

    @property
    def id(self) -> str:
        return str(self.stamp)

    @property
    def at(self) -> datetime:
        return self.stamp.at


class EventStore:
    """Documents in the order in which they were said, by the clocks of those who took them down."""

    def __init__(self, log: EventLog, limits: StoreLimits = DEFAULT_LIMITS) -> None:
        self.log, self.limits = log, limits

    def append(self, said: Mapping[str, Any], *, now: datetime, actor: str = "") -> Event:
        """StoreRefused if it is too large."""
        check_size("append", "event", len(encode_json(said)), self.limits.max_event_bytes)
        payload = encode_json({"actor": actor, "said": said})
        return self._event(self.log.append(payload, now=now), payload)

    def read(self, event_id: str) -> Event | None:
        """None also for what is no id at all."""
        stamp = parse_stamp(event_id)
        payload = self.log.read(stamp) if stamp else None
        return self._event(stamp, payload) if stamp and payload is not None else None

    def page(self, *, behind: Stamp | None = None, newest_first: bool = True, limit: int = 50) -> tuple[list[Event], bool]:
        """Some events, those behind this one, and whether there are more. Whoever reads on, oldest first, from the last
        that was seen misses what a slower clock has stamped earlier meanwhile."""
        records, more = self.log.page(behind=behind, newest_first=newest_first, limit=limit)
        return [self._event(record.stamp, record.payload) for record in records], more

    def prune(self, bounds: RetentionBounds) -> PruneResult:
        """The oldest go until the rest is within bounds."""
        return self.log.prune(bounds)

    def _event(self, stamp: Stamp, payload: bytes) -> Event:
        return Event(stamp, **json.loads(payload))


def parse_stamp(text: str) -> Stamp | None:
    """The stamp that an id is the text of."""
    try:
        return Stamp.parse(text)
    except ValueError:
        return None


def _paginate(every: Sequence[Any], behind: Stamp | None, newest_first: bool, limit: int) -> tuple[list[Any], bool]:
    """Of records, or tuples that begin with a stamp, oldest first."""
    ordered = every[::-1] if newest_first else every
    rest = [one for one in ordered if behind is None or (one[0] < behind if newest_first else one[0] > behind)]
    return rest[:limit], len(rest) > limit

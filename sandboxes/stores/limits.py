"""Limits, key formats and journal compaction shared by the stores of a lease."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import structlog

from sandboxes.storage.base import StoreRefused
from sandboxes.stores.journal import Journal, Record, Stamp

log = structlog.get_logger(__name__)
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}"
NAME_RULES = "1 to 128 letters, digits and . _ : @ -, the first a letter or digit"
_TOKEN_PATTERN = r"[A-Za-z0-9!#$&^_.+-]{1,100}"  # noqa: S105
MEDIA_TYPE_PATTERN = (
    rf"{_TOKEN_PATTERN}/{_TOKEN_PATTERN}"
    rf'(?: ?; ?{_TOKEN_PATTERN}=(?:{_TOKEN_PATTERN}|"[A-Za-z0-9!#$&^_.+:/ -]{{0,100}}")){{0,4}}'
)
ORPHAN_GRACE_PERIOD = timedelta(hours=1)  # longer than the time between the upload of content and its index entry
COMPACTION_MIN_SEGMENTS = 16  # journals with fewer segments are not compacted


@dataclass(frozen=True)
class StoreLimits:
    """Limits of one lease. Totals are not enforced on write: `prune` removes the oldest entries above them."""

    max_event_bytes: int = 256 << 10
    max_events: int = 10_000  # each in the chat history and in the audit log
    max_total_event_bytes: int = 64 << 20
    max_artifact_bytes: int = 64 << 20
    max_artifacts: int = 1000
    max_total_artifact_bytes: int = 1 << 30
    max_session_bytes: int = 64 << 10
    max_sessions: int = 1000


DEFAULT_LIMITS = StoreLimits()


@dataclass(frozen=True)
class RetentionBounds:
    """Retention limits of a store. None means unlimited."""

    since: datetime | None = None
    max_count: int | None = None
    max_total_bytes: int | None = None

    def count_surplus(self, entries: Sequence[tuple[datetime, int]]) -> int:
        """Return the number of oldest entries to remove. `entries` are pairs of time and size in bytes, oldest first."""
        count, size = len(entries), sum(size for _, size in entries)
        for index, (at, entry_size) in enumerate(entries):
            too_old = self.since is not None and at < self.since
            too_many = self.max_count is not None and count > self.max_count
            too_large = self.max_total_bytes is not None and size > self.max_total_bytes
            if not (too_old or too_many or too_large):
                return index
            count, size = count - 1, size - entry_size
        return len(entries)


@dataclass
class PruneResult:
    """Number and size of the removed entries, and an error message for each lease whose stores could not be pruned."""

    count: int = 0
    size: int = 0  # bytes
    failures: list[str] = field(default_factory=list)

    def __add__(self, other: "PruneResult") -> "PruneResult":
        return PruneResult(self.count + other.count, self.size + other.size, self.failures + other.failures)

    @classmethod
    def from_sizes(cls, sizes: Iterable[int]) -> "PruneResult":
        all_sizes = [*sizes]
        return cls(len(all_sizes), sum(all_sizes))


def check_size(method: str, noun: str, size: int, limit: int) -> None:
    if size > limit:
        raise StoreRefused("stores", method, f"this {noun} has {size} bytes; the limit is {limit}")


def encode_json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def parse_stamped_key(key: str) -> tuple[Stamp, int]:
    """Parse the last element of a key, `<stamp>.<size>`. Return the stamp and the size in bytes."""
    stamp, _, size = key.rpartition("/")[2].partition(".")
    return Stamp.parse(stamp), int(size)


def count_segments(journal: Journal) -> int:
    """Return the number of segments that a compaction would merge."""
    return journal.store.size(f"{journal.prefix}/log/")


def compact_journal(journal: Journal, keep: Callable[[list[Record]], list[Record]]) -> list[Record]:
    """Compact a journal, log its torn tails, and return the dropped records; none if a concurrent compaction was first."""
    result = journal.compact(keep)
    for torn in result.torn if result else ():
        log.warning("torn record", key=torn.key, offset=torn.offset, bytes=len(torn.tail))
    return result.dropped if result else []

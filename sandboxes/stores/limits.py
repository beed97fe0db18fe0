"""What the stores of a lease may hold, and how they write it down."""

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
ORPHAN_GRACE_PERIOD = timedelta(hours=1)  # what nothing names for this long is not about to be named
COMPACTION_MIN_SEGMENTS = 16  # pieces of a journal that are worth a compaction


@dataclass(frozen=True)
class StoreLimits:
    """Of one lease. More than the most is not refused: the oldest goes when `prune` comes by."""

    max_event_bytes: int = 256 << 10
    max_events: int = 10_000  # in the chat history, and in the audit log
    max_total_event_bytes: int = 64 << 20
    max_artifact_bytes: int = 64 << 20
    max_artifacts: int = 1000
    max_total_artifact_bytes: int = 1 << 30
    max_session_bytes: int = 64 << 10
    max_sessions: int = 1000


DEFAULT_LIMITS = StoreLimits()


@dataclass(frozen=True)
class RetentionBounds:
    """What may stay of something. None: whatever there is."""

    since: datetime | None = None
    most: int | None = None
    max_total_bytes: int | None = None

    def surplus(self, present: Sequence[tuple[datetime, int]]) -> int:
        """How many of these, moment and size, have to go from the front, where the oldest is."""
        count, size = len(present), sum(size for _, size in present)
        for gone, (at, bytes_) in enumerate(present):
            too_old = self.since is not None and at < self.since
            too_many = self.most is not None and count > self.most
            too_large = self.max_total_bytes is not None and size > self.max_total_bytes
            if not (too_old or too_many or too_large):
                return gone
            count, size = count - 1, size - bytes_
        return len(present)


@dataclass
class PruneResult:
    """What has gone, and one line for each lease that failed."""

    count: int = 0
    size: int = 0  # bytes
    failures: list[str] = field(default_factory=list)

    def __add__(self, other: "PruneResult") -> "PruneResult":
        return PruneResult(self.count + other.count, self.size + other.size, self.failures + other.failures)

    @classmethod
    def of(cls, sizes: Iterable[int]) -> "PruneResult":
        found = [*sizes]
        return cls(len(found), sum(found))


def check_size(method: str, what: str, size: int, most: int) -> None:
    if size > most:
        raise StoreRefused("stores", method, f"this {what} has {size} bytes and may have {most}")


def encode_json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def parse_stamped_key(key: str) -> tuple[Stamp, int]:
    """The stamp and the size that a key ends in."""
    stamp, _, size = key.rpartition("/")[2].partition(".")
    return Stamp.parse(stamp), int(size)


def count_segments(journal: Journal) -> int:
    """What a compaction would make one of."""
    return journal.store.size(f"{journal.prefix}/log/")


def compact_journal(journal: Journal, keep: Callable[[list[Record]], list[Record]]) -> list[Record]:
    """What a compaction dropped; nothing, if a rival was quicker."""
    done = journal.compact(keep)
    for torn in done.torn if done else ():
        log.warning("torn record", key=torn.key, offset=torn.offset, bytes=len(torn.tail))
    return done.dropped if done else []

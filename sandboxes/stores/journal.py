"""Append-only journal of records on a key-value store: append, replay, compact.

A record is acknowledged when `append` returns. No crash, compaction or concurrent writer loses an acknowledged record. A crash
can tear only the append in progress. Keys under the journal's prefix:

    open/<generation>            empty key, written when a compaction starts: opens the generation for appends. Never removed
    log/<generation>/<writer>    segment of one writer, on a store that supports append
    log/<generation>/<stamp>     segment of one append, on a store that does not: written once
    snap/<generation>/<stamp>    snapshot of the earlier generations; makes their segments and snapshots obsolete
    torn/<stamp>                 unreadable tail of a segment, saved by a compaction for inspection

A record is framed as length, CRC-32 and body. The body starts with the record's stamp: the caller's time, the writer, the
writer's sequence number. Replay orders records by stamp and returns each stamp once. Records are therefore in the order of the
callers' clocks, and records that one process appended at the same time keep their order.

**Concurrent appends.** Several processes append without a shared lock: a crashed machine could hold the lock, and a network
file system could ignore it. Each writer has its own keys. A process becomes a new writer after a failed append, so that only
the last record of a segment can be torn.

**Appends during a compaction.** The current generation is the highest open one. An append is acknowledged only if its
generation is still current after the write; otherwise the records are written again, to the new generation and with the same
stamps. A compaction opens the new generation before it reads the old ones. If it misses a record, the record is therefore not
acknowledged, and its append repeats the write.

**Overlapping compactions.** A compaction that finds a newer snapshot after its reads stops without writing one. Two compactions
of one generation may both write a snapshot; replay reads both, and returns each record once."""

import itertools
import os
import secrets
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from sandboxes.storage.base import KeyValueStore, StoreError

RECORD_HEADER = struct.Struct(">II")  # length and CRC-32 of the body
# Layout of the stamp at the start of each body. A body shorter than a stamp is invalid, so that a tail of zeros, which a file
# system may leave after a crash, counts as torn and not as a series of empty records.
STAMP_LAYOUT = struct.Struct(">Q8sQ")
MIN_RECORD_BYTES = RECORD_HEADER.size + STAMP_LAYOUT.size  # a record without payload
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
MAX_REPLAY_ATTEMPTS = 10  # a compaction that removes segments during a replay makes the replay start again


class Stamp(NamedTuple):
    """Identifier and sort key of a record. The text forms of stamps sort in the same order."""

    micros: int  # microseconds since 1970
    writer: str  # 16 hexadecimal digits
    number: int  # sequence number of the writer

    def __str__(self) -> str:
        return f"{self.micros:018d}-{self.writer}-{self.number:010d}"

    @property
    def at(self) -> datetime:
        return EPOCH + self.micros * MICROSECOND

    @classmethod
    def parse(cls, text: str) -> "Stamp":
        """Parse the text form of a stamp. Raise ValueError if it is malformed."""
        micros, writer, number = text.split("-")
        stamp = cls(int(micros), writer, int(number))
        if str(stamp) != text or len(bytes.fromhex(writer)) != 8:
            raise ValueError(f"not a stamp: {text[:80]!r}")
        return stamp


class Writer:
    """Identity under which a process appends. The identity changes after a failed append and in a forked child."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._numbers, self._failures = itertools.count(), itertools.count()
        self._locks = [threading.Lock() for _ in range(64)]
        self._process = secrets.token_hex(5)
        self.rename()

    def rename(self) -> None:
        # The new name sorts after the previous one, so that records of the same time keep their order.
        self.name = f"{self._process}{next(self._failures) % (1 << 24):06x}"

    def stamp(self, now: datetime) -> Stamp:
        return self.stamps(now, 1)[0]

    def stamps(self, now: datetime, count: int) -> list[Stamp]:
        name = self.name
        return [Stamp((now - EPOCH) // MICROSECOND, name, next(self._numbers)) for _ in range(count)]

    def get_lock(self, prefix: str) -> threading.Lock:
        """Return the lock that serializes the appends of this process to its segment under `prefix`. Prefixes may share it."""
        return self._locks[hash(prefix) % len(self._locks)]


WRITER = Writer()
os.register_at_fork(after_in_child=lambda: WRITER.start())


def create_stamp(now: datetime) -> Stamp:
    """Return the next stamp of this process."""
    return WRITER.stamp(now)


class Record(NamedTuple):
    stamp: Stamp
    payload: bytes


@dataclass(frozen=True)
class TornTail:
    """End of a segment that is not a complete record: an append interrupted by a crash or still in progress."""

    key: str
    offset: int
    tail: bytes


@dataclass
class ReplayResult:
    records: list[Record]  # in the order of their stamps
    torn: list[TornTail] = field(default_factory=list)


@dataclass
class CompactionResult:
    """Records dropped by a compaction, and the torn tails among its segments."""

    dropped: list[Record] = field(default_factory=list)
    torn: list[TornTail] = field(default_factory=list)


class Journal:
    """Journal under a key prefix.

    `sync` matters on the filesystem store only: with it an acknowledged record survives a crash of the machine, and not merely
    of the process."""

    def __init__(self, store: KeyValueStore, prefix: str, *, sync: bool = True, writer: Writer | None = None) -> None:
        self.store, self.prefix, self.sync, self.writer = store, prefix, sync, writer or WRITER

    def append(self, *payloads: bytes, now: datetime) -> list[Stamp]:
        """Append records durably, in this order, and return their stamps.

        Raise StoreError. Each of the records is then either stored completely or absent from a replay."""
        if not payloads:
            return []
        with self._append_lock():
            stamps = self.writer.stamps(now, len(payloads))
            frames = b"".join(encode_record(Record(*stamped_payload)) for stamped_payload in zip(stamps, payloads, strict=True))
            current = self._find_current_generation()
            while True:
                generation = current
                self._write(generation, stamps[0], frames)
                current = self._find_current_generation()
                if current == generation:
                    return stamps

    def replay(self) -> ReplayResult:
        """Return every record once, in order. Torn tails of segments are skipped and reported."""
        for _ in range(MAX_REPLAY_ATTEMPTS):
            # Segments are listed before snapshots: a segment that was removed before the second listing is contained in a
            # snapshot of that listing. A later removal makes `_read` return None.
            segments = self._list_keys("log")
            snapshots = self._list_keys("snap")
            base = max(snapshots.values(), default=0)
            kept = [key for key, generation in (segments | snapshots).items() if generation >= base]
            if result := self._read(kept):
                return result
        raise StoreError(self.store.name, "replay", "compactions kept replacing the segments", key=self.prefix)

    def compact(self, keep: Callable[[list[Record]], Iterable[Record]] | None = None) -> CompactionResult | None:
        """Write one snapshot of the records that `keep` selects (None: all), and remove the older segments and snapshots.

        Return None, without a snapshot, if another compaction was first. The next compaction completes an interrupted one."""
        generation = self._find_current_generation() + 1
        self.store.set(f"{self.prefix}/open/{generation:08d}", b"")
        snapshots = self._list_keys("snap")
        base = max(snapshots.values(), default=0)
        older = [
            key
            for key, generation_of_key in (self._list_keys("log") | snapshots).items()
            if base <= generation_of_key < generation
        ]
        result = self._read(older)
        if result is None or base >= generation or max(self._list_keys("snap").values(), default=0) > base:
            return None
        for torn in result.torn:
            self.store.set(f"{self.prefix}/torn/{self.writer.stamp(EPOCH)}", torn.tail)
        kept = result.records if keep is None else [*keep(result.records)]
        snapshot = b"".join(encode_record(record) for record in kept)
        self.store.set(f"{self.prefix}/snap/{generation:08d}/{self.writer.stamp(EPOCH)}", snapshot)
        # May remove a record that was appended after the read. Its append is not acknowledged yet, and repeats the write.
        obsolete = [
            key
            for key, generation_of_key in (self._list_keys("log") | self._list_keys("snap")).items()
            if generation_of_key < generation
        ]
        self.store.remove_many(obsolete)
        kept_stamps = {record.stamp for record in kept}
        return CompactionResult([record for record in result.records if record.stamp not in kept_stamps], result.torn)

    def _append_lock(self) -> AbstractContextManager[object]:
        return self.writer.get_lock(self.prefix) if self.store.supports_append else nullcontext()

    def _write(self, generation: int, first: Stamp, frames: bytes) -> None:
        log = f"{self.prefix}/log/{generation:08d}"
        if not self.store.supports_append:
            self.store.set(f"{log}/{first}", frames)
            return
        try:
            self.store.append(f"{log}/{first.writer}", frames, sync=self.sync)
        except BaseException:
            self.writer.rename()  # the segment may end in a torn record; a later append would be unreadable behind this record
            raise

    def _find_current_generation(self) -> int:
        return max((int(key.rpartition("/")[2]) for key in self.store.list(f"{self.prefix}/open/")), default=0)

    def _list_keys(self, kind: str) -> dict[str, int]:
        """Return the generation of each segment (`log`) or snapshot (`snap`), by key."""
        return {key: int(key.split("/")[-2]) for key in self.store.list(f"{self.prefix}/{kind}/")}

    def _read(self, keys: Sequence[str]) -> ReplayResult | None:
        """Return the records of these keys; None if a key was removed meanwhile."""
        records: dict[Stamp, Record] = {}
        torn: list[TornTail] = []
        for key in keys:
            data = self.store.get(key)
            if data is None:
                return None
            end = 0
            for record in decode_records(data):
                records[record.stamp] = record
                end += MIN_RECORD_BYTES + len(record.payload)
            if end < len(data):
                torn.append(TornTail(key, end, data[end:]))
        return ReplayResult([records[stamp] for stamp in sorted(records)], torn)


def encode_record(record: Record) -> bytes:
    stamp = record.stamp
    body = STAMP_LAYOUT.pack(stamp.micros, bytes.fromhex(stamp.writer), stamp.number) + record.payload
    return RECORD_HEADER.pack(len(body), zlib.crc32(body)) + body


def decode_records(data: bytes) -> Iterator[Record]:
    """Yield the valid records of a segment, up to the first that is torn or corrupt."""
    offset = 0
    while offset + MIN_RECORD_BYTES <= len(data):
        length, checksum = RECORD_HEADER.unpack_from(data, offset)
        body = data[offset + RECORD_HEADER.size : offset + RECORD_HEADER.size + length]
        if not STAMP_LAYOUT.size <= length == len(body) or zlib.crc32(body) != checksum:
            return
        micros, writer, number = STAMP_LAYOUT.unpack_from(body)
        yield Record(Stamp(micros, writer.hex(), number), body[STAMP_LAYOUT.size :])
        offset += RECORD_HEADER.size + length

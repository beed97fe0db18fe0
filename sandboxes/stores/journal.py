"""Append-only journal of records on a key-value store: append, replay, compact.

A record is acknowledged when `append` returns. No crash, compaction or concurrent writer loses an acknowledged record. A crash
can tear only the append in progress. Keys under the journal's prefix:

    open/<generation>            empty marker of a compaction's start: later appends belong to this generation. Never removed
    log/<generation>/<writer>    segment with one writer, if the store supports append
    log/<generation>/<stamp>     otherwise: the records of one append, written once
    snap/<generation>/<stamp>    all records of the earlier generations, which are obsolete once it exists
    torn/<stamp>                 unreadable tail of a segment, saved by a compaction for inspection

A record is framed as length, CRC-32 and body. The body starts with the record's stamp: the caller's time, the writer, the
writer's sequence number. Replay orders records by stamp and returns each stamp once. The order is therefore that of the
callers' clocks, and records that one process appended at the same time keep their order.

Several processes append concurrently without a shared lock, because a lock can be held by a crashed machine, or be ineffective
on a network file system. Instead every writer has its own keys, and a process becomes a new writer after a failed append, so
that only the last record of a segment can be torn. An append is acknowledged only if its generation is still current after the
write; otherwise the records are written again to the new generation, with the same stamps. A compaction opens the new
generation before it reads the old ones: a record that it misses was not acknowledged at that time. Compactions may overlap: one
that finds after reading that another has finished stops without an effect, and two snapshots of one generation hold the same
records, which count once."""

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
# The body starts with the stamp. An empty body is invalid, so that a tail of zeros is torn and not a series of records.
STAMP_LAYOUT = struct.Struct(">Q8sQ")
MIN_RECORD_BYTES = RECORD_HEADER.size + STAMP_LAYOUT.size  # a record without payload
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
MAX_REPLAY_ATTEMPTS = 10  # replays restarted because compactions removed their segments


class Stamp(NamedTuple):
    """Identifier and sort key of a record. Its text form sorts the same way."""

    micros: int  # microseconds since 1970
    writer: str  # 16 hexadecimal digits
    number: int

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
    """Identity under which a process appends. A failed append and a fork start a new identity."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._numbers, self._failures = itertools.count(), itertools.count()
        self._locks = [threading.Lock() for _ in range(64)]
        self._process = secrets.token_hex(5)
        self.rename()

    def rename(self) -> None:
        self.name = f"{self._process}{next(self._failures) % (1 << 24):06x}"  # sorts after the previous name

    def stamp(self, now: datetime) -> Stamp:
        return self.stamps(now, 1)[0]

    def stamps(self, now: datetime, count: int) -> list[Stamp]:
        name = self.name
        return [Stamp((now - EPOCH) // MICROSECOND, name, next(self._numbers)) for _ in range(count)]

    def lock(self, prefix: str) -> threading.Lock:
        """Return the lock that serializes appends to one segment between the threads of this process."""
        return self._locks[hash(prefix) % len(self._locks)]


WRITER = Writer()
os.register_at_fork(after_in_child=WRITER.start)


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
    records: list[Record]  # in order
    torn: list[TornTail] = field(default_factory=list)


@dataclass
class CompactionResult:
    """Records dropped by a compaction, and the tails that it could not read."""

    dropped: list[Record] = field(default_factory=list)
    torn: list[TornTail] = field(default_factory=list)


class Journal:
    """Journal under a key prefix.

    With `sync` an acknowledged record survives a crash of the machine also on the filesystem store. On other stores it always
    does."""

    def __init__(self, store: KeyValueStore, prefix: str, *, sync: bool = True, writer: Writer = WRITER) -> None:
        self.store, self.prefix, self.sync, self.writer = store, prefix, sync, writer

    def append(self, *payloads: bytes, now: datetime) -> list[Stamp]:
        """Append records durably, in this order, and return their stamps.

        Raise StoreError; then each record may or may not be stored, but none is torn in a replay."""
        if not payloads:
            return []
        with self._append_lock():
            stamps = self.writer.stamps(now, len(payloads))
            frames = b"".join(encode_record(Record(*stamped_payload)) for stamped_payload in zip(stamps, payloads, strict=True))
            current = self._generation()
            while True:
                generation = current
                self._write(generation, stamps[0], frames)
                current = self._generation()
                if current == generation:
                    return stamps

    def replay(self) -> ReplayResult:
        """Return every record once, in order. Torn tails of segments are skipped and reported."""
        for _ in range(MAX_REPLAY_ATTEMPTS):
            # Segments are listed before snapshots: a segment removed since is contained in a snapshot of the second listing.
            segments = self._list_generations("log")
            snapshots = self._list_generations("snap")
            base = max(snapshots.values(), default=0)
            kept = [key for key, generation in (segments | snapshots).items() if generation >= base]
            if result := self._read(kept):
                return result
        raise StoreError(self.store.name, "replay", "compactions kept replacing the segments", key=self.prefix)

    def compact(self, keep: Callable[[list[Record]], Iterable[Record]] | None = None) -> CompactionResult | None:
        """Write one snapshot of the records that `keep` selects (None: all), and remove the older segments and snapshots.

        Return None, without a change, if another compaction was first. After a crash the next compaction completes the work."""
        generation = self._generation() + 1
        self.store.set(f"{self.prefix}/open/{generation:08d}", b"")
        snapshots = self._list_generations("snap")
        base = max(snapshots.values(), default=0)
        older = [
            key
            for key, generation_of_key in (self._list_generations("log") | snapshots).items()
            if base <= generation_of_key < generation
        ]
        result = self._read(older)
        if result is None or base >= generation or max(self._list_generations("snap").values(), default=0) > base:
            return None
        for torn in result.torn:
            self.store.set(f"{self.prefix}/torn/{self.writer.stamp(EPOCH)}", torn.tail)
        kept = result.records if keep is None else [*keep(result.records)]
        snapshot = b"".join(encode_record(record) for record in kept)
        self.store.set(f"{self.prefix}/snap/{generation:08d}/{self.writer.stamp(EPOCH)}", snapshot)
        # A record appended too late to be read was not acknowledged, and is written again to the new generation.
        obsolete = [
            key
            for key, generation_of_key in (self._list_generations("log") | self._list_generations("snap")).items()
            if generation_of_key < generation
        ]
        self.store.remove_many(obsolete)
        kept_stamps = {record.stamp for record in kept}
        return CompactionResult([record for record in result.records if record.stamp not in kept_stamps], result.torn)

    def _append_lock(self) -> AbstractContextManager[object]:
        return self.writer.lock(self.prefix) if self.store.supports_append else nullcontext()

    def _write(self, generation: int, first: Stamp, frames: bytes) -> None:
        log = f"{self.prefix}/log/{generation:08d}"
        if not self.store.supports_append:
            self.store.set(f"{log}/{first}", frames)
            return
        try:
            self.store.append(f"{log}/{first.writer}", frames, sync=self.sync)
        except BaseException:
            self.writer.rename()  # the segment may end in a torn record, which must stay the last
            raise

    def _generation(self) -> int:
        return max((int(key.rpartition("/")[2]) for key in self.store.list(f"{self.prefix}/open/")), default=0)

    def _list_generations(self, kind: str) -> dict[str, int]:
        """Return the keys of segments (`log`) or snapshots (`snap`) with their generation."""
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

"""An append-only journal of records over a key-value store: append, replay, compact.

A record is acknowledged when `append` returns, and is then never lost: by no crash, no compaction, no other writer. What
a crash can tear is the one append that was under way. Keys under the journal's prefix:

    open/<generation>            empty; says that a compaction began, and which generation appends belong to since. They stay
    log/<generation>/<writer>    a segment, where the store can append; it has one writer
    log/<generation>/<stamp>     elsewhere: the records of one append, written once
    snap/<generation>/<stamp>    all records of the generations before this one, which are obsolete as soon as it is there
    torn/<stamp>                 what a compaction found and could not read, for a person to look at

A record is framed as length, CRC-32 and body, and the body starts with the record's stamp: the caller's time, the writer,
the writer's count. Records are replayed in the order of their stamps, and one stamp once. So the order is that of the
callers' clocks, and what one process appended at one moment stays in the order in which it did.

Several processes append at once. No lock is shared between them, since a lock held by a machine that is gone, or one that
a network file system only pretends to give, would cost more than it saves: instead every writer has keys of its own, and a
process that failed in the middle of an append is a new writer from then on, so that only the last record of a segment can
be torn. An append is acknowledged only if the generation is, after the write, still the one that was written to; if not,
the records are written again, under the same stamps, to the new one. A compaction opens the new generation before it
reads the old ones: whatever it could miss was not acknowledged then. Compactions may overlap as well: one that finds, after
reading, that a rival has finished gives up; two snapshots of one generation hold the same records, which count once."""

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
STAMP_LAYOUT = struct.Struct(">Q8sQ")  # the body's beginning. An empty body is none: a tail of zeros is torn, not empty records
MIN_RECORD_BYTES = RECORD_HEADER.size + STAMP_LAYOUT.size  # bytes of a record without payload
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
MAX_REPLAY_ATTEMPTS = 10  # of a replay that compactions take the segments from under


class Stamp(NamedTuple):
    """What names a record and orders it; as text it sorts the same way."""

    micros: int  # since 1970
    writer: str  # 16 hexadecimal digits
    number: int

    def __str__(self) -> str:
        return f"{self.micros:018d}-{self.writer}-{self.number:010d}"

    @property
    def at(self) -> datetime:
        return EPOCH + self.micros * MICROSECOND

    @classmethod
    def parse(cls, text: str) -> "Stamp":
        """The stamp with this text; ValueError if there is none."""
        micros, writer, number = text.split("-")
        stamp = cls(int(micros), writer, int(number))
        if str(stamp) != text or len(bytes.fromhex(writer)) != 8:
            raise ValueError(f"not a stamp: {text[:80]!r}")
        return stamp


class Writer:
    """Who appends: one for a process. A new name is taken after a failed append, and by the child of a fork."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._numbers, self._failures = itertools.count(), itertools.count()
        self._locks = [threading.Lock() for _ in range(64)]
        self._process = secrets.token_hex(5)
        self.rename()

    def rename(self) -> None:
        self.name = f"{self._process}{next(self._failures) % (1 << 24):06x}"  # it sorts after the one before

    def stamp(self, now: datetime) -> Stamp:
        return self.stamps(now, 1)[0]

    def stamps(self, now: datetime, count: int) -> list[Stamp]:
        name = self.name
        return [Stamp((now - EPOCH) // MICROSECOND, name, next(self._numbers)) for _ in range(count)]

    def lock(self, prefix: str) -> threading.Lock:
        """Keeps the threads of this process from appending to one segment at once."""
        return self._locks[hash(prefix) % len(self._locks)]


WRITER = Writer()
os.register_at_fork(after_in_child=WRITER.start)


class Record(NamedTuple):
    stamp: Stamp
    payload: bytes


@dataclass(frozen=True)
class TornTail:
    """The end of a segment that is no whole record: an append that a crash cut short, or one that is under way."""

    key: str
    offset: int
    tail: bytes


@dataclass
class ReplayResult:
    records: list[Record]  # in order
    torn: list[TornTail] = field(default_factory=list)


@dataclass
class CompactionResult:
    """What a compaction left out, and what it could not read."""

    dropped: list[Record] = field(default_factory=list)
    torn: list[TornTail] = field(default_factory=list)


class Journal:
    """`sync`: on the filesystem, an acknowledged record also survives a crash of the machine. Other stores always see to
    it themselves."""

    def __init__(self, store: KeyValueStore, prefix: str, *, sync: bool = True, writer: Writer = WRITER) -> None:
        self.store, self.prefix, self.sync, self.writer = store, prefix, sync, writer

    def append(self, *payloads: bytes, now: datetime) -> list[Stamp]:
        """The records are in the journal, in this order, to stay. StoreError: each of them may be or not, none half."""
        if not payloads:
            return []
        with self._append_lock():
            stamps = self.writer.stamps(now, len(payloads))
            frames = b"".join(encode_record(Record(*each)) for each in zip(stamps, payloads, strict=True))
            newest = self._generation()
            while True:
                generation = newest
                self._write(generation, stamps[0], frames)
                newest = self._generation()
                if newest == generation:
                    return stamps

    def replay(self) -> ReplayResult:
        """Every record, once, in order. A torn end of a segment is left out and reported."""
        for _ in range(MAX_REPLAY_ATTEMPTS):
            # Segments before snapshots: a segment that is gone from the list has its records in a snapshot on the next.
            segments = self._found("log")
            snapshots = self._found("snap")
            base = max(snapshots.values(), default=0)
            kept = [key for key, generation in (segments | snapshots).items() if generation >= base]
            if found := self._read(kept):
                return found
        raise StoreError(self.store.name, "replay", "its segments were replaced again and again", key=self.prefix)

    def compact(self, keep: Callable[[list[Record]], Iterable[Record]] | None = None) -> CompactionResult | None:
        """One snapshot has the records in it that `keep` gives back of them all, and the older segments are gone. None if
        another compaction was quicker: nothing was changed then. After a crash the next one finishes the work."""
        generation = self._generation() + 1
        self.store.set(f"{self.prefix}/open/{generation:08d}", b"")
        before = self._found("snap")
        base = max(before.values(), default=0)
        older = [key for key, at in (self._found("log") | before).items() if base <= at < generation]
        found = self._read(older)
        if found is None or base >= generation or max(self._found("snap").values(), default=0) > base:
            return None
        for torn in found.torn:
            self.store.set(f"{self.prefix}/torn/{self.writer.stamp(EPOCH)}", torn.tail)
        kept = found.records if keep is None else [*keep(found.records)]
        snapshot = b"".join(encode_record(record) for record in kept)
        self.store.set(f"{self.prefix}/snap/{generation:08d}/{self.writer.stamp(EPOCH)}", snapshot)
        # What was appended here too late to be read was not acknowledged, and is written again elsewhere.
        obsolete = [key for key, at in (self._found("log") | self._found("snap")).items() if at < generation]
        self.store.remove_many(obsolete)
        stays = {record.stamp for record in kept}
        return CompactionResult([record for record in found.records if record.stamp not in stays], found.torn)

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
            self.writer.rename()  # the segment may end in half a record: nothing may follow it
            raise

    def _generation(self) -> int:
        return max((int(key.rpartition("/")[2]) for key in self.store.list(f"{self.prefix}/open/")), default=0)

    def _found(self, kind: str) -> dict[str, int]:
        """The keys of segments or snapshots, with their generation."""
        return {key: int(key.split("/")[-2]) for key in self.store.list(f"{self.prefix}/{kind}/")}

    def _read(self, keys: Sequence[str]) -> ReplayResult | None:
        """The records in these keys, None if one is not there any more."""
        found: dict[Stamp, Record] = {}
        torn: list[TornTail] = []
        for key in keys:
            data = self.store.get(key)
            if data is None:
                return None
            end = 0
            for record in decode_records(data):
                found[record.stamp] = record
                end += MIN_RECORD_BYTES + len(record.payload)
            if end < len(data):
                torn.append(TornTail(key, end, data[end:]))
        return ReplayResult([found[stamp] for stamp in sorted(found)], torn)


def encode_record(record: Record) -> bytes:
    stamp = record.stamp
    body = STAMP_LAYOUT.pack(stamp.micros, bytes.fromhex(stamp.writer), stamp.number) + record.payload
    return RECORD_HEADER.pack(len(body), zlib.crc32(body)) + body


def decode_records(data: bytes) -> Iterator[Record]:
    """The whole records from the beginning of a segment to the first that is none."""
    at = 0
    while at + MIN_RECORD_BYTES <= len(data):
        length, checksum = RECORD_HEADER.unpack_from(data, at)
        body = data[at + RECORD_HEADER.size : at + RECORD_HEADER.size + length]
        if not STAMP_LAYOUT.size <= length == len(body) or zlib.crc32(body) != checksum:
            return
        micros, writer, number = STAMP_LAYOUT.unpack_from(body)
        yield Record(Stamp(micros, writer.hex(), number), body[STAMP_LAYOUT.size :])
        at += RECORD_HEADER.size + length

"""Exactly-once ingestion of an append-only log file.

The read position is a row that advances in the transaction that applies the lines. Concurrent readers, and a reader stopped at
any step, therefore neither skip nor repeat a line. A file is identified by a digest of its first bytes: a renamed file is read
to its end before the next one, and a truncated or replaced file is read from its beginning."""

import hashlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import BinaryIO

import structlog
from django.db import transaction

from sandboxes.db.clock import clock_from
from sandboxes.lifecycle import checkpoint
from sandboxes.models import LogPosition

log = structlog.get_logger(__name__)
LineHandler = Callable[[list[bytes]], Counter[str]]  # applies lines, without line ends, in a transaction; returns counts
BATCH_BYTES = 256 << 10  # read and applied in one transaction; a line of more bytes is malformed
HEAD_BYTES = 512  # prefix that identifies a file
SETTLE_PERIOD = timedelta(seconds=30)  # a renamed file without writes for this long is complete
PASS_TIME_LIMIT = timedelta(seconds=60)  # of one call of ingest_file, after which no further batch begins


def ingest_file(path: Path, apply: LineHandler, *, now: datetime) -> Counter[str]:
    """Apply every complete line that was not applied before. Return the counts of `apply` and of problems with the file.

    An incomplete last line is left for the next call. A renamed file is searched in the same directory, among the names that
    begin with the file's name. If the renamed file is missing or compressed, its unread remainder counts as "unread lost"."""
    counts: Counter[str] = Counter()
    clock = clock_from(now)
    while clock() <= now + PASS_TIME_LIMIT and _ingest_batch(path, apply, counts, now=clock()):
        pass
    return counts


def _ingest_batch(path: Path, apply: LineHandler, counts: Counter[str], *, now: datetime) -> bool:
    """Apply one batch of lines, or advance to the next file. Return False at the end, or if another reader is ahead."""
    position = find_position(path) or _create_position(path, now=now)
    if position is None:
        return False
    file = _open_positioned_file(path, position)
    if file is None:
        lost = _move_to_next_file(path, position, now=now)
        if lost:
            log.error("unread remainder of a log lost: renamed file not found", log=str(path), read=position.offset)
            counts["unread lost"] += 1
        return lost
    with closing(file):
        file.seek(position.offset)
        data = file.read(BATCH_BYTES)
        taken = data.rfind(b"\n") + 1
        if not taken and len(data) == BATCH_BYTES:
            taken = BATCH_BYTES  # the batch contains no line end
        if taken:
            return _apply_batch(file, position, data[:taken], apply, counts, now=now)
        settled = datetime.fromtimestamp(os.fstat(file.fileno()).st_mtime, now.tzinfo) <= now - SETTLE_PERIOD
        if _is_same_file(path, file) or not settled:
            return False
        if data:
            log.error("log ends with an incomplete line", log=file.name, bytes=len(data))
            counts["malformed"] += 1
    return _move_to_next_file(path, position, now=now)


def _apply_batch(
    file: BinaryIO, position: LogPosition, data: bytes, apply: LineHandler, counts: Counter[str], *, now: datetime
) -> bool:
    checkpoint("lines read", position)
    offset = position.offset + len(data)
    with transaction.atomic(durable=True):
        if not _update_position(position, now=now, offset=offset, head=_digest_head(file, offset)):
            return False
        counted = apply([line for line in data.split(b"\n") if line.strip()])
        checkpoint("lines applied", position)
    counts += counted
    checkpoint("lines committed", position)
    return True


def find_position(path: Path) -> LogPosition | None:
    """Return this host's read position in the log at `path`."""
    return LogPosition.objects.filter(name=_position_name(path)).first()


def is_fully_read(path: Path, old: Path) -> bool:
    """Return whether the renamed file `old` is completely read and the position has moved to the file at `path`."""
    position = find_position(path)
    if position is None:
        return False
    with old.open("rb") as file:
        return position.inode != _format_inode(os.fstat(file.fileno())) and not (
            position.offset and _is_at_position(file, position)
        )


def _create_position(path: Path, *, now: datetime) -> LogPosition | None:
    with suppress(FileNotFoundError):
        start = {"inode": _format_inode(path.stat()), "moved_at": now}
        return LogPosition.objects.get_or_create(name=_position_name(path), defaults=start)[0]
    return None


def _move_to_next_file(path: Path, position: LogPosition, *, now: datetime) -> bool:
    """Move the position from a finished or missing file to the beginning of the file at `path`."""
    with suppress(FileNotFoundError):
        return _update_position(position, now=now, inode=_format_inode(path.stat()), offset=0, head="")
    return False


def _update_position(position: LogPosition, *, now: datetime, **values: object) -> bool:
    """Update the position unless another reader has changed it. Return whether it was updated."""
    expected = {name: getattr(position, name) for name in ("inode", "head", "offset")}
    return bool(LogPosition.objects.filter(pk=position.pk, **expected).update(moved_at=now, **values))


def _open_positioned_file(path: Path, position: LogPosition) -> BinaryIO | None:
    """Open the file at the position: the one at `path`, or an earlier one renamed in the same directory."""
    for candidate in _list_candidates(path):
        with suppress(FileNotFoundError if candidate == path else OSError):  # other files of the directory may be unreadable
            file = candidate.open("rb")
            if _is_at_position(file, position):
                return file
            file.close()
    return None


def _list_candidates(path: Path) -> Iterator[Path]:
    yield path
    with suppress(FileNotFoundError):
        yield from sorted(entry for entry in path.parent.iterdir() if entry.name.startswith(path.name) and entry != path)


def _is_at_position(file: BinaryIO, position: LogPosition) -> bool:
    status = os.fstat(file.fileno())
    if not position.offset:
        return _format_inode(status) == position.inode
    return status.st_size >= position.offset and _digest_head(file, position.offset) == position.head


def _format_inode(status: os.stat_result) -> str:
    return f"{status.st_dev}:{status.st_ino}"


def _digest_head(file: BinaryIO, offset: int) -> str:
    file.seek(0)
    return hashlib.sha256(file.read(min(offset, HEAD_BYTES))).hexdigest()


def _is_same_file(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _position_name(path: Path) -> str:
    return f"{socket.gethostname()}:{path}"

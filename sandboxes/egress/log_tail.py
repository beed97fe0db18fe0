"""Lines that others append to a file, each applied to the database once.

How far a file has been read is a row, and it moves in the transaction that applies the lines: two readers, or one that was
stopped at any step, count nothing twice and leave nothing out. A file is known by its first bytes, so one that was renamed is
read to its end first, and one that was emptied or replaced is read from its beginning."""

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
LineHandler = Callable[[list[bytes]], Counter[str]]  # lines without their end, in a transaction
BATCH_BYTES = 256 << 10  # bytes read and applied at once; a longer line is none
HEAD_BYTES = 512  # bytes by which a file is known
SETTLE_PERIOD = timedelta(seconds=30)  # without a write, after which nobody writes to a renamed file any more
PASS_TIME_LIMIT = timedelta(seconds=60)  # of one pass


def ingest_file(path: Path, apply: LineHandler, *, now: datetime) -> Counter[str]:
    """Apply every complete line that nobody has applied yet; what `apply` counted, and what was wrong with the file.

    An unfinished last line stays for the next time. A renamed file is looked for beside the path, under a name that begins with
    the path's; where it is not there, or packed, when this is called next, the rest of it counts as "rests lost"."""
    counts: Counter[str] = Counter()
    later = clock_from(now)
    while later() <= now + PASS_TIME_LIMIT and _ingest_batch(path, apply, counts, now=later()):
        pass
    return counts


def _ingest_batch(path: Path, apply: LineHandler, counts: Counter[str], *, now: datetime) -> bool:
    """One step: a batch of lines, or on to the next file. False: nothing to do, or somebody else is at it."""
    position = find_position(path) or _create_position(path, now=now)
    if position is None:
        return False
    file = _open_positioned_file(path, position)
    if file is None:
        lost = _move_to_next_file(path, position, now=now)
        if lost:
            log.error("the rest of a log is lost: it is neither at its path nor beside it", log=str(path), read=position.offset)
            counts["rests lost"] += 1
        return lost
    with closing(file):
        file.seek(position.offset)
        data = file.read(BATCH_BYTES)
        taken = data.rfind(b"\n") + 1
        if not taken and len(data) == BATCH_BYTES:
            taken = BATCH_BYTES  # a line without end
        if taken:
            return _apply_batch(file, position, data[:taken], apply, counts, now=now)
        settled = datetime.fromtimestamp(os.fstat(file.fileno()).st_mtime, now.tzinfo) <= now - SETTLE_PERIOD
        if _is_same_file(path, file) or not settled:
            return False
        if data:
            log.error("a log ends within a line", log=file.name, bytes=len(data))
            counts["garbage"] += 1
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
    return LogPosition.objects.filter(name=_position_name(path)).first()


def is_fully_read(path: Path, old: Path) -> bool:
    """Whether a renamed file is read to its end, and reading goes on in the one at the path."""
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
    """From a file that is finished, or gone, to the beginning of the one at the path."""
    with suppress(FileNotFoundError):
        return _update_position(position, now=now, inode=_format_inode(path.stat()), offset=0, head="")
    return False


def _update_position(position: LogPosition, *, now: datetime, **to: object) -> bool:
    """Move it from where it was seen; False if somebody else has."""
    seen = {name: getattr(position, name) for name in ("inode", "head", "offset")}
    return bool(LogPosition.objects.filter(pk=position.pk, **seen).update(moved_at=now, **to))


def _open_positioned_file(path: Path, position: LogPosition) -> BinaryIO | None:
    """The file that a position is in, open: the one at the path, or one beside it that was there before."""
    for one in _list_candidates(path):
        with suppress(FileNotFoundError if one == path else OSError):  # beside it there may be anything
            file = one.open("rb")
            if _is_at_position(file, position):
                return file
            file.close()
    return None


def _list_candidates(path: Path) -> Iterator[Path]:
    yield path
    with suppress(FileNotFoundError):
        yield from sorted(one for one in path.parent.iterdir() if one.name.startswith(path.name) and one != path)


def _is_at_position(file: BinaryIO, position: LogPosition) -> bool:
    found = os.fstat(file.fileno())
    if not position.offset:
        return _format_inode(found) == position.inode
    return found.st_size >= position.offset and _digest_head(file, position.offset) == position.head


def _format_inode(found: os.stat_result) -> str:
    return f"{found.st_dev}:{found.st_ino}"


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

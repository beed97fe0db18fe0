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

from sandboxes.db.clock import ticking
from sandboxes.lifecycle import step
from sandboxes.models import LogPosition

log = structlog.get_logger(__name__)
Apply = Callable[[list[bytes]], Counter[str]]  # lines without their end, in a transaction
BATCH = 256 << 10  # bytes read and applied at once; a longer line is none
HEAD = 512  # bytes by which a file is known
SETTLED = timedelta(seconds=30)  # without a write, after which nobody writes to a renamed file any more
BUDGET = timedelta(seconds=60)  # of one pass


def follow(path: Path, apply: Apply, *, now: datetime) -> Counter[str]:
    """Apply every complete line that nobody has applied yet; what `apply` counted, and what was wrong with the file.

    An unfinished last line stays for the next time. A renamed file is looked for beside the path, under a name that begins with
    the path's; where it is not there, or packed, when this is called next, the rest of it counts as "rests lost"."""
    counts: Counter[str] = Counter()
    later = ticking(now)
    while later() <= now + BUDGET and _advance(path, apply, counts, now=later()):
        pass
    return counts


def _advance(path: Path, apply: Apply, counts: Counter[str], *, now: datetime) -> bool:
    """One step: a batch of lines, or on to the next file. False: nothing to do, or somebody else is at it."""
    position = position_of(path) or _begin(path, now=now)
    if position is None:
        return False
    file = _find(path, position)
    if file is None:
        lost = _move_on(path, position, now=now)
        if lost:
            log.error("the rest of a log is lost: it is neither at its path nor beside it", log=str(path), read=position.offset)
            counts["rests lost"] += 1
        return lost
    with closing(file):
        file.seek(position.offset)
        data = file.read(BATCH)
        taken = data.rfind(b"\n") + 1
        if not taken and len(data) == BATCH:
            taken = BATCH  # a line without end
        if taken:
            return _take(file, position, data[:taken], apply, counts, now=now)
        settled = datetime.fromtimestamp(os.fstat(file.fileno()).st_mtime, now.tzinfo) <= now - SETTLED
        if _same_file(path, file) or not settled:
            return False
        if data:
            log.error("a log ends within a line", log=file.name, bytes=len(data))
            counts["garbage"] += 1
    return _move_on(path, position, now=now)


def _take(file: BinaryIO, position: LogPosition, data: bytes, apply: Apply, counts: Counter[str], *, now: datetime) -> bool:
    step("lines read", position)
    offset = position.offset + len(data)
    with transaction.atomic(durable=True):
        if not _move(position, now=now, offset=offset, head=_head(file, offset)):
            return False
        counted = apply([line for line in data.split(b"\n") if line.strip()])
        step("lines applied", position)
    counts += counted
    step("lines committed", position)
    return True


def position_of(path: Path) -> LogPosition | None:
    return LogPosition.objects.filter(name=_name(path)).first()


def is_past(path: Path, old: Path) -> bool:
    """Whether a renamed file is read to its end, and reading goes on in the one at the path."""
    position = position_of(path)
    if position is None:
        return False
    with old.open("rb") as file:
        return position.inode != _inode(os.fstat(file.fileno())) and not (position.offset and _is_in(file, position))


def _begin(path: Path, *, now: datetime) -> LogPosition | None:
    with suppress(FileNotFoundError):
        start = {"inode": _inode(path.stat()), "moved_at": now}
        return LogPosition.objects.get_or_create(name=_name(path), defaults=start)[0]
    return None


def _move_on(path: Path, position: LogPosition, *, now: datetime) -> bool:
    """From a file that is finished, or gone, to the beginning of the one at the path."""
    with suppress(FileNotFoundError):
        return _move(position, now=now, inode=_inode(path.stat()), offset=0, head="")
    return False


def _move(position: LogPosition, *, now: datetime, **to: object) -> bool:
    """Move it from where it was seen; False if somebody else has."""
    seen = {name: getattr(position, name) for name in ("inode", "head", "offset")}
    return bool(LogPosition.objects.filter(pk=position.pk, **seen).update(moved_at=now, **to))


def _find(path: Path, position: LogPosition) -> BinaryIO | None:
    """The file that a position is in, open: the one at the path, or one beside it that was there before."""
    for one in _candidates(path):
        with suppress(FileNotFoundError if one == path else OSError):  # beside it there may be anything
            file = one.open("rb")
            if _is_in(file, position):
                return file
            file.close()
    return None


def _candidates(path: Path) -> Iterator[Path]:
    yield path
    with suppress(FileNotFoundError):
        yield from sorted(one for one in path.parent.iterdir() if one.name.startswith(path.name) and one != path)


def _is_in(file: BinaryIO, position: LogPosition) -> bool:
    found = os.fstat(file.fileno())
    if not position.offset:
        return _inode(found) == position.inode
    return found.st_size >= position.offset and _head(file, position.offset) == position.head


def _inode(found: os.stat_result) -> str:
    return f"{found.st_dev}:{found.st_ino}"


def _head(file: BinaryIO, offset: int) -> str:
    file.seek(0)
    return hashlib.sha256(file.read(min(offset, HEAD))).hexdigest()


def _same_file(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _name(path: Path) -> str:
    return f"{socket.gethostname()}:{path}"

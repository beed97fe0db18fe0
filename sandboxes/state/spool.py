"""Spool files on the disk of the state directory, and parallel transfers."""

import bisect
import io
import itertools
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context
from typing import Any, BinaryIO, cast

from django.conf import settings

from sandboxes.state import disk_space
from sandboxes.storage.base import StoreError

MAX_PARALLEL_TRANSFERS = 8


class _SpoolFile(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise StoreError("spool", "write", error.strerror or str(error)) from error


def open_spool(*, for_request: bool = False) -> BinaryIO:
    """Open an unnamed temporary file on the disk of the state directory. It is deleted when closed.

    `for_request`: raise DiskFull below LEASEHOLD_MIN_FREE_DISK, whose last part is kept for the state of sandboxes.
    Disk errors, such as a full disk, raise StoreError, in this call and in later writes."""
    if for_request:
        disk_space.require_free_space("spool an archive")
    directory = settings.STATE_DIR / "spool"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            return cast(BinaryIO, io.BufferedRandom(_SpoolFile(os.dup(file.fileno()), "r+")))
    except OSError as error:
        raise StoreError("spool", "open", str(error)) from error


class FileSlice:
    """Reader of a byte range of a file. Slices of one file can be read independently."""

    def __init__(self, source: BinaryIO, start: int, size: int) -> None:
        self.source, self.position, self.end = source, start, start + size

    def read(self, size: int = -1, /) -> bytes:
        remaining = self.end - self.position
        chunk = os.pread(self.source.fileno(), remaining if size < 0 else min(size, remaining), self.position)
        self.position += len(chunk)
        return chunk


class SparseSlice:
    """Reader of a sparse file of a tar from offset `start`: of its extents, whose data follow each other, and of its holes."""

    def __init__(self, source: BinaryIO, data_offset: int, extents: Sequence[tuple[int, int]], start: int, size: int) -> None:
        self.source, self.position, self.end = source, start, size
        self.offsets = [offset for offset, _ in extents]
        self.lengths = [length for _, length in extents]
        self.data_offsets = [*itertools.accumulate(self.lengths[:-1], initial=data_offset)]

    def read(self, size: int = -1, /) -> bytes:
        remaining = self.end - self.position
        chunks, wanted = list[bytes](), remaining if size < 0 else min(size, remaining)
        while wanted > 0:
            index = bisect.bisect_right(self.offsets, self.position) - 1
            within = self.position - self.offsets[index] if index >= 0 else 0
            if index >= 0 and within < self.lengths[index]:
                length = min(wanted, self.lengths[index] - within)
                chunks.append(os.pread(self.source.fileno(), length, self.data_offsets[index] + within))
            else:
                hole_end = self.offsets[index + 1] if index + 1 < len(self.offsets) else self.end
                chunks.append(bytes(min(wanted, hole_end - self.position)))
            if not chunks[-1]:
                break  # the tar is cut off
            self.position += len(chunks[-1])
            wanted -= len(chunks[-1])
        return b"".join(chunks)


def run_parallel(function: Callable[[Any], Any], jobs: Iterable[Any]) -> list[Any]:
    """Call `function` for each job, up to 8 at once. Raise the first failure after all jobs have ended."""
    jobs = list(jobs)
    if len(jobs) < 2:
        return [function(job) for job in jobs]

    def run(context: Context, job: Any) -> Any:
        return context.run(function, job)  # the thread works for the claims that its caller holds

    with ThreadPoolExecutor(min(MAX_PARALLEL_TRANSFERS, len(jobs))) as threads:
        return list(threads.map(run, [copy_context() for _ in jobs], jobs))

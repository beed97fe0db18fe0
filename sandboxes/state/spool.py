"""Temporary files on the disk that state lies on, and transfers side by side."""

import io
import os
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, cast

from django.conf import settings

from sandboxes.storage.base import StoreError

MAX_PARALLEL_TRANSFERS = 8  # transfers side by side


class _SpoolFile(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as failed:
            raise StoreError("spool", "write", failed.strerror or str(failed)) from failed


def open_spool() -> BinaryIO:
    """A temporary file on the disk that state lies on, gone when it is closed. A disk that is full is a StoreError."""
    directory = settings.STATE_DIR / "spool"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory, buffering=0) as made:
            return cast(BinaryIO, io.BufferedRandom(_SpoolFile(os.dup(made.fileno()), "r+")))
    except OSError as failed:
        raise StoreError("spool", "open", str(failed)) from failed


class FileSlice:
    """Some bytes of a file that others read other parts of."""

    def __init__(self, source: BinaryIO, start: int, size: int) -> None:
        self.source, self.at, self.end = source, start, start + size

    def read(self, most: int = -1, /) -> bytes:
        left = self.end - self.at
        got = os.pread(self.source.fileno(), left if most < 0 else min(most, left), self.at)
        self.at += len(got)
        return got


def run_parallel(act: Callable[[Any], Any], jobs: Iterable[Any]) -> list[Any]:
    """Do each job, some at once; the first failure is raised when all have ended."""
    jobs = list(jobs)
    if len(jobs) < 2:
        return [act(job) for job in jobs]
    with ThreadPoolExecutor(min(MAX_PARALLEL_TRANSFERS, len(jobs))) as threads:
        return list(threads.map(act, jobs))

"""Limits on the bytes, the time and the rate of streams into and out of a sandbox.

A tar contains every file with its apparent size. A sparse file costs an agent nothing, but a copy of it can fill a disk.
Therefore a sparse file counts with its apparent size."""

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import IO, BinaryIO, cast

from sandboxes.image import files
from sandboxes.providers.errors import FailureCause, SandboxUnreadable, TooLarge

MIN_BYTES_PER_SECOND = 1 << 20


class Pace:
    """Total time of one operation in a sandbox, which grows with the bytes that the operation transfers in either direction.

    The sandbox may take `timeout` and a second for each MIN_BYTES_PER_SECOND: a transfer of any size passes, and a sandbox that
    moves a byte now and then cannot occupy a worker. Only the time spent waiting for the sandbox counts, neither that of the
    source of its input nor that of the consumer of its output. A wait that blocks needs an idle timeout of its own: the time is
    checked at each chunk."""

    def __init__(self, timeout: timedelta, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout, self._clock, self._began, self._outside, self._bytes = timeout, clock, clock(), 0.0, 0

    def limit(self, chunks: Iterator[bytes], *, max_bytes: int | None = None) -> Iterator[bytes]:
        """Yield the output. Raise TooLarge above `max_bytes` (None: no limit), and SandboxUnreadable if it is too slow.

        The source is closed in every case."""
        size, source = 0, iter(chunks)
        try:
            while (chunk := next(source, None)) is not None:
                size += len(chunk)
                if max_bytes is not None and size > max_bytes:
                    raise TooLarge(describe_excess(max_bytes))
                self._count(len(chunk))
                asked_at = self._clock()
                yield chunk
                self._outside += self._clock() - asked_at
        finally:
            if close := getattr(chunks, "close", None):
                close()

    def track_input(self, file: BinaryIO) -> BinaryIO:
        """Wrap the input of the operation. Its `read` raises SandboxUnreadable if the sandbox has been too slow to take it."""
        return cast(BinaryIO, _PacedInput(file, self))

    def read(self, file: BinaryIO, size: int) -> bytes:
        self._count(0)
        asked_at = self._clock()
        content = file.read(size)
        self._outside += self._clock() - asked_at
        self._bytes += len(content)
        return content

    def _count(self, size: int) -> None:
        self._bytes += size
        waited = self._clock() - self._began - self._outside
        if waited > self._timeout.total_seconds() + self._bytes / MIN_BYTES_PER_SECOND:
            raise SandboxUnreadable(
                f"the sandbox is too slow: {self._bytes} bytes in {waited:.0f} seconds.", cause=FailureCause.TIMEOUT
            )


class _PacedInput:
    """File whose reads are counted by a Pace. Everything else is passed on."""

    def __init__(self, file: BinaryIO, pace: Pace) -> None:
        self._file, self._pace = file, pace

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)

    def read(self, size: int = -1, /) -> bytes:
        return self._pace.read(self._file, size)


def limit_stream(
    chunks: Iterator[bytes], *, max_bytes: int | None, timeout: timedelta, clock: Callable[[], float] = time.monotonic
) -> Iterator[bytes]:
    """Yield `chunks`, limited as by Pace.limit. The time begins with the first chunk that is requested."""
    yield from Pace(timeout, clock=clock).limit(chunks, max_bytes=max_bytes)


def describe_excess(max_bytes: int) -> str:
    shown = f"{max_bytes} bytes ({max_bytes >> 20} MiB)" if max_bytes >= 1 << 20 else f"{max_bytes} bytes"
    return f"the tar exceeds {shown}. A sparse file counts with its apparent size."


class BoundedWriter:
    """Writable file limited to `max_bytes`. Raises image.files.TooLarge above the limit."""

    def __init__(self, file: IO[bytes], max_bytes: int, message: str) -> None:
        self.file, self.remaining, self.message = file, max_bytes, message

    def write(self, content: bytes) -> int:
        self.remaining -= len(content)
        if self.remaining < 0:
            raise files.TooLarge(self.message)
        return self.file.write(content)


class BoundedBuffer:
    """Buffer for the first `cap` bytes of a stream. `truncated` is set if there were more."""

    def __init__(self, cap: int, content: bytes = b"") -> None:
        self._content, self._cap, self.truncated = bytearray(), cap, False
        self.add(content)

    def add(self, chunk: bytes) -> None:
        room = self._cap - len(self._content)
        self._content += chunk[:room]
        self.truncated |= len(chunk) > room

    def __bytes__(self) -> bytes:
        return bytes(self._content)

"""Limits on the bytes, the time and the rate of streams out of a sandbox.

A tar contains every file with its apparent size. A sparse file costs an agent nothing, but a copy of it can fill a disk.
Therefore a sparse file counts with its apparent size."""

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import IO

from sandboxes.image import files
from sandboxes.providers.errors import FailureCause, TooLarge, Unavailable

MIN_BYTES_PER_SECOND = 1 << 20


def limit_stream(
    chunks: Iterator[bytes], *, max_bytes: int | None, timeout: timedelta, clock: Callable[[], float] = time.monotonic
) -> Iterator[bytes]:
    """Yield `chunks`. Raise TooLarge above `max_bytes` (None: no limit), and Unavailable if the source is too slow.

    The source may take `timeout` and a second for each MIN_BYTES_PER_SECOND that it has sent, so that a copy of any size passes
    and a sandbox that sends little cannot occupy a worker. The time that the consumer takes for a chunk does not count.
    The source is closed in every case. A source that blocks needs an idle timeout of its own: the time is checked for each
    chunk."""
    size, waited, source = 0, 0.0, iter(chunks)
    try:
        while True:
            asked_at = clock()
            chunk = next(source, None)
            waited += clock() - asked_at
            if chunk is None:
                return
            size += len(chunk)
            if max_bytes is not None and size > max_bytes:
                raise TooLarge(describe_excess(max_bytes))
            if waited > timeout.total_seconds() + size / MIN_BYTES_PER_SECOND:
                message = f"the copy is too slow: {size} bytes in {waited:.0f} seconds."
                raise Unavailable(message, cause=FailureCause.TIMEOUT)
            yield chunk
    finally:
        if close := getattr(chunks, "close", None):
            close()


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

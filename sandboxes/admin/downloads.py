"""Files sent to a browser as they were stored: byte for byte, never shown as a page, never held in memory."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Protocol

from django.http import StreamingHttpResponse
from django.utils.http import content_disposition_header

from sandboxes.storage.base import CHUNK_BYTES

# What some system takes for more than a name, what controls a terminal, what reverses the direction of writing.
UNSAFE_FILENAME_CHARS = re.compile(r'[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069/\\:*?"<>|]')


class ReadableStream(Protocol):
    def read(self, most: int = -1, /) -> bytes: ...


class DownloadStream:
    """What is read, piece by piece, and what has to be closed when that has ended, also when it ends early."""

    def __init__(self, source: ReadableStream, stack: ExitStack) -> None:
        self._source, self._stack = source, stack

    def __iter__(self) -> Iterator[bytes]:
        while chunk := self._source.read(CHUNK_BYTES):
            yield chunk

    def close(self) -> None:
        self._stack.close()


def build_attachment_response(source: ReadableStream, size: int, name: str, stack: ExitStack) -> StreamingHttpResponse:
    """An answer that browsers save and do not open. It closes the stack."""
    answer = StreamingHttpResponse(
        DownloadStream(source, stack),
        content_type="application/octet-stream",
        headers={"Content-Length": str(size), "X-Content-Type-Options": "nosniff"},
    )
    answer.headers["Content-Disposition"] = (
        content_disposition_header(as_attachment=True, filename=sanitize_filename(name)) or "attachment"
    )
    return answer


def sanitize_filename(name: str) -> str:
    """A name for a file on anybody's disk, in the place of one that an agent chose."""
    return (
        re.sub(r'[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069/\\:*?"<>|]', "_", name).strip(". ")[:150] or "file"
    )

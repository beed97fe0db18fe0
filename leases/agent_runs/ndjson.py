"""Incremental parser of newline-delimited JSON objects, as agent CLIs print them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MAX_LINE_BYTES = 8 << 20
MAX_QUOTED_BYTES = 2000  # of a malformed line


@dataclass(frozen=True)
class JsonLine:
    """A JSON object. `end` is the offset in the stream after its line."""

    document: dict[str, Any]
    size: int  # bytes of the line, without the line break
    end: int


@dataclass(frozen=True)
class MalformedLine:
    """A line that is not a JSON object, with its beginning as text."""

    reason: str
    text: str
    size: int
    end: int


class NdjsonParser:
    """Parser of one stream from `offset`, which is the beginning of a line.

    Chunks may end anywhere. Lines end with LF or CRLF; blank lines are ignored. A line longer than MAX_LINE_BYTES is malformed,
    and only its beginning is held in memory."""

    def __init__(self, offset: int = 0) -> None:
        self._position = offset  # of the next byte
        self._line, self._size = bytearray(), 0  # incomplete line: its content, or the beginning of a line that is too long
        self._is_skipping = False  # the beginning of the current line is lost

    def feed(self, chunk: bytes) -> Iterator[JsonLine | MalformedLine]:
        """Parse the next bytes, and yield the lines that end in them."""
        begin = 0
        while (line_break := chunk.find(b"\n", begin)) >= 0:
            self._append(chunk[begin:line_break])
            self._position += 1
            begin = line_break + 1
            yield from self._end_line()
        self._append(chunk[begin:])

    def skip(self, count: int) -> None:
        """Continue after `count` lost bytes. The line in which they end is dropped."""
        self._line.clear()
        self._size, self._is_skipping = 0, True
        self._position += count

    def end(self) -> Iterator[JsonLine | MalformedLine]:
        """Yield the last line if it has no line break."""
        yield from self._end_line()

    def _append(self, content: bytes) -> None:
        self._position += len(content)
        self._size += len(content)
        if not self._is_skipping and len(self._line) <= MAX_LINE_BYTES:
            self._line += content[: MAX_LINE_BYTES + 1 - len(self._line)]

    def _end_line(self) -> Iterator[JsonLine | MalformedLine]:
        content, size, is_skipped = bytes(self._line), self._size, self._is_skipping
        self._line.clear()
        self._size, self._is_skipping = 0, False
        if not is_skipped and content.strip():
            yield _parse_line(content, size, self._position)


def _parse_line(content: bytes, size: int, end: int) -> JsonLine | MalformedLine:
    reason = f"longer than {MAX_LINE_BYTES >> 20} MiB"
    if size <= MAX_LINE_BYTES:
        try:
            document = json.loads(content, parse_constant=_reject_constant)
        except (ValueError, RecursionError) as error:  # ValueError: also bytes that are not UTF-8
            reason = str(error) or type(error).__name__
        else:
            if isinstance(document, dict):
                return JsonLine(document, size, end)
            reason = "not a JSON object"
    return MalformedLine(reason, content[:MAX_QUOTED_BYTES].decode(errors="replace"), size, end)


def _reject_constant(name: str) -> None:
    """Refuse NaN and Infinity, which are no JSON and could not be sent on."""
    raise ValueError(f"{name} is not JSON")

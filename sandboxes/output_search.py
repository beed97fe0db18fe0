"""Search of process output for literal text or a regular expression, chunk by chunk.

Output and pattern are both untrusted. Patterns are matched by RE2, whose run time is linear in the text: it has neither
back-references nor look-around. The size of a compiled pattern and of its automaton are limited, and only a window of the
output is held in memory. RE2 is imported at its first use: it takes 3 MiB."""

from dataclasses import dataclass
from typing import Any, Protocol

MAX_PATTERN_CHARS = 500
MAX_PROGRAM_SIZE = 520  # instructions; in the worst case the search of 256 KiB takes half a second of CPU time
MAX_AUTOMATON_BYTES = 1 << 20  # re2 also keeps the last 128 compiled patterns of the process
WINDOW_BYTES = 1 << 16  # longest match that is found across chunks


class BadPattern(ValueError):
    """The pattern is not a valid regular expression of RE2, or is too large."""


@dataclass(frozen=True)
class OutputMatch:
    """Match in the output, with the byte offsets of its beginning and end."""

    content: bytes
    start: int
    end: int


class OutputSearch(Protocol):
    """Search that is fed with consecutive chunks of output."""

    def feed(self, content: bytes, *, end: int) -> OutputMatch | None:
        """Search a chunk that ends at the offset `end`. A gap before the chunk ends a partial match."""


class TextSearch:
    """Search for literal text."""

    def __init__(self, text: str) -> None:
        self._needle, self._tail, self._end = text.encode(), b"", 0

    def feed(self, content: bytes, *, end: int) -> OutputMatch | None:
        searched = content if end - len(content) != self._end else self._tail + content
        found, first = searched.find(self._needle), end - len(searched)
        if found >= 0:
            return OutputMatch(self._needle, first + found, first + found + len(self._needle))
        self._tail, self._end = searched[-(len(self._needle) - 1) :] if len(self._needle) > 1 else b"", end
        return None


class PatternSearch:
    """Search for a regular expression of RE2, in the last WINDOW_BYTES and the new chunk.

    `^` matches at the first byte of the output only, and after a line break with (?m). `$` matches at the end of the output so
    far. A match that ends there, such as `[0-9]+`, may be longer in later output."""

    def __init__(self, pattern: str, *, start: int = 0) -> None:
        """Compile the pattern. The first chunk begins one byte before `start`, as context for ^ and \\b. Raise BadPattern."""
        self._regexp = _compile(pattern)
        self._window, self._end = b"", self.read_from(start)
        self._first = start - self._end  # index at which matches may begin
        self._is_fed = False

    @staticmethod
    def read_from(start: int) -> int:
        """Return the offset of the first chunk of a search from `start`."""
        return max(start - 1, 0)

    @property
    def resume_offset(self) -> int:
        """Offset from which another search misses no match."""
        return self._end - len(self._window) + self._first

    def feed(self, content: bytes, *, end: int) -> OutputMatch | None:
        if end - len(content) != self._end:  # the byte before the chunk is unknown, and counts as a space
            self._window, self._first = b" ", 1
        elif not content and self._is_fed:
            return None
        self._is_fed = True
        searched = self._window + content
        if match := self._regexp.search(searched, self._first):
            first, last = match.span()
            offset = end - len(searched)
            return OutputMatch(searched[first:last], offset + first, offset + last)
        excess = len(searched) - self._first - WINDOW_BYTES
        if excess > 0:
            searched, self._first = searched[self._first + excess - 1 :], 1
        self._window, self._end = searched, end
        return None


def _compile(pattern: str) -> Any:
    import re2

    if len(pattern) > MAX_PATTERN_CHARS:
        raise BadPattern(f"The pattern has more than {MAX_PATTERN_CHARS} characters.")
    options = re2.Options()
    options.max_mem, options.log_errors = MAX_AUTOMATON_BYTES, False
    try:
        compiled = re2.compile(pattern, options)
    except UnicodeEncodeError:
        raise BadPattern("The pattern is not valid Unicode.") from None
    except re2.error as error:
        message = error.args[0] if error.args else ""
        detail = message.decode(errors="replace") if isinstance(message, bytes) else str(message)
        raise BadPattern(f"Not a regular expression of RE2: {detail}") from None
    if max(compiled.programsize, compiled.reverseprogramsize) > MAX_PROGRAM_SIZE:
        raise BadPattern("The pattern is too large when its repetitions are expanded.")
    return compiled

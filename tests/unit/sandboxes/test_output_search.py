"""Search of output in chunks: the same matches as in the whole output, with bounded memory and time."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes import output_search
from sandboxes.output_search import BadPattern, OutputMatch, OutputSearch, PatternSearch, TextSearch

PATTERNS = ["ab", "a+b", "(?m)^b", "^a", r"\bb", "(?m)a\n", "b(?:a|\n){1,3}b", "a\n?b", r"\Aa", "[^a]b"]


def search(searching: OutputSearch, output: bytes, sizes: list[int], start: int = 0) -> OutputMatch | None:
    """Feed the output from `start` in chunks of these sizes, and the rest."""
    end = start
    for size in [*sizes, len(output)]:
        chunk = output[end : end + size]
        end += len(chunk)
        if match := searching.feed(chunk, end=end):
            return match
    return None


@given(
    st.sampled_from(PATTERNS), st.text("ab\n ", max_size=40).map(str.encode), st.lists(st.integers(0, 7), max_size=20),
    st.integers(0, 40),
)  # fmt: skip
def test_the_division_into_chunks_does_not_change_whether_there_is_a_match(
    pattern: str, output: bytes, sizes: list[int], start: int
) -> None:
    start = min(start, len(output))
    expected = re.compile(pattern.encode()).search(output, start)
    if pattern in ("^a", r"\Aa") and start:
        expected = None  # `re` takes the search position for the beginning
    found = search(PatternSearch(pattern, start=start), output, sizes, PatternSearch.read_from(start))
    assert (found is None) == (expected is None)
    if found and expected:
        assert found.start == expected.start()
        assert found.content == output[found.start : found.end]


@given(st.text("ab", min_size=1, max_size=4), st.text("ab", max_size=30), st.lists(st.integers(0, 5), max_size=20))
def test_text_is_found_in_any_division(needle: str, output: str, sizes: list[int]) -> None:
    found = search(TextSearch(needle), output.encode(), sizes)
    assert (found.start if found else -1) == output.find(needle)


def test_a_match_within_the_window_is_found_and_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_search, "WINDOW_BYTES", 10)
    for gap, is_found in ((9, True), (10, False)):  # the window, and one byte of a new chunk
        output = b"." * 50 + b"<" + b"x" * gap + b">"
        searching = PatternSearch("<x*>")
        assert (search(searching, output, [1] * len(output)) is not None) == is_found, gap
        assert len(searching._window) <= 11


def test_a_gap_ends_a_partial_match_and_is_no_beginning_of_a_line() -> None:
    for pattern, is_found in (("ab", False), ("(?m)^b", False), (r"\bb", True), ("b", True)):
        searching = PatternSearch(pattern)
        assert searching.feed(b"a", end=1) is None
        assert (searching.feed(b"b", end=100) == OutputMatch(b"b", 99, 100)) == is_found, pattern


def test_a_search_that_continues_misses_no_match() -> None:
    first = PatternSearch("ab")
    assert search(first, b"xxa", []) is None
    again = PatternSearch("ab", start=first.resume_offset)
    assert search(again, b"xxab", [], PatternSearch.read_from(first.resume_offset)) == OutputMatch(b"ab", 2, 4)


def test_offsets_count_bytes_and_invalid_utf8_is_skipped() -> None:
    output = "äö\xff".encode("latin-1") + "äö 漢 end".encode()
    found = search(PatternSearch("漢 e.."), output, [2] * 20)
    assert found
    assert output[found.start : found.end].decode() == "漢 end"


@pytest.mark.parametrize(
    "pattern", ["(", "[a", "x{2,1}", "(?=a)", r"\1", "a{1001}", "(?:a{30}){30}", "x" * 501, "\ud800", "(?P<a"]
)
def test_a_bad_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(BadPattern):
        PatternSearch(pattern)


def test_a_pattern_with_exponential_backtracking_is_linear() -> None:
    output = b"x" * (1 << 18) + b"!"
    started = time.thread_time()
    for pattern in ("(x+x+)+y", "(x*)*y", "(x|x)*y", "^(x?){100}x{100}y"):
        assert search(PatternSearch(pattern), output, []) is None
    assert time.thread_time() - started < 10

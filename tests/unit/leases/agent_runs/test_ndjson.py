"""Lines of newline-delimited JSON, however the stream is divided into chunks."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leases.agent_runs import ndjson
from leases.agent_runs.ndjson import JsonLine, MalformedLine, NdjsonParser

DOCUMENTS = st.dictionaries(st.text(max_size=8), st.none() | st.booleans() | st.integers() | st.text(max_size=20), max_size=4)
LINES = st.lists(
    DOCUMENTS.map(lambda document: json.dumps(document, ensure_ascii=False).encode()) | st.sampled_from([b"", b" ", b"no"])
)
BREAKS = st.sampled_from([b"\n", b"\r\n"])


def parse(content: bytes, cuts: list[int], *, offset: int = 0) -> list[JsonLine | MalformedLine]:
    parser, lines, begin = NdjsonParser(offset), [], 0
    for end in [*sorted(cut % (len(content) + 1) for cut in cuts), len(content)]:
        lines += parser.feed(content[begin:end])
        begin = end
    return [*lines, *parser.end()]


@given(LINES, BREAKS, st.lists(st.integers(0, 10_000), max_size=20), st.booleans())
def test_lines_do_not_depend_on_the_chunks(lines: list[bytes], line_break: bytes, cuts: list[int], is_ended: bool) -> None:
    content = line_break.join(lines) + (line_break if is_ended else b"")
    parsed = parse(content, cuts)
    expected = [line for line in lines if line.strip()]
    assert [line.document if isinstance(line, JsonLine) else line.text.strip() for line in parsed] == [
        "no" if line == b"no" else json.loads(line) for line in expected
    ]
    assert parsed == parse(content, [*range(len(content))])  # one byte at a time
    for line in parsed:  # a parser that continues after a line finds the others
        assert parse(content[line.end :], [], offset=line.end) == [other for other in parsed if other.end > line.end]


def test_line_of_five_megabytes_in_small_chunks() -> None:
    text = "x" * (5 << 20)
    (line,) = parse(json.dumps({"text": text}).encode() + b"\n", [*range(0, 5 << 20, 1000)])
    assert isinstance(line, JsonLine)
    assert line.document == {"text": text}


def test_line_above_the_limit_is_malformed_and_the_next_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ndjson, "MAX_LINE_BYTES", 100)
    parser = NdjsonParser()
    lines = [line for _ in range(50) for line in parser.feed(b'{"a": "xxxx')]
    assert (lines, len(parser._line)) == ([], 101)
    long, short = [*parser.feed(b'"}\n{"b": 1}\n')]
    assert (type(long), long.size) == (MalformedLine, 552)
    assert isinstance(short, JsonLine)


@pytest.mark.parametrize(
    "content", [b"[1]", b"3", b"null", b'{"a": NaN}', b'{"a": -Infinity}', b"\xff{}", b"{", b"[" * 100_000]
)
def test_malformed_line_is_quoted_with_its_reason(content: bytes) -> None:
    line, after = parse(content + b'\n{"a": 1}', [])
    assert isinstance(line, MalformedLine)
    assert (line.size, line.end) == (len(content), len(content) + 1)
    assert line.reason
    assert len(line.text) <= ndjson.MAX_QUOTED_BYTES
    assert isinstance(after, JsonLine)


def test_line_with_lost_bytes_is_dropped() -> None:
    parser = NdjsonParser()
    lines: list[Any] = [*parser.feed(b'{"a": 1}\n{"b": ')]
    parser.skip(10)
    lines += parser.feed(b'x"}\n{"c": 3}\n')
    assert [line.document for line in lines] == [{"a": 1}, {"c": 3}]
    assert lines[-1].end == 9 + 6 + 10 + 4 + 9

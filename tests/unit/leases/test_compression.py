"""Bounded decompression of gzip streams."""

import gzip
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leases.api.files import compression
from leases.api.files.compression import compress, decompress
from leases.errors import InvalidRequest, RequestTooLarge

PACKED = gzip.compress(b"x", mtime=0)


def split(content: bytes, size: int) -> list[bytes]:
    return [content[start : start + size] for start in range(0, len(content), size)]


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=4), st.integers(1, 50), st.integers(0, 3))
def test_members_are_decompressed_in_any_division(members: list[bytes], size: int, padding: int) -> None:
    stream = b"".join(gzip.compress(member) + bytes(padding) for member in members)
    assert b"".join(decompress(split(stream, size), max_bytes=2000)) == b"".join(members)


@pytest.mark.parametrize("size", [compression.CHUNK_BYTES - 1, compression.CHUNK_BYTES, 3 * compression.CHUNK_BYTES])
def test_content_around_the_size_of_a_piece_is_complete(size: int) -> None:
    content = bytes(range(256)) * (size // 256 + 1)
    pieces = list(decompress([gzip.compress(content[:size])], max_bytes=size))
    assert b"".join(pieces) == content[:size]
    assert max(map(len, pieces)) <= compression.CHUNK_BYTES


def test_a_bomb_is_refused_before_it_is_decompressed() -> None:
    consumed = []

    def feed() -> Iterator[bytes]:
        for chunk in split(bomb, 1 << 16):
            consumed.append(chunk)
            yield chunk

    bomb = gzip.compress(bytes(256 << 20), compresslevel=1)
    tracemalloc.start()
    with pytest.raises(RequestTooLarge):
        for _ in decompress(feed(), max_bytes=1 << 20):
            pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(consumed) == 1
    assert peak < 4 << 20


def test_the_number_of_empty_members_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "MAX_MEMBERS", 10)
    assert list(decompress([gzip.compress(b"") * 10], max_bytes=1)) == []
    with pytest.raises(InvalidRequest):
        list(decompress([gzip.compress(b"") * 11], max_bytes=1))


@pytest.mark.parametrize("body", [b"", bytes(20), PACKED[:-1], PACKED + b"x", b"plain"])
def test_a_truncated_or_foreign_stream_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        list(decompress(split(body, 3), max_bytes=100))


def test_equal_content_is_compressed_to_equal_bytes() -> None:
    content = [b"a" * 1000, b"", b"b"]
    first = b"".join(compress(content))
    assert gzip.decompress(first) == b"".join(content)
    assert b"".join(compress(content)) == first

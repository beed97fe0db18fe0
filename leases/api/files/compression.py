"""Gzip of archives: bounded decompression of uploads, compression of downloads, and their selection by a request."""

import itertools
import zlib
from collections.abc import Iterable, Iterator

from rest_framework.request import Request

from leases.errors import InvalidRequest, UnsupportedEncoding
from leases.errors import RequestTooLarge as BodyTooLarge

GZIP_MEDIA_TYPE = "application/gzip"
GZIP_MEDIA_TYPES = (GZIP_MEDIA_TYPE, "application/x-gzip")
GZIP_ENCODINGS = ("gzip", "x-gzip")
CHUNK_BYTES = 1 << 18
MAX_MEMBERS = 100_000  # of one body: each costs time even if it is empty; a block compressor writes one per 64 KiB
LEVEL = 1  # a download is compressed in a thread of the web server: five times as fast as the default level
GZIP_FORMAT = 16 + zlib.MAX_WBITS


def accepts_gzip(request: Request) -> bool:
    """Return whether an archive is to be compressed: by `compression=gzip`, else by `Accept`. Raise InvalidRequest."""
    if "compression" in request.GET:
        value = request.GET["compression"]
        if value not in ("gzip", "none"):
            raise InvalidRequest("compression", "Must be gzip or none.")
        return value == "gzip"
    return any(_is_accepted_gzip(part) for part in request.META.get("HTTP_ACCEPT", "").split(","))


def _is_accepted_gzip(media_range: str) -> bool:
    media_type, *parameters = (part.strip().lower() for part in media_range.split(";"))
    return media_type in GZIP_MEDIA_TYPES and not any(parameter in ("q=0", "q=0.0") for parameter in parameters)


def is_gzip_upload(request: Request) -> bool:
    """Return whether a body is compressed, according to its Content-Encoding or Content-Type. Raise UnsupportedEncoding."""
    encoding = request.META.get("HTTP_CONTENT_ENCODING", "identity").strip().lower()
    if encoding not in ("identity", "", *GZIP_ENCODINGS):
        raise UnsupportedEncoding("gzip, identity")
    media_type = (request.content_type or "").partition(";")[0].strip().lower()
    return encoding in GZIP_ENCODINGS or media_type in GZIP_MEDIA_TYPES


def decompress(chunks: Iterable[bytes], *, max_bytes: int) -> Iterator[bytes]:
    """Yield the content of a gzip stream of one or more members, in pieces of at most CHUNK_BYTES.

    Memory does not depend on the compression ratio. Raise BodyTooLarge above `max_bytes` of content, before more is
    decompressed, and InvalidRequest for a stream that is not gzip or is truncated."""
    stream, size, members = None, 0, 0
    for chunk in itertools.chain(chunks, [b""]):  # the last one fetches the output that zlib has held back
        while True:
            if stream is None:
                chunk = chunk.lstrip(b"\0") if members else chunk  # padding between members
                if not chunk:
                    break
                stream, members = zlib.decompressobj(GZIP_FORMAT), members + 1
                if members > MAX_MEMBERS:
                    raise InvalidRequest("body", f"The gzip stream has more than {MAX_MEMBERS} members.")
            try:
                content = stream.decompress(chunk, CHUNK_BYTES)
            except zlib.error as error:
                raise InvalidRequest("body", f"This is not a valid gzip stream: {error}.") from None
            size += len(content)
            if size > max_bytes:
                raise BodyTooLarge(f"The decompressed body is larger than {max_bytes} bytes.", field="body")
            if content:
                yield content
            chunk = stream.unused_data if stream.eof else stream.unconsumed_tail
            if stream.eof:
                stream = None
            elif not chunk and len(content) < CHUNK_BYTES:
                break
    if stream is not None or not members:
        raise InvalidRequest("body", "The gzip stream is truncated.")


def compress(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield a gzip stream of the chunks. Equal content gives equal bytes: the header has no time."""
    stream = zlib.compressobj(LEVEL, zlib.DEFLATED, GZIP_FORMAT)
    for chunk in chunks:
        if compressed := stream.compress(chunk):
            yield compressed
    yield stream.flush()

"""Tars that `Provider.get_files(exact=True)` returns: validation before they are indexed, and their report of omissions.

The content is untrusted: a program in the sandbox may have written it. Headers and maps of sparse files are checked block by
block, because Python's `tarfile` allocates memory and loops by the numbers that they declare."""

import json
import os
import re
import tarfile
from collections.abc import Iterator
from typing import Any, BinaryIO

from sandboxes.image.files import MAX_EXTENTS, MAX_REPORTED_CHARACTERS, MAX_REPORTED_PATHS, OMISSIONS_RECORD

BLOCK_BYTES = tarfile.BLOCKSIZE
MAX_RECORDS_BYTES = 1 << 17  # of one pax header: the longest path and link target, or all omissions
MAX_COUNT = (1 << 31) - 1
MAX_DIGITS = 18
# In the order in which they are reported.
OMISSION_KINDS = {
    "pipe": "named pipes",
    "socket": "sockets",
    "device": "devices",
    "long_path": "paths above 4000 bytes",
    "hard_link": "hard links stored as copies",
    "set_id_bit": "set-ID bits",
    "extended_attribute": "extended attributes",
}
_RECORD_PATTERN = re.compile(rb"([1-9]\d{0,5}) ([A-Za-z.]{1,40})=")
_VALUE_PATTERNS = {
    b"path": re.compile(rb"[^\0]+"),
    b"linkpath": re.compile(rb"[^\0]+"),
    b"hdrcharset": re.compile(rb"BINARY"),
    b"mtime": re.compile(rb"-?\d{1,20}(\.\d{1,9})?"),
    b"GNU.sparse.major": re.compile(rb"1"),
    b"GNU.sparse.minor": re.compile(rb"0"),
    b"GNU.sparse.name": re.compile(rb"[^\0]+"),
    b"GNU.sparse.realsize": re.compile(rb"\d{1,18}"),
    OMISSIONS_RECORD.encode(): re.compile(rb"[^\0]+"),
}
_SPARSE_RECORDS = {b"GNU.sparse.major", b"GNU.sparse.minor", b"GNU.sparse.name", b"GNU.sparse.realsize"}
Records = dict[bytes, bytes]


class _Invalid(Exception):
    """The tar has members, headers or maps that files.pack does not write."""


def is_exact_tar(tar: BinaryIO) -> bool:
    """Return whether a tar contains only members, pax records and maps of holes that files.pack writes.

    True also for tars of earlier versions, without hard links and holes. Leaves the file at its position."""
    start = tar.tell()
    try:
        for _ in _walk_headers(tar):
            pass
    except (_Invalid, tarfile.TarError):
        return False
    finally:
        tar.seek(start)
    return True


def read_omissions(tar: BinaryIO) -> list[dict[str, Any]]:
    """Return what an exact tar does not keep, as [{"kind", "count", "paths"}], with at most 5 paths of each kind.

    [] if nothing is missing, or if the tar states nothing or is not valid. Leaves the file at its position."""
    start, last = tar.tell(), Records()
    try:
        for records in _walk_headers(tar):
            last = records
        stated = json.loads(last.get(OMISSIONS_RECORD.encode(), b"{}"))
    except (_Invalid, tarfile.TarError, ValueError, RecursionError):
        return []
    finally:
        tar.seek(start)
    return [
        {"kind": kind, "count": count, "paths": [_make_printable(path) for path in paths[:MAX_REPORTED_PATHS]]}
        for kind in OMISSION_KINDS
        for count, paths in [_parse_omission(stated.get(kind) if isinstance(stated, dict) else None)]
        if count
    ]


def _parse_omission(stated: Any) -> tuple[int, list[str]]:
    match stated:
        case [int(count), [*paths]] if 0 < count <= MAX_COUNT and all(isinstance(path, str) for path in paths):
            return count, paths
    return 0, []


def _make_printable(path: str) -> str:
    """Return a path that JSON columns accept: bytes that are not UTF-8 become U+FFFD, as in listings, and there is no NUL."""
    text = path[:MAX_REPORTED_CHARACTERS].replace("\0", "")
    try:
        return os.fsencode(text).decode(errors="replace")
    except UnicodeEncodeError:  # a surrogate that no file name has
        return text.encode(errors="replace").decode()


def _walk_headers(tar: BinaryIO) -> Iterator[Records]:
    """Yield the pax records of each member. Raise _Invalid, or TarError for a number that is none."""
    records: Records | None = None
    while any(block := tar.read(BLOCK_BYTES)):
        if len(block) < BLOCK_BYTES:
            raise _Invalid
        kind, size = block[156:157], tarfile.nti(block[124:136])  # type: ignore[attr-defined]
        if kind == tarfile.XHDTYPE and records is None and 0 < size <= MAX_RECORDS_BYTES:
            content = tar.read(size + -size % BLOCK_BYTES)
            if any(content[size:]):  # unpackers parse the padding, too
                raise _Invalid
            records = _parse_records(content[:size])
            continue
        records = records or {}
        if records.keys() & _SPARSE_RECORDS:
            if kind != tarfile.REGTYPE or not records.keys() >= _SPARSE_RECORDS:
                raise _Invalid
            _check_map(tar, size, int(records[b"GNU.sparse.realsize"]))
        elif kind == tarfile.REGTYPE and size >= 0:
            tar.seek(size + -size % BLOCK_BYTES, os.SEEK_CUR)
        elif kind not in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE) or size:
            raise _Invalid
        yield records
        records = None
    if records is not None or not block:
        raise _Invalid  # a pax header without a member, or no end


def _parse_records(content: bytes) -> Records:
    """Parse the records of a pax header as an unpacker would."""
    records = Records()
    while content:
        match = _RECORD_PATTERN.match(content)
        end = int(match[1]) if match else 0
        if match is None or end <= match.end() or content[end - 1 : end] != b"\n" or match[2] in records:
            raise _Invalid
        value = content[match.end() : end - 1]
        pattern = _VALUE_PATTERNS.get(match[2])
        if pattern is None or not pattern.fullmatch(value):
            raise _Invalid
        records[match[2]] = value
        content = content[end:]
    return records


def _check_map(tar: BinaryIO, size: int, apparent_size: int) -> None:
    """Read the map of a sparse file, and skip its content. Its parts must be in order, within the file, and `size` in all."""
    numbers: list[int] = []
    count, buffer, stored, position = 1, b"", 0, 0
    while len(numbers) < count:
        line, newline, rest = buffer.partition(b"\n")
        if newline:
            if not (line.isdigit() and len(line) <= MAX_DIGITS):
                raise _Invalid
            numbers.append(int(line))
            count, buffer = 1 + 2 * numbers[0], rest
            if numbers[0] > MAX_EXTENTS + 1:
                raise _Invalid
        else:
            block = tar.read(BLOCK_BYTES)
            if len(block) < BLOCK_BYTES or len(buffer) > MAX_DIGITS:
                raise _Invalid
            buffer += block
            stored += BLOCK_BYTES
    for offset, length in zip(numbers[1::2], numbers[2::2], strict=True):
        if offset < position:
            raise _Invalid
        position, stored = offset + length, stored + length
    if position > apparent_size or stored != size:
        raise _Invalid
    tar.seek(sum(numbers[2::2]) + -size % BLOCK_BYTES, os.SEEK_CUR)

"""Validation of tars from untrusted sources before they are unpacked or indexed.

Headers are checked block by block first, because Python's `tarfile` allocates memory by sizes that the headers declare."""

import os
import re
import tarfile
from typing import BinaryIO

from sandboxes.providers.arguments import split_sandbox_path
from sandboxes.providers.base import WORKSPACE
from sandboxes.providers.errors import Rejected, TooLarge

MAX_MEMBERS = 100_000
BLOCK_BYTES = tarfile.BLOCKSIZE
MAX_HEADER_BYTES = 1 << 16  # size of an extended header (pax or GNU long name)
HEADER_TYPES = {tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK}
MAX_MTIME = 1 << 33  # seconds since 1970, in the year 2242: what all file systems of sandboxes store
MAX_CONSECUTIVE_HEADERS = 8  # consecutive extended headers: unpackers parse them recursively
TYPES_WITH_CONTENT = {tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE}
TYPES_WITHOUT_CONTENT = {tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE}
MAX_PAX_HEADER_BYTES = 1 << 16  # fits the longest path that files.pack writes, and a link target
_PAX_NAME_PATTERN = re.compile(rb"(\d{1,5}) (?:path|linkpath)=")


def validate_tar(tar: BinaryIO) -> None:
    """Check that a seekable file is a complete, uncompressed tar of files, directories and links with relative paths.

    Raise Rejected for any other file, TooLarge above 100000 members. Leaves the file at its beginning."""
    _check_blocks(tar)
    try:
        tar.seek(0)
        with tarfile.open(fileobj=tar, mode="r:") as members:
            for member in members:
                _check_name(member.name)
                if member.islnk():
                    _check_name(member.linkname)
                if not abs(member.mtime) <= MAX_MTIME:  # not a number is not, either
                    raise Rejected(f"The time of {member.name!r} is not one of a file.")
                members.members = []  # type: ignore[attr-defined]  # else tarfile keeps every member in memory
    except (tarfile.TarError, ValueError) as error:
        raise Rejected(f"This is not a valid tar: {error}.") from None
    tar.seek(0)


def _check_blocks(tar: BinaryIO) -> None:
    """Walk the headers without letting tarfile allocate by a declared size."""
    end = tar.seek(0, os.SEEK_END)
    tar.seek(0)
    members = headers = 0
    while any(block := tar.read(BLOCK_BYTES)):
        try:
            member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            raise Rejected("This is not an uncompressed tar, or it does not start at a header.") from None
        size = member.size if member.type in HEADER_TYPES | TYPES_WITH_CONTENT else 0
        if member.type in HEADER_TYPES:
            headers += 1
            content = tar.read(size) if 0 < size <= MAX_HEADER_BYTES else b""
            if not content or headers > MAX_CONSECUTIVE_HEADERS or b" size=" in content or b" GNU.sparse" in content:
                raise Rejected(f"The tar has an unsupported extended header before {member.name!r}.")
            tar.seek(-size % BLOCK_BYTES, os.SEEK_CUR)
        elif member.type in TYPES_WITH_CONTENT | TYPES_WITHOUT_CONTENT:
            members, headers = members + 1, 0
            tar.seek(size + -size % BLOCK_BYTES, os.SEEK_CUR)
        else:
            raise Rejected(f"{member.name!r} is not a file, directory or link.")
        if size < 0 or tar.tell() > end:
            raise Rejected(f"The tar is truncated at {member.name!r}.")
        if members > MAX_MEMBERS:
            raise TooLarge(f"The tar has more than {MAX_MEMBERS} members.")
    if not block:
        raise Rejected("The tar is truncated: its end marker is missing." if members else "The tar is empty.")


def _check_name(name: str) -> None:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/"):
        raise Rejected(f"{name!r} is an absolute path; paths in a tar are relative.")
    if parts:
        split_sandbox_path("/".join([WORKSPACE, *parts]))


def is_plain_tar(tar: BinaryIO) -> bool:
    """Return whether a tar contains only the member types and pax headers that files.pack writes.

    Other tars may make an unpacker on the host allocate unbounded memory. Leaves the file at its position."""
    start, after_pax_header = tar.tell(), False
    try:
        while any(block := tar.read(BLOCK_BYTES)):
            kind, size = block[156:157], tarfile.nti(block[124:136]) if len(block) == BLOCK_BYTES else -1  # type: ignore[attr-defined]
            # Not two pax headers in a row: an unpacker parses a chain of them recursively.
            if kind == tarfile.XHDTYPE and 0 < size <= MAX_PAX_HEADER_BYTES and not after_pax_header:
                records = tar.read(-size % BLOCK_BYTES + size)
                if not _has_only_names(records[:size]) or any(records[size:]):  # unpackers parse the padding, too
                    return False
            elif kind == tarfile.REGTYPE and size >= 0:
                tar.seek(-size % BLOCK_BYTES + size, os.SEEK_CUR)
            elif kind not in (tarfile.DIRTYPE, tarfile.SYMTYPE) or size:
                return False
            after_pax_header = kind == tarfile.XHDTYPE
    except tarfile.TarError:
        return False
    finally:
        tar.seek(start)
    return True


def _has_only_names(records: bytes) -> bool:
    """Return whether the records of a pax header, parsed as an unpacker would, set only path and linkpath."""
    while records:
        match = _PAX_NAME_PATTERN.match(records)
        end = int(match[1]) if match else 0
        if match is None or end <= match.end() or records[end - 1 : end] != b"\n":
            return False
        records = records[end:]
    return True

"""Tars that come from outside, looked at before anything is done with them: what reads them next may have little memory."""

import os
import re
import tarfile
from typing import BinaryIO

from sandboxes.providers.base import WORKSPACE, Rejected, TooLarge, split_sandbox_path

MAX_MEMBERS = 100_000  # members
BLOCK_BYTES = tarfile.BLOCKSIZE
MAX_HEADER_BYTES = 1 << 16  # bytes of a header that has names for the next member
HEADER_TYPES = {tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK}
MAX_CONSECUTIVE_HEADERS = 8  # in a row: an unpacker takes them apart by recursion
TYPES_WITH_CONTENT = {tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE}
MAX_PAX_HEADER_BYTES = 1 << 16  # bytes of a pax header: a path of files.LONGEST and a link's target fit
_PAX_NAME_PATTERN = re.compile(rb"(\d{1,5}) (?:path|linkpath)=")
TYPES_WITHOUT_CONTENT = {tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE}


def validate_tar(tar: BinaryIO) -> None:
    """Rejected unless this is a whole uncompressed tar of files, directories and links that lie below where it is
    unpacked; TooLarge past 100000 of them. Leaves the tar at its beginning."""
    _check_blocks(tar)
    try:
        tar.seek(0)
        with tarfile.open(fileobj=tar, mode="r:") as members:
            for member in members:
                _check_name(member.name)
                if member.islnk():
                    _check_name(member.linkname)
                members.members = []  # type: ignore[attr-defined]  # else it remembers every one
    except (tarfile.TarError, ValueError) as error:
        raise Rejected(f"This is no tar: {error}.") from None
    tar.seek(0)


def _check_blocks(tar: BinaryIO) -> None:
    """Go from header to header, without taking anything apart whose size a stranger says."""
    end = tar.seek(0, os.SEEK_END)
    tar.seek(0)
    members = headers = 0
    while any(head := tar.read(BLOCK_BYTES)):
        try:
            member = tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            raise Rejected("This is no uncompressed tar, or not from its beginning on.") from None
        size = member.size if member.type in HEADER_TYPES | TYPES_WITH_CONTENT else 0
        if member.type in HEADER_TYPES:
            headers += 1
            said = tar.read(size) if 0 < size <= MAX_HEADER_BYTES else b""
            if not said or headers > MAX_CONSECUTIVE_HEADERS or b" size=" in said or b" GNU.sparse" in said:
                raise Rejected(f"The tar has a header before {member.name!r} that is not taken.")
            tar.seek(-size % BLOCK_BYTES, os.SEEK_CUR)
        elif member.type in TYPES_WITH_CONTENT | TYPES_WITHOUT_CONTENT:
            members, headers = members + 1, 0
            tar.seek(size + -size % BLOCK_BYTES, os.SEEK_CUR)
        else:
            raise Rejected(f"{member.name!r} is neither a file nor a directory nor a link.")
        if size < 0 or tar.tell() > end:
            raise Rejected(f"The tar ends within {member.name!r}.")
        if members > MAX_MEMBERS:
            raise TooLarge(f"The tar has more than {MAX_MEMBERS} members.")
    if not head:
        raise Rejected("The tar ends too early." if members else "There is no tar.")


def _check_name(name: str) -> None:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/"):
        raise Rejected(f"{name!r} is no path relative to where the tar is unpacked.")
    if parts:
        split_sandbox_path("/".join([WORKSPACE, *parts]))


def is_plain_tar(tar: BinaryIO) -> bool:
    """Is it made only of what files.pack writes? Whatever else a sandbox may have put into a tar of its own, an unpacker
    out here could take far too much memory over. Leaves the tar where it was."""
    start, named = tar.tell(), False
    try:
        while any(head := tar.read(BLOCK_BYTES)):
            kind, size = head[156:157], tarfile.nti(head[124:136]) if len(head) == BLOCK_BYTES else -1  # type: ignore[attr-defined]
            if kind == tarfile.XHDTYPE and 0 < size <= MAX_PAX_HEADER_BYTES and not named:  # a chain of them would be recursion
                records = tar.read(-size % BLOCK_BYTES + size)
                if not _has_only_names(records[:size]) or any(records[size:]):  # an unpacker reads what comes after, too
                    return False
            elif kind == tarfile.REGTYPE and size >= 0:
                tar.seek(-size % BLOCK_BYTES + size, os.SEEK_CUR)
            elif kind not in (tarfile.DIRTYPE, tarfile.SYMTYPE) or size:
                return False
            named = kind == tarfile.XHDTYPE
    except tarfile.TarError:
        return False
    finally:
        tar.seek(start)
    return True


def _has_only_names(records: bytes) -> bool:
    """Are these a pax header's records, taken apart as an unpacker would, of paths alone?"""
    while records:
        found = _PAX_NAME_PATTERN.match(records)
        end = int(found[1]) if found else 0
        if found is None or end <= found.end() or records[end - 1 : end] != b"\n":
            return False
        records = records[end:]
    return True

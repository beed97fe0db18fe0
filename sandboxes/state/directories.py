"""Local directory that is copied into a sandbox and updated from the sandbox's copy afterwards.

The returned tar is untrusted: it is written below the directory only, and no link in it is followed."""

import hashlib
import tarfile
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO, NamedTuple

from sandboxes.image import files
from sandboxes.providers import tar_validation
from sandboxes.providers.errors import Rejected
from sandboxes.providers.tar_validation import is_plain_tar
from sandboxes.state.spool import open_spool

EXCLUDED_NAMES = (".home",)  # never copied in either direction: every sandbox has its own


class TarEntry(NamedTuple):
    kind: bytes
    mode: int
    size: int
    digest: str
    target: str


def pack(root: Path, out: BinaryIO) -> None:
    """Write the content of a directory as a tar, and rewind it. Raise Rejected, TooLarge or OSError."""
    try:
        files.pack(str(root), out, exclude=EXCLUDED_NAMES)
    except files.BadPath:
        raise Rejected(f"{root} is not a directory.") from None
    tar_validation.validate_tar(out)


def apply_changes(root: Path, sent: BinaryIO, returned: BinaryIO) -> int:
    """Apply the differences between two tars to a directory: `sent` was written by `pack`, `returned` is the sandbox's copy.

    Paths that are equal in both stay untouched. Return the number of changed and removed paths. Raise Rejected or OSError."""
    tar_validation.validate_tar(returned)
    if not is_plain_tar(returned):
        raise Rejected("The returned tar has unsupported members or headers.")
    before, after = _read_entries(sent), _read_entries(returned)
    changed = {path for path, entry in after.items() if before.get(path) != entry}
    removed = before.keys() - after.keys()
    replaced = {path for path in changed & before.keys() if before[path].kind != after[path].kind}
    try:
        files.remove_files(str(root), removed | replaced)
        with open_spool() as changed_members:
            _copy_members(returned, changed, changed_members)
            files.unpack(str(root), changed_members)
    except files.BadPath as error:
        raise Rejected(f"The returned tar cannot be unpacked into {root}: {error}.") from error
    return len(changed) + len(removed)


def _read_entries(tar: BinaryIO) -> dict[str, TarEntry]:
    entries: dict[str, TarEntry] = {}
    tar.seek(0)
    with tarfile.open(fileobj=tar, mode="r:") as members:
        for member in members:
            content = members.extractfile(member) if member.isreg() else None
            digest = hashlib.file_digest(content, "sha256").hexdigest() if content else ""  # type: ignore[arg-type]
            path = _member_path(member)
            if path and not set(path.split("/")) & set(EXCLUDED_NAMES):
                entries[path] = TarEntry(member.type, member.mode & 0o777, member.size, digest, member.linkname)
            members.members = []  # type: ignore[attr-defined]  # else tarfile keeps every member in memory
    return entries


def _copy_members(tar: BinaryIO, chosen: Collection[str], out: BinaryIO) -> None:
    """Copy the chosen members to another tar, and rewind it."""
    tar.seek(0)
    with (
        tarfile.open(fileobj=tar, mode="r:") as members,
        tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as copy,
    ):
        for member in members:
            if _member_path(member) in chosen:
                copy.addfile(member, members.extractfile(member) if member.isreg() else None)
            members.members = copy.members = []  # type: ignore[attr-defined]
    out.seek(0)


def _member_path(member: tarfile.TarInfo) -> str:
    return "/".join(part for part in member.name.split("/") if part not in ("", "."))

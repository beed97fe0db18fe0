"""A directory of this machine on its way into a sandbox and back. What comes back comes from a stranger: it is written
below that directory and nowhere else, and no link in it is followed."""

import hashlib
import tarfile
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO, NamedTuple

from sandboxes.image import files
from sandboxes.providers import tar_validation
from sandboxes.providers.base import Rejected
from sandboxes.providers.tar_validation import is_plain_tar
from sandboxes.state.spool import open_spool

EXCLUDED_NAMES = (".home",)  # what has such a name stays on its side: every sandbox has one of its own


class TarEntry(NamedTuple):
    kind: bytes
    mode: int
    size: int
    digest: str
    target: str


def pack(root: Path, out: BinaryIO) -> None:
    """Write everything in a directory as a tar, which is then at its beginning. Rejected, TooLarge, OSError."""
    try:
        files.pack(str(root), out, exclude=EXCLUDED_NAMES)
    except files.BadPath:
        raise Rejected(f"{root} is no directory.") from None
    tar_validation.validate_tar(out)


def apply_changes(root: Path, sent: BinaryIO, back: BinaryIO) -> int:
    """Do in the directory what was done to a copy of it: `sent` is what `pack` wrote, `back` what it has become. What
    differs is written, what is gone is removed, all else stays as it is; how many paths that were. Rejected, OSError."""
    tar_validation.validate_tar(back)
    if not is_plain_tar(back):
        raise Rejected("What came back is no plain tar.")
    before, after = _read_entries(sent), _read_entries(back)
    changed = {path for path, entry in after.items() if before.get(path) != entry}
    gone = before.keys() - after.keys()
    other = {path for path in changed & before.keys() if before[path].kind != after[path].kind}
    try:
        files.remove_files(str(root), gone | other)
        with open_spool() as part:
            _copy_members(back, changed, part)
            files.unpack(str(root), part)
    except files.BadPath as wrong:
        raise Rejected(f"What came back does not fit into {root}: {wrong}.") from wrong
    return len(changed) + len(gone)


def _read_entries(tar: BinaryIO) -> dict[str, TarEntry]:
    found: dict[str, TarEntry] = {}
    tar.seek(0)
    with tarfile.open(fileobj=tar, mode="r:") as members:
        for member in members:
            content = members.extractfile(member) if member.isreg() else None
            digest = hashlib.file_digest(content, "sha256").hexdigest() if content else ""  # type: ignore[arg-type]
            path = _member_path(member)
            if path and not set(path.split("/")) & set(EXCLUDED_NAMES):
                found[path] = TarEntry(member.type, member.mode & 0o777, member.size, digest, member.linkname)
            members.members = []  # type: ignore[attr-defined]  # else it remembers every one
    return found


def _copy_members(tar: BinaryIO, chosen: Collection[str], out: BinaryIO) -> None:
    """Write those members to another tar, which is then at its beginning."""
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

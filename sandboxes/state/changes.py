"""What a look at a sandbox's /data finds changed since it was given, read and brought into the store."""

import hashlib
import tarfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import BinaryIO

from django.conf import settings
from django.db.models import Count, Exists, OuterRef, Sum

from sandboxes.db.clock import Clock
from sandboxes.errors import DataFull
from sandboxes.lifecycle import checkpoint
from sandboxes.models import Sandbox
from sandboxes.models.state import AgentData, Attachment, DataFile, DataObject, format_key_timestamp
from sandboxes.providers.base import DATA, FileStat, Provider, Rejected
from sandboxes.providers.tar_validation import is_plain_tar
from sandboxes.state.spool import FileSlice, open_spool, run_parallel
from sandboxes.storage import get_store
from sandboxes.storage.base import CHUNK_BYTES

MAX_PATH_BYTES = 1000  # bytes: with what a key has before it, any S3 takes that
OWNER_READ_BIT = 0o400
MAX_LIVE_OBJECTS = 32  # of one agent, before they are packed into one
TAR_MARGIN_BYTES = 16 << 10  # bytes of headers and filling of one member of a tar at most, its path being limited; and its end
MEMBER_OVERHEAD_BYTES = 2048  # bytes that a tar may add to a file
REPACK_SLACK_BYTES = 1 << 20  # bytes of outdated members that are never worth packing


@dataclass
class ChangedFile:
    """One changed file, as read from the sandbox: where its bytes are in the spooled tar."""

    path: str
    offset: int
    size: int
    digest: str
    object: DataObject | None = None


@dataclass
class ManifestDiff:
    """What a look at a sandbox found different from what it was given."""

    there: Mapping[str, FileStat]
    look: str
    files: list[str] = field(default_factory=list)  # content, mode or both
    others: list[str] = field(default_factory=list)  # directories and links
    gone: list[str] = field(default_factory=list)
    packing: bool = False  # every file is read, so that all of them go into one new object
    left_out: dict[str, str] = field(default_factory=dict)  # path -> why


def digest_manifest(there: Mapping[str, FileStat]) -> str:
    """One value for a listing: it differs if anything in it does."""
    digest = hashlib.sha256()
    for path in sorted(there):
        stat = there[path]
        digest.update(
            f"{path}\0{stat.kind}\0{stat.mode:o}\0{stat.size}\0{stat.stamp}\0{stat.target}\0".encode(errors="surrogateescape")
        )
    return digest.hexdigest()


def list_parents(path: str) -> Iterator[str]:
    """The directories that it lies in: a, a/b of a/b/c."""
    parts = path.split("/")
    return ("/".join(parts[:depth]) for depth in range(1, len(parts)))


def is_unchanged(path: str, stat: FileStat, here: Attachment) -> bool:
    given = here.base.get(path)
    return given is not None and given[2] == stat.stamp


def diff_manifest(here: Attachment, there: Mapping[str, FileStat], look: str) -> ManifestDiff:
    change, half_written = ManifestDiff(there, look), set(here.pulling)
    for path, stat in there.items():
        if path in half_written:
            change.look = ""  # whoever was writing it has died: the next attach writes it again
        elif why := _describe_refusal(path, stat):
            change.left_out[path] = why
        elif stat.kind != "file":
            change.others.append(path)
        elif not is_unchanged(path, stat, here):
            change.files.append(path)
    lacking = (path for path in here.base if path not in there or path in change.left_out)
    change.gone = [path for path in lacking if path not in half_written]
    if change.files and not half_written and _is_repacking_due(here):
        change.files = [path for path, stat in there.items() if stat.kind == "file" and path not in change.left_out]
        change.packing = True
    return change


def _describe_refusal(path: str, stat: FileStat) -> str:
    """Why this is not stored; "" if it is."""
    if stat.kind == "other":
        return "neither a regular file nor a directory nor a link"
    try:
        length, _ = len(path.encode()), stat.target.encode()
    except UnicodeEncodeError:
        return "its name, or what it links to, is no UTF-8"
    return f"its path is longer than {MAX_PATH_BYTES} bytes" if length > MAX_PATH_BYTES else ""


def _is_repacking_due(here: Attachment) -> bool:
    live = DataFile.objects.filter(stored_in=OuterRef("pk"))
    kept = DataObject.objects.filter(Exists(live), data=here.data_id).aggregate(count=Count("pk"), size=Sum("size_bytes"))
    # Of the data it may have been read some time ago, and then is a little wrong.
    needed = here.data.size_bytes + here.data.files * MEMBER_OVERHEAD_BYTES
    return bool(kept["count"] >= MAX_LIVE_OBJECTS or (kept["size"] or 0) > 2 * needed + REPACK_SLACK_BYTES)


def fetch_changes(
    here: Attachment, sandbox: Sandbox, provider: Provider, change: ManifestDiff, stack: ExitStack, later: Clock
) -> dict[str, ChangedFile]:
    """Fetch the changed files, and have in the store those whose bytes are others than before."""
    tar = stack.enter_context(open_spool())
    most, size = settings.DATA_MOST_BYTES + (len(change.files) << 13) + CHUNK_BYTES, 0
    for chunk in provider.get_files(sandbox.ref, DATA, only=change.files):
        size += len(chunk)
        if size > most:
            raise DataFull("/data grew while it was being stored.")
        tar.write(chunk)
    _refresh_stamps_after_read(sandbox, provider, change)
    pieces = _index_tar(tar, set(change.files))
    fresh = [piece for piece in pieces.values() if change.packing or piece.digest != here.base.get(piece.path, [0, ""])[1]]
    if fresh:
        upload_tar(here.data, tar, size, fresh, later, stack)
        checkpoint("data stored", here)
    return pieces


def _refresh_stamps_after_read(sandbox: Sandbox, provider: Provider, change: ManifestDiff) -> None:
    """A file that its owner may not read has another stamp once it was read: without it the file would look changed for
    ever, and never be given what is newer."""
    locked = [path for path in change.files if not change.there[path].mode & OWNER_READ_BIT]
    if locked:
        again = provider.manifest(sandbox.ref, DATA)
        same = {
            path: again[path] for path in locked if path in again and _is_same_except_stamp(change.there[path], again[path])
        }
        change.there = {**change.there, **same}
        change.look = change.look and digest_manifest(change.there)


def _is_same_except_stamp(was: FileStat, is_now: FileStat) -> bool:
    return was._replace(stamp="") == is_now._replace(stamp="")


def _index_tar(tar: BinaryIO, wanted: set[str]) -> dict[str, ChangedFile]:
    tar.seek(0)
    if not is_plain_tar(tar):
        raise Rejected("what the sandbox sent is no plain tar")
    pieces = {}
    with tarfile.open(fileobj=tar, mode="r|", bufsize=CHUNK_BYTES) as members:
        for member in members:
            members.members = []  # type: ignore[attr-defined]  # else it remembers each of any number of bare headers
            if member.isreg() and member.name in wanted:
                digest, content = hashlib.sha256(), FileSlice(tar, member.offset_data, member.size)
                while chunk := content.read(CHUNK_BYTES):
                    digest.update(chunk)
                pieces[member.name] = ChangedFile(member.name, member.offset_data, member.size, digest.hexdigest())
    return pieces


def upload_tar(data: AgentData, tar: BinaryIO, size: int, fresh: list[ChangedFile], later: Clock, stack: ExitStack) -> None:
    """Store the tar as it came; where a value may not be that large, in tars of fewer files each."""
    bundles = [(tar, size, fresh)]
    largest = get_store().max_value_bytes
    if largest is not None and size > largest:
        bundles = [_write_bundle(tar, group, stack) for group in _group_by_size(fresh, largest)]
    moment = later()

    def one(bundle: tuple[BinaryIO, int, list[ChangedFile]]) -> None:
        source, length, group = bundle
        name = uuid.uuid4()
        key = f"agents/{data.agent_did}/{format_key_timestamp(moment)}-{name.hex}.tar"
        source.seek(0)
        get_store().upload(key, source)
        for piece in group:
            piece.object = DataObject(id=name, data_id=data.pk, key=key, size_bytes=length, at=moment)

    run_parallel(one, bundles)


def _group_by_size(pieces: list[ChangedFile], largest: int) -> list[list[ChangedFile]]:
    groups: list[list[ChangedFile]] = [[]]
    room = largest - TAR_MARGIN_BYTES
    for piece in pieces:
        needs = piece.size + TAR_MARGIN_BYTES
        if needs > largest - TAR_MARGIN_BYTES:
            raise DataFull(
                f"{piece.path} has {piece.size} bytes; this store takes at most {largest - 2 * TAR_MARGIN_BYTES} of one file."
            )
        if needs > room:
            groups.append([])
            room = largest - TAR_MARGIN_BYTES
        groups[-1].append(piece)
        room -= needs
    return groups


def _write_bundle(tar: BinaryIO, group: list[ChangedFile], stack: ExitStack) -> tuple[BinaryIO, int, list[ChangedFile]]:
    out = stack.enter_context(open_spool())
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as members:
        for piece in group:
            member = tarfile.TarInfo(piece.path)
            member.size = piece.size
            source = FileSlice(tar, piece.offset, piece.size)
            members.addfile(member, source)
            piece.offset = out.tell() - (piece.size + -piece.size % tarfile.BLOCKSIZE)
    return out, out.tell(), group

"""Diff of a sandbox's /data against its last synced manifest, and upload of the changed files."""

import hashlib
import tarfile
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from typing import BinaryIO

from django.conf import settings
from django.db.models import Count, Exists, OuterRef, Sum

from sandboxes.claims import track_transfer
from sandboxes.db.clock import Clock
from sandboxes.errors import DataFull
from sandboxes.lifecycle import checkpoint
from sandboxes.models import Sandbox
from sandboxes.models.state import AgentData, Attachment, DataFile, DataObject, format_key_timestamp
from sandboxes.providers.base import DATA, FileStat, Provider
from sandboxes.providers.errors import FailureCause, SandboxUnreadable, TooLarge
from sandboxes.providers.tar_validation import is_plain_tar
from sandboxes.state import disk_space, uploads
from sandboxes.state.spool import FileSlice, open_spool, run_parallel
from sandboxes.storage import get_store
from sandboxes.storage.base import CHUNK_BYTES

MAX_PATH_BYTES = 1000  # leaves room for a key prefix below S3's limit of 1024 bytes for a key
OWNER_READ_BIT = 0o400
MAX_LIVE_OBJECTS = 32  # per agent; above it the next upload repacks them into one
TAR_MARGIN_BYTES = 16 << 10  # upper bound of a member's headers and padding (paths are limited), and of the end of a tar
MEMBER_OVERHEAD_BYTES = 2048  # tar headers and padding of one file, as estimated for repacking
REPACK_SLACK_BYTES = 1 << 20  # outdated bytes that never justify a repack


@dataclass
class ChangedFile:
    """A changed file, and the position of its content in the spooled tar."""

    path: str
    offset: int
    size: int
    digest: str
    object: DataObject | None = None


@dataclass
class ManifestDiff:
    """Differences between a sandbox's manifest and the attachment's base."""

    manifest: Mapping[str, FileStat]
    digest: str  # SHA-256 of the manifest; "" forces the next scan to compare every path
    files: list[str] = field(default_factory=list)  # regular files with changed content or mode; all files in a repack
    non_files: list[str] = field(default_factory=list)  # directories and links
    removed: list[str] = field(default_factory=list)
    is_repack: bool = False  # all files are read and uploaded as one new object
    unstorable: dict[str, str] = field(default_factory=dict)  # path -> reason


def digest_manifest(manifest: Mapping[str, FileStat]) -> str:
    """Return the SHA-256 (hexadecimal) of a manifest. It covers kind, mode, size, stamp and link target of every path."""
    digest = hashlib.sha256()
    for path in sorted(manifest):
        stat = manifest[path]
        digest.update(
            f"{path}\0{stat.kind}\0{stat.mode:o}\0{stat.size}\0{stat.stamp}\0{stat.target}\0".encode(errors="surrogateescape")
        )
    return digest.hexdigest()


def list_parents(path: str) -> Iterator[str]:
    """Yield the ancestor directories of a relative path, outermost first: `a`, `a/b` for `a/b/c`."""
    parts = path.split("/")
    return ("/".join(parts[:depth]) for depth in range(1, len(parts)))


def is_unchanged(path: str, stat: FileStat, attachment: Attachment) -> bool:
    """Return whether a path has the stamp that the attachment recorded for it."""
    base_entry = attachment.base.get(path)
    return base_entry is not None and base_entry[2] == stat.stamp


def diff_manifest(attachment: Attachment, manifest: Mapping[str, FileStat], manifest_digest: str) -> ManifestDiff:
    """Compare a manifest with the attachment's base.

    Paths of an interrupted pull are ignored: the next attach writes them again."""
    diff, partial = ManifestDiff(manifest, manifest_digest), set(attachment.pulling)
    for path, stat in manifest.items():
        if path in partial:
            diff.digest = ""  # the pull that was writing this path was interrupted
        elif reason := _describe_refusal(path, stat):
            diff.unstorable[path] = reason
        elif stat.kind != "file":
            diff.non_files.append(path)
        elif not is_unchanged(path, stat, attachment):
            diff.files.append(path)
    missing = (path for path in attachment.base if path not in manifest or path in diff.unstorable)
    diff.removed = [path for path in missing if path not in partial]
    if diff.files and not partial and _is_repacking_due(attachment):
        diff.files = [path for path, stat in manifest.items() if stat.kind == "file" and path not in diff.unstorable]
        diff.is_repack = True
    return diff


def _describe_refusal(path: str, stat: FileStat) -> str:
    """Return the reason why a path cannot be stored; "" if it can."""
    if stat.kind == "other":
        return "not a regular file, directory or link"
    try:
        length, _ = len(path.encode()), stat.target.encode()
    except UnicodeEncodeError:
        return "its name or link target is not UTF-8"
    return f"its path is longer than {MAX_PATH_BYTES} bytes" if length > MAX_PATH_BYTES else ""


def _is_repacking_due(attachment: Attachment) -> bool:
    live = DataFile.objects.filter(stored_in=OuterRef("pk"))
    stored = DataObject.objects.filter(Exists(live), data=attachment.data_id).aggregate(
        count=Count("pk"), size=Sum("size_bytes")
    )
    # The totals of `data` may be slightly outdated, which is precise enough for this decision.
    needed = attachment.data.size_bytes + attachment.data.files * MEMBER_OVERHEAD_BYTES
    return bool(stored["count"] >= MAX_LIVE_OBJECTS or (stored["size"] or 0) > 2 * needed + REPACK_SLACK_BYTES)


def fetch_changes(
    attachment: Attachment, sandbox: Sandbox, provider: Provider, diff: ManifestDiff, stack: ExitStack, clock: Clock
) -> dict[str, ChangedFile]:
    """Fetch the changed files from the sandbox and upload those with new content. Return them by path.

    Raise DataFull if /data outgrew the limit since the manifest was read."""
    tar = stack.enter_context(open_spool())
    max_tar_bytes, size = settings.DATA_MOST_BYTES + (len(diff.files) << 13) + CHUNK_BYTES, 0
    try:
        chunks = provider.get_files(sandbox.ref, DATA, only=diff.files, max_bytes=max_tar_bytes)
        for chunk in disk_space.check_while_writing(chunks):
            size += len(chunk)
            tar.write(chunk)
    except TooLarge:
        raise DataFull("/data grew beyond its limit while it was being stored.") from None
    _refresh_stamps_after_read(sandbox, provider, diff)
    changed_files = index_tar(tar, wanted=set(diff.files))
    to_upload = [
        file for file in changed_files.values() if diff.is_repack or file.digest != attachment.base.get(file.path, [0, ""])[1]
    ]
    if to_upload:
        upload_tar(attachment.data, tar, size, to_upload, clock, stack)
        checkpoint("data stored", attachment)
    return changed_files


def _refresh_stamps_after_read(sandbox: Sandbox, provider: Provider, diff: ManifestDiff) -> None:
    """Update the stamps of files that their owner may not read: reading them changes their stamp.

    With the old stamp such a file would look changed in every scan, and would never be overwritten by a newer version."""
    unreadable = [path for path in diff.files if not diff.manifest[path].mode & OWNER_READ_BIT]
    if unreadable:
        refreshed = provider.manifest(sandbox.ref, DATA)
        unchanged = {
            path: refreshed[path]
            for path in unreadable
            if path in refreshed and _is_same_except_stamp(diff.manifest[path], refreshed[path])
        }
        diff.manifest = {**diff.manifest, **unchanged}
        diff.digest = diff.digest and digest_manifest(diff.manifest)


def _is_same_except_stamp(before: FileStat, after: FileStat) -> bool:
    return before._replace(stamp="") == after._replace(stamp="")


def index_tar(tar: BinaryIO, *, wanted: Collection[str] | None = None) -> dict[str, ChangedFile]:
    """Return the regular files of a spooled tar by path, with their digests. `wanted`: of these paths alone.

    Raise SandboxUnreadable if the tar is none that a sandbox sends."""
    tar.seek(0)
    if not is_plain_tar(tar):
        raise SandboxUnreadable("The sandbox sent a tar with unsupported members or headers.", cause=FailureCause.AGENT_FAILED)
    changed_files = {}
    with tarfile.open(fileobj=tar, mode="r|", bufsize=CHUNK_BYTES) as members:
        for member in members:
            members.members = []  # type: ignore[attr-defined]  # else tarfile keeps every member in memory
            if member.isreg() and (wanted is None or member.name in wanted):
                digest, content = hashlib.sha256(), FileSlice(tar, member.offset_data, member.size)
                while chunk := content.read(CHUNK_BYTES):
                    digest.update(chunk)
                changed_files[member.name] = ChangedFile(member.name, member.offset_data, member.size, digest.hexdigest())
    return changed_files


def upload_tar(data: AgentData, tar: BinaryIO, size: int, to_upload: list[ChangedFile], clock: Clock, stack: ExitStack) -> None:
    """Upload a tar of changed files, and set the object of each. A tar above the store's value limit is split first.

    The keys stay claimed until `stack` is closed, by which time the caller has recorded the objects. Raise DataFull if one file
    alone exceeds the limit."""
    parts = [(tar, size, to_upload)]
    max_object_bytes = get_store().max_value_bytes
    if max_object_bytes is not None and size > max_object_bytes:
        parts = [_write_partial_tar(tar, group, stack) for group in _group_by_size(to_upload, max_object_bytes)]
    now = clock()
    objects = [_build_object(data, length, now) for _, length, _ in parts]
    stack.enter_context(uploads.claim_keys([stored.key for stored in objects], clock=clock))

    def upload(part: tuple[BinaryIO, int, list[ChangedFile]], stored: DataObject) -> None:
        source, _, group = part
        source.seek(0)
        get_store().upload(stored.key, track_transfer(source))
        for file in group:
            file.object = stored

    run_parallel(lambda job: upload(*job), zip(parts, objects, strict=True))


def _build_object(data: AgentData, size: int, now: datetime) -> DataObject:
    name = uuid.uuid4()
    key = f"agents/{data.agent_did}/{format_key_timestamp(now)}-{name.hex}.tar"
    return DataObject(id=name, data_id=data.pk, key=key, size_bytes=size, at=now)


def _group_by_size(changed_files: list[ChangedFile], max_object_bytes: int) -> list[list[ChangedFile]]:
    groups: list[list[ChangedFile]] = [[]]
    room = max_object_bytes - TAR_MARGIN_BYTES
    for file in changed_files:
        required = file.size + TAR_MARGIN_BYTES
        if required > max_object_bytes - TAR_MARGIN_BYTES:
            raise DataFull(
                f"{file.path} has {file.size} bytes; "
                f"this store accepts at most {max_object_bytes - 2 * TAR_MARGIN_BYTES} per file."
            )
        if required > room:
            groups.append([])
            room = max_object_bytes - TAR_MARGIN_BYTES
        groups[-1].append(file)
        room -= required
    return groups


def _write_partial_tar(tar: BinaryIO, group: list[ChangedFile], stack: ExitStack) -> tuple[BinaryIO, int, list[ChangedFile]]:
    out = stack.enter_context(open_spool())
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as members:
        for file in group:
            member = tarfile.TarInfo(file.path)
            member.size = file.size
            source = FileSlice(tar, file.offset, file.size)
            members.addfile(member, source)
            file.offset = out.tell() - (file.size + -file.size % tarfile.BLOCKSIZE)
    return out, out.tell(), group

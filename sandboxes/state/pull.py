"""Pull: write versions that are newer in the store into a sandbox's /data."""

import hashlib
import tarfile
import uuid
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from datetime import datetime
from typing import Any, BinaryIO

from django.db.models import F, Q

from sandboxes.claims import CLAIM_TTL, SelfGuardedClaim, note_progress, track_transfer
from sandboxes.db.clock import Clock
from sandboxes.deferred_writes import end_if_unanswered
from sandboxes.lifecycle import checkpoint
from sandboxes.models import Sandbox
from sandboxes.models.state import AgentData, Attachment, DataEvent, DataFile, DataObject
from sandboxes.providers.base import DATA, FileStat, Provider
from sandboxes.state.changes import digest_manifest, is_unchanged, list_parents
from sandboxes.state.merge import record_event
from sandboxes.state.spool import FileSlice, open_spool, run_parallel
from sandboxes.storage import get_store
from sandboxes.storage.base import CHUNK_BYTES, StoreError

MAX_RANGE_REQUESTS = 8  # ranges of one object; above that the whole object costs less than the requests and open files


class ObjectMissing(StoreError):
    """An object is missing in the store: another sandbox may have stored newer versions since the rows were read."""


def claim_pull(attachment: Attachment, clock: Clock) -> SelfGuardedClaim | None:
    """Claim the right to write into the sandbox. Return the claim if this call got it."""
    now = clock()
    free = Q(pull_until__isnull=True) | Q(pull_until__lt=now)
    claim = SelfGuardedClaim(
        Attachment.objects.filter(pk=attachment.pk), deadline=now + CLAIM_TTL, clock=clock, column="pull_until"
    )
    with end_if_unanswered(claim.end, claim):
        claimed = Attachment.objects.filter(free, pk=attachment.pk, version=attachment.version).update(
            version=F("version") + 1, pull_until=claim.deadline
        )
    if not claimed:
        return None
    attachment.version += 1
    attachment.pull_until = claim.deadline
    return claim


def release_pull(attachment: Attachment, claim: SelfGuardedClaim) -> None:
    """End the claim of a pull that failed, also if another process has written the attachment meanwhile."""
    with claim.lock:
        Attachment.objects.filter(pk=attachment.pk, pull_until=claim.deadline).update(pull_until=None)


def pull(attachment: Attachment, sandbox: Sandbox, provider: Provider, clock: Clock, *, is_first: bool = False) -> None:
    """Write the versions that are newer than the sandbox's copies, except paths with unsaved changes in the sandbox.

    The excluded versions stay unseen until `persist` has merged the sandbox's changes. Call after claim_pull. `is_first`:
    nothing has run in the sandbox since its start, so it has no changes, and is not listed before."""
    note_progress()
    revision = AgentData.objects.values_list("revision", flat=True).get(pk=attachment.data_id)
    newer = DataFile.objects.filter(data=attachment.data_id, revision__gt=attachment.revision)
    rows = [row for row in newer.select_related("stored_in") if attachment.base.get(row.path, [0])[0] != row.revision]
    interrupted = set(attachment.pulling)
    if interrupted:  # an interrupted pull may have left any content at its paths
        rows += DataFile.objects.filter(data=attachment.data_id, path__in=interrupted - {row.path for row in rows})
    is_listed = not is_first or bool(attachment.base) or bool(interrupted)
    manifest = provider.manifest(sandbox.ref, DATA) if is_listed else {}
    unseen = {
        row.path: row for row in rows if row.path not in interrupted and _is_changed_in_sandbox(row, attachment, manifest)
    }
    rows = [row for row in rows if row.path not in unseen]
    blocked = _find_blocked_paths(rows, manifest)
    unseen |= {row.path: row for row in rows if row.path in blocked}
    rows = [row for row in rows if row.path not in unseen]
    revision = min([revision, *(row.revision - 1 for row in unseen.values())])
    with open_spool() as tar:
        write_tar([row for row in rows if not row.removed], tar, now=clock())
        # Recorded only after all content is fetched, because the store may be unavailable for long.
        _update_attachment(attachment, pulling=sorted(row.path for row in rows))
        checkpoint("pull decided", attachment)
        manifest = _write_to_sandbox(sandbox, provider, rows, manifest, tar)
    checkpoint("pulled", attachment)
    for row in rows:
        if row.removed:
            attachment.base.pop(row.path, None)
        else:
            attachment.base[row.path] = [row.revision, row.digest, _stamp_if_written(row, manifest.get(row.path))]
    is_clean = (
        all(is_unchanged(path, stat, attachment) for path, stat in manifest.items())
        and attachment.base.keys() <= manifest.keys()
    )
    _update_attachment(
        attachment,
        pulling=[],
        pull_until=None,
        base=attachment.base,
        revision=revision,
        look=digest_manifest(manifest) if is_clean else "",
    )


def _stamp_if_written(row: DataFile, stat: FileStat | None) -> str:
    """Return the stamp of the version just written; "" if a program in the sandbox has changed it again since."""
    if stat is None or (row.kind, row.size_bytes, row.target) != (stat.kind, stat.size, stat.target):
        return ""
    return stat.stamp if row.kind != "file" or row.mtime == stat.mtime else ""


def _is_changed_in_sandbox(row: DataFile, attachment: Attachment, manifest: Mapping[str, FileStat]) -> bool:
    stat = manifest.get(row.path)
    if stat is None:
        return row.path in attachment.base  # removed in the sandbox, which is not stored yet
    if stat.kind == row.kind == "directory":
        return False
    return not is_unchanged(row.path, stat, attachment)


def _find_blocked_paths(rows: list[DataFile], manifest: Mapping[str, FileStat]) -> set[str]:
    """Return the paths that cannot be written now, because the sandbox has unsaved changes around them.

    A path is blocked by a directory in its place with content that stays, or by a file among its ancestors that stays."""
    removable = {row.path for row in rows if row.path in manifest and (row.removed or manifest[row.path].kind != row.kind)}
    nonempty = {parent for path in manifest if path not in removable for parent in list_parents(path)}
    for path in sorted(removable, reverse=True):  # deepest first
        if path in nonempty:
            removable.discard(path)
            nonempty.update(list_parents(path))
    files = {path for path, stat in manifest.items() if stat.kind != "directory"} - removable
    return {
        row.path
        for row in rows
        if not row.removed
        and ((row.path in nonempty and row.kind != "directory") or not files.isdisjoint(list_parents(row.path)))
    }


def _write_to_sandbox(
    sandbox: Sandbox, provider: Provider, rows: list[DataFile], manifest: dict[str, FileStat], tar: BinaryIO
) -> dict[str, FileStat]:
    """Write the live versions and remove the others. Return the manifest afterwards."""
    live = [row for row in rows if not row.removed]
    removed = [row.path for row in rows if row.removed and row.path in manifest]
    removed += [row.path for row in live if row.path in manifest and manifest[row.path].kind != row.kind]
    if removed:
        provider.remove_files(sandbox.ref, DATA, removed)
    if live:
        return provider.put_and_list_files(sandbox.ref, DATA, track_transfer(tar))
    return provider.manifest(sandbox.ref, DATA) if removed else manifest


def write_tar(rows: list[DataFile], out: BinaryIO, *, now: datetime) -> None:
    """Write the given versions as a tar with verified content, and rewind the tar. Raise StoreError."""
    with ExitStack() as stack:
        content = fetch_contents([row for row in rows if row.kind == "file"], stack, now=now)
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for row in sorted(rows, key=lambda row: row.path):
                member = tarfile.TarInfo(row.path)
                member.mode, member.mtime = row.mode, row.mtime
                if row.kind == "file":
                    member.size = row.size_bytes
                    tar.addfile(member, content[row.path])
                elif row.kind == "link":
                    member.type, member.linkname = tarfile.SYMTYPE, row.target
                    tar.addfile(member)
                else:
                    member.type = tarfile.DIRTYPE
                    tar.addfile(member)
    out.seek(0)


def fetch_contents(files: Collection[DataFile], stack: ExitStack, *, now: datetime) -> dict[str, "FileSlice"]:
    """Fetch the content of these files and verify it. An object of which most is needed is downloaded whole.

    Raise StoreError if an object is missing, truncated or corrupt. The results are valid until `stack` closes."""
    by_object: dict[uuid.UUID, list[DataFile]] = {}
    for row in files:
        assert row.stored_in_id is not None
        by_object.setdefault(row.stored_in_id, []).append(row)
    jobs: list[tuple[DataObject, int, int | None, list[DataFile]]] = []
    for group in by_object.values():
        stored = group[0].stored_in
        assert stored is not None
        is_mostly_needed = sum(row.size_bytes for row in group) * 2 >= stored.size_bytes
        if is_mostly_needed or stored.size_bytes <= CHUNK_BYTES or len(group) > MAX_RANGE_REQUESTS:
            jobs.append((stored, 0, None, group))
        else:
            jobs += [(stored, row.offset, row.size_bytes, [row]) for row in group]

    spools = [stack.enter_context(open_spool()) for _ in jobs]

    def download(index: int) -> None:
        stored, start, length, _ = jobs[index]
        target = track_transfer(spools[index])
        if length != 0 and not get_store().download(stored.key, target, start=start, length=length):
            raise ObjectMissing(get_store().name, "download", "an object of an agent's data is missing", key=stored.key)

    run_parallel(download, range(len(jobs)))
    return {
        row.path: _verify_content(row, spools[index], row.offset - start, stored.key, now=now)
        for index, (stored, start, _, group) in enumerate(jobs)
        for row in group
    }


def _verify_content(row: DataFile, source: BinaryIO, start: int, key: str, *, now: datetime) -> FileSlice:
    source.flush()
    digest, content = hashlib.sha256(), FileSlice(source, start, row.size_bytes)
    while chunk := content.read(CHUNK_BYTES):
        digest.update(chunk)
    if digest.hexdigest() != row.digest:
        record_event(
            row.data.agent_did, None, DataEvent.Kind.CORRUPT, path=row.path, detail=f"{key} does not match its digest", now=now
        )
        raise StoreError(get_store().name, "download", f"{row.path!r} does not match its digest", key=key)
    return FileSlice(source, start, row.size_bytes)


def _update_attachment(attachment: Attachment, **columns: Any) -> None:
    """Write columns of the attachment, guarded by its version. Raise StoreError if another process was first."""
    if not Attachment.objects.filter(pk=attachment.pk, version=attachment.version).update(version=F("version") + 1, **columns):
        raise StoreError(get_store().name, "attach", "another process attached the same sandbox meanwhile")
    attachment.version += 1
    for name, value in columns.items():
        setattr(attachment, name, value)

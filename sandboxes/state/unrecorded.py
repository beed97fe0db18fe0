"""Files that a database does not know any more, since it was restored or a standby without the last changes took over.

Its rows are those of an earlier time: a sandbox of a later incarnation may run, and a later snapshot may be stored. Both
become snapshots of the lease that no wake reads by itself, because the state that the database records is the one that fits
its runs, turns and costs. The agent or an operator may restore them. Changes in /data become copies in `.conflicts`, for the
same reason (sandboxes.state.unrecorded_data)."""

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from uuid import UUID

import structlog
from django.conf import settings
from django.db import transaction

from sandboxes.claims import track_transfer
from sandboxes.db.clock import clock_from
from sandboxes.lifecycle import checkpoint
from sandboxes.models import Sandbox, SandboxState
from sandboxes.models.names import parse_name
from sandboxes.models.state import DataEvent, Snapshot, SnapshotKind
from sandboxes.providers.base import Provider, ProviderSandbox
from sandboxes.providers.errors import Missing
from sandboxes.state import merge, unrecorded_data, uploads, workspace
from sandboxes.state.exact_tars import read_omissions
from sandboxes.state.local_copies import digest_file
from sandboxes.state.pruning import SNAPSHOT_OBJECTS, find_orphans
from sandboxes.storage import get_store
from sandboxes.storage.base import StoreError
from sandboxes.sweep_log import SweepResult

log = structlog.get_logger(__name__)
STORED_NAME = "found in the store:"
MAX_NOTED_EVENTS = 3  # a note has 500 characters


def find_row(name: str) -> Sandbox | None:
    """Return the row of a sandbox at an engine whose incarnation the row does not record, if a lease has held the row.

    Of a destroyed sandbox only a later incarnation counts: the lease has ended with the state of the recorded one."""
    parts = parse_name(name)
    row = Sandbox.objects.select_related("pool", "host").filter(pk=parts.pk, holder__isnull=False).first() if parts else None
    if parts is None or row is None or row.ref == name:
        return None
    if row.state == SandboxState.DESTROYED and parts.incarnation < row.incarnation:
        return None
    return row


def recover(sandbox: Sandbox, provider: Provider, *, now: datetime) -> list[Snapshot]:
    """Make snapshots of all files of a cold sandbox's lease that its row does not record, and copies in /data. Idempotent.

    1. The sandboxes of other incarnations of the row, as far as this engine can list them.
    2. The snapshots in the store that have no row.
    3. The objects of the agent's data that have no row.

    Raise ProviderError, StoreError or WorkspaceFull if something was found and could not be kept. If only the agent's data has
    no room for the copies, an event says so: the sandbox or the object is left as it is."""
    assert sandbox.holder is not None
    clock, found = clock_from(now), list[Snapshot]()
    for listed in provider.list(str(sandbox.pool.owner)) if provider.can_list else ():
        parts = parse_name(listed.name)
        if parts and parts.pk == sandbox.pk and listed.name != sandbox.ref:
            with _reporting_full_data(sandbox, f"/data of {listed.name}", now=clock()):
                _keep_data(sandbox, listed, provider, now=clock())
            if snapshot := _store_workspace(sandbox, listed, provider, now=clock()):
                found.append(snapshot)
    found += _recover_stored(sandbox, now=clock())
    with _reporting_full_data(sandbox, "Objects of /data in the store", now=clock()):
        unrecorded_data.keep_from_store(sandbox.agent_did, sandbox.holder, now=clock())
    return found


def recover_all_stored(*, now: datetime) -> SweepResult:
    """Make snapshots and copies of all stored files that the database does not record, as `recover`, also without a wake.

    Idempotent. Agents whose data has no room for the copies are failures. Raise StoreError."""
    result = unrecorded_data.keep_all_from_store(now=now)
    holders = {key.split("/")[1] for key in find_orphans(SNAPSHOT_OBJECTS, now)}
    for sandbox in Sandbox.objects.filter(holder__in=holders).exclude(state=SandboxState.DESTROYED).order_by("pk"):
        result.note("snapshots", len(_recover_stored(sandbox, now=now)))
    return result


@contextmanager
def _reporting_full_data(sandbox: Sandbox, subject: str, *, now: datetime) -> Iterator[None]:
    """Record once as an event that changes could not be kept because the agent's data has no room for them."""
    try:
        yield
    except unrecorded_data.NOT_KEPT as failed:
        detail = f"{subject}: changes that the database does not record are not kept elsewhere. {failed}"
        if not DataEvent.objects.filter(holder=sandbox.holder, detail=detail).exists():
            merge.record_event(sandbox.agent_did, sandbox.holder, DataEvent.Kind.FOUND, detail=detail, now=now)


def _keep_data(row: Sandbox, listed: ProviderSandbox, provider: Provider, *, now: datetime) -> None:
    try:
        if listed.suspended:
            provider.resume(listed.ref)
        unrecorded_data.keep_from_sandbox(row, listed.ref, listed.name, provider, now=now)
    except Missing:
        log.info("unrecorded sandbox gone", name=listed.name)


def replace_missing(sandbox: Sandbox, provider: Provider, *, now: datetime) -> bool:
    """Make the latest found files those of the next wake, after the sandbox that the row records has gone.

    Return whether any were found. A running sandbox is later than the snapshots in the store. Raise the errors of `recover`."""
    assert sandbox.holder
    found = recover(sandbox, provider, now=now)
    if not found:
        return False
    latest = max(found, key=lambda each: (not each.name.startswith(STORED_NAME), each.incarnation, each.key))
    with transaction.atomic():
        latest.at = workspace.next_snapshot_time(sandbox.holder, now)
        Snapshot.objects.filter(pk=latest.pk).update(at=latest.at)
        detail = f"The next wake starts from the snapshot {latest.pk}: the sandbox that the database records is gone."
        workspace.record_event(latest, DataEvent.Kind.FOUND, detail, now=now)
    return True


def store(row: Sandbox, listed: ProviderSandbox, provider: Provider, *, now: datetime) -> Snapshot | None:
    """Store the files of a sandbox that its row does not record: /workspace as a snapshot of the row's holder. Idempotent.

    Return None if the engine has no such files. Raise ProviderError, StoreError, WorkspaceFull or one of
    unrecorded_data.NOT_KEPT."""
    _keep_data(row, listed, provider, now=now)
    return _store_workspace(row, listed, provider, now=now)


def _store_workspace(row: Sandbox, listed: ProviderSandbox, provider: Provider, *, now: datetime) -> Snapshot | None:
    parts = parse_name(listed.name)
    assert parts
    assert row.holder
    name = f"found in {listed.name}"[:100]
    if stored := workspace.find_by_holder(row.holder).filter(name=name).first():
        return stored
    sandbox = copy.copy(row)
    sandbox.ref, sandbox.incarnation = listed.ref, parts.incarnation
    try:
        if listed.suspended:
            provider.resume(listed.ref)
        with workspace.persist(sandbox, provider, kind=SnapshotKind.FOUND, name=name, now=now) as snapshot:
            checkpoint("found files stored", snapshot)
            with transaction.atomic(durable=True):
                workspace.date_before_newest(snapshot)
                workspace.insert(snapshot)
                _record(snapshot, f"Incarnation {parts.incarnation}, which the database does not record,", now=now)
    except Missing:
        return None
    return snapshot


def describe_found(sandbox: Sandbox) -> str:
    """Return the note of the first run after a wake before which files were found, or ""."""
    assert sandbox.holder
    events = DataEvent.objects.filter(holder=sandbox.holder, kind=DataEvent.Kind.FOUND).order_by("-at", "-pk")
    recorded = Snapshot.objects.filter(holder=sandbox.holder).exclude(kind=SnapshotKind.FOUND)
    if slept_at := recorded.order_by("-at").values_list("at", flat=True).first():
        events = events.filter(at__gt=slept_at)
    details = " ".join([*events.values_list("detail", flat=True)[:MAX_NOTED_EVENTS]][::-1])
    return f"The database has lost its last changes, and this workspace with them. {details}" if details else ""


def _recover_stored(sandbox: Sandbox, *, now: datetime) -> list[Snapshot]:
    """Insert rows for the holder's snapshots in the store that have none, and are not being stored."""
    objects = {each.key for each in get_store().entries(f"snapshots/{sandbox.holder}/") if each.key.endswith("/workspace")}
    keys = [
        match
        for key in sorted(objects - uploads.find_claimed(objects))
        if (match := SNAPSHOT_OBJECTS.key_pattern.fullmatch(key))
    ]
    known = {*Snapshot.objects.filter(key__in=[match[1] for match in keys]).values_list("key", flat=True)}
    return [_insert_stored(sandbox, match[1], stored_at=match[2], now=now) for match in keys if match[1] not in known]


def _insert_stored(sandbox: Sandbox, key: str, *, stored_at: str, now: datetime) -> Snapshot:
    assert sandbox.holder
    snapshot = Snapshot(
        pk=UUID(key[-32:]), sandbox=sandbox, incarnation=sandbox.incarnation, holder=sandbox.holder, kind=SnapshotKind.FOUND,
        name=f"{STORED_NAME} {stored_at}", at=workspace.next_snapshot_time(sandbox.holder, now), key=key, local=False,
        host_id=sandbox.host_id,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(dir=settings.STATE_DIR) as directory:
        path = Path(directory) / "workspace"
        with path.open("wb") as target:
            if not get_store().download(f"{key}/workspace", track_transfer(target)):
                raise StoreError(get_store().name, "recover", "is listed, and is not there", key=f"{key}/workspace")
        snapshot.size_bytes, snapshot.digests = path.stat().st_size, {"workspace": digest_file(path)}
        with path.open("rb") as source:
            snapshot.omitted = read_omissions(source)
    with transaction.atomic(durable=True):
        workspace.date_before_newest(snapshot)
        snapshot.save(force_insert=True)  # without the claim of an upload
        _record(snapshot, "A snapshot that the database does not record", now=now)
    return snapshot


def _record(snapshot: Snapshot, subject: str, *, now: datetime) -> None:
    detail = f"{subject} was kept as the snapshot {snapshot.pk}. Restore it if its files are the ones to go on with."
    workspace.record_event(snapshot, DataEvent.Kind.FOUND, detail, now=now)

"""Synchronization of an agent's /data: pulled into each sandbox before use, changes stored after use.

The DataFile rows are the authority; objects hold the content. The changes of one use become one new object, a tar of the
changed files, and one transaction moves the rows to it. A crash leaves the old or the new version, and at worst an object
without rows. Objects are never overwritten, so two sandboxes of an agent cannot corrupt each other's files: the last writer's
version becomes current, and a version that it replaces unseen is kept as `.conflicts/<lease>/<path>`.

Cost: a scan without changes takes one query and one manifest of the sandbox. Once more than half of the stored bytes are
outdated, the next change uploads every file again, so that the old objects can be removed."""

import time
from contextlib import ExitStack
from datetime import datetime, timedelta
from typing import Any

import structlog
from django.conf import settings
from django.db.models import Count, F, Q, QuerySet, Sum
from django.db.models.functions import Coalesce

from sandboxes.claims import note_progress
from sandboxes.db import sql
from sandboxes.db.clock import Clock, clock_from
from sandboxes.deferred_writes import hold_in_flight
from sandboxes.errors import DataFull, SandboxBusy
from sandboxes.models import AWAKE_STATES, Sandbox
from sandboxes.models.state import AgentData, Attachment, DataEvent, DataObject, DataStorageMode
from sandboxes.providers.base import DATA, Provider
from sandboxes.providers.errors import Missing, ProviderError, TooLarge
from sandboxes.state import changes, mounts, pull, skills
from sandboxes.state.changes import REPACK_SLACK_BYTES
from sandboxes.state.merge import ConcurrentChange, record_changes, record_event
from sandboxes.storage import get_store
from sandboxes.storage.base import StoreError

log = structlog.get_logger(__name__)
PULL_WAIT_TIMEOUT = timedelta(seconds=30)  # for a concurrent pull into the same sandbox
POLL_SECONDS = 0.05
MAX_ATTEMPTS = 5
ATTACHMENT_SQL = (
    "sandboxes_attachment.sandbox_id = %s AND sandboxes_attachment.incarnation = %s AND sandboxes_attachment.holder = %s"
)
MIN_OUTDATED_OBJECTS = 8  # per agent; fewer are left to a later call or to the prune sweep


def attach(sandbox: Sandbox, provider: Provider, *, skill: str = "", is_first: bool = False, now: datetime) -> Attachment:
    """Write the newest version of each of the agent's files into its sandbox's /data. Idempotent; safe to call concurrently.

    `skill`: environment type whose skill /data must contain.

    `is_first`: nothing has run in the sandbox since its start.

    Unsaved changes of the sandbox are not overwritten: `persist` merges them. Raise StoreError or ProviderError; then nothing
    may run in the sandbox, and a repeated call completes the work. Raise SandboxBusy if a concurrent pull takes longer
    than 30 s."""
    clock, attempts = clock_from(now), 0
    while _needs_pull(attachment := _ensure_attachment(sandbox, now=clock()), sandbox):
        if claim := pull.claim_pull(attachment, clock):
            try:
                with hold_in_flight(claim):
                    try:
                        pull.pull(attachment, sandbox, provider, clock, is_first=is_first)
                    except BaseException:
                        pull.release_pull(attachment, claim)
                        raise
                break
            except pull.ObjectMissing:
                attempts += 1
                if attempts == MAX_ATTEMPTS:
                    raise
        elif clock() > now + PULL_WAIT_TIMEOUT:
            raise SandboxBusy("Another process is still writing the agent's data into this sandbox.")
        else:
            time.sleep(POLL_SECONDS)
    if attachment.data.keeping == DataStorageMode.MOUNT:
        mounts.attach(sandbox, provider)
    if skill and attachment.skill != skill:
        skills.deliver(attachment, sandbox, provider, skill)
    return attachment


def _ensure_attachment(sandbox: Sandbox, *, now: datetime) -> Attachment:
    """Return the attachment of this incarnation of the sandbox. A new attachment has an empty base."""
    assert sandbox.holder is not None
    if attachment := _find_attachment(sandbox):
        return attachment
    columns: dict[str, Any] = {
        "incarnation": sandbox.incarnation, "holder": sandbox.holder, "revision": 0, "look": "", "base": {}, "pulling": [],
        "pull_until": None, "skill": "", "unsaved_since": None, "last_error": "",
    }  # fmt: skip
    data = ensure_agent_data(sandbox.agent_did, now=now)
    outdated = Q(incarnation__lt=sandbox.incarnation) | ~Q(holder=sandbox.holder)
    attachment = Attachment(sandbox=sandbox, data=data, **columns)
    if sql.insert_if_absent(attachment):
        attachment._state.adding = False
        return attachment
    Attachment.objects.filter(outdated, pk=sandbox.pk).update(**columns, data=data, version=F("version") + 1)
    return Attachment.objects.select_related("data").defer("base").get(pk=sandbox.pk)


def _find_attachment(sandbox: Sandbox) -> Attachment | None:
    """Return the attachment of this incarnation of the sandbox, with the agent's data. `base`, which may be large, is deferred.

    By hand, because the ORM takes 1 ms to build the query, which each exec executes."""
    attachment, (data,), _ = sql.find_joined(
        Attachment, [(AgentData, "sandboxes_agentdata.id = sandboxes_attachment.data_id")], [], ATTACHMENT_SQL,
        sandbox.pk, sandbox.incarnation, sandbox.holder, deferred=("base",),
    )  # fmt: skip
    if attachment:
        attachment.data = data
    return attachment


def ensure_agent_data(agent_did: str, *, now: datetime) -> AgentData:
    if data := sql.find_first(AgentData, "agent_did = %s", agent_did):
        return data
    defaults = {"created_at": now, "changed_at": now, "keeping": settings.DATA_KEEPING}
    return AgentData.objects.get_or_create(agent_did=agent_did, defaults=defaults)[0]


def _needs_pull(attachment: Attachment, sandbox: Sandbox) -> bool:
    """Return whether the sandbox needs a pull: the first pull, a repeated one after an interruption, or newer stored versions.

    Newer versions wait while another run is open, so that files do not change during the run."""
    if attachment.data.keeping == DataStorageMode.MOUNT:
        return False
    if attachment.pulling or not attachment.revision:
        return bool(attachment.pulling) or attachment.data.revision > 0
    if attachment.revision >= attachment.data.revision:
        return False
    return not Sandbox.objects.filter(pk=sandbox.pk, open_runs__gt=1).exists()


def persist(
    attachment: Attachment, sandbox: Sandbox, provider: Provider, *, now: datetime, last: bool = False, digest: str = ""
) -> bool:
    """Store the sandbox's changes of /data. Return whether any row was written.

    `digest` is the current digest of the manifest, if it is known: without a change /data is not listed.

    Raise DataFull above the agent's limits; then nothing is stored. After a StoreError or ProviderError the rows are unchanged.
    The changes of a sandbox that its lease no longer holds are stored only by the caller that destroys it (`last`)."""
    if attachment.data.keeping == DataStorageMode.MOUNT:
        return False  # s3fs has written to the bucket already
    if digest and digest == attachment.look and not attachment.unsaved_since:
        return False
    clock = clock_from(now)
    for _ in range(MAX_ATTEMPTS):
        note_progress()
        try:
            return _persist_once(attachment, sandbox, provider, clock, last=last)
        except ConcurrentChange:
            _wait_for_pull(attachment, clock)
    raise StoreError(get_store().name, "persist", "too many concurrent changes of the same attachment")


def _wait_for_pull(attachment: Attachment, clock: Clock) -> None:
    """Reload the attachment once no pull into the sandbox is in progress."""
    deadline = clock() + PULL_WAIT_TIMEOUT
    while True:
        attachment.refresh_from_db()
        if attachment.pull_until is None or attachment.pull_until < clock():
            return
        if clock() > deadline:
            raise StoreError(get_store().name, "persist", "a concurrent pull into the same sandbox did not finish in time")
        time.sleep(POLL_SECONDS)


def _persist_once(attachment: Attachment, sandbox: Sandbox, provider: Provider, clock: Clock, *, last: bool) -> bool:
    max_files = settings.DATA_MOST_FILES
    try:
        manifest = provider.manifest(sandbox.ref, DATA, max_entries=max_files)
    except TooLarge:
        raise DataFull(f"/data has more than {max_files} files and directories, which is the limit.") from None
    digest = changes.digest_manifest(manifest)
    if digest == attachment.look:
        if attachment.unsaved_since and not _clear_unsaved(attachment):  # the unsaved changes are gone
            raise ConcurrentChange
        return False
    diff = changes.diff_manifest(attachment, manifest, digest)
    size = sum(stat.size for path, stat in manifest.items() if path not in diff.unstorable)
    if size > settings.DATA_MOST_BYTES:
        raise DataFull(
            f"/data has {size} bytes; the limit is {settings.DATA_MOST_BYTES}. Remove files: changes made since the limit was "
            "exceeded exist only in this sandbox.",
            size_bytes=size,
            limit_bytes=settings.DATA_MOST_BYTES,
        )
    with ExitStack() as stack:
        changed_files = changes.fetch_changes(attachment, sandbox, provider, diff, stack, clock) if diff.files else {}
        recorded = record_changes(attachment, sandbox, diff, changed_files, clock(), last=last)
    if recorded:
        _collect_outdated(attachment)
    return recorded


def _clear_unsaved(attachment: Attachment) -> bool:
    """Record that nothing is unsaved. Return False if another process wrote the attachment since it was read."""
    unchanged = Attachment.objects.filter(pk=attachment.pk, version=attachment.version)
    return bool(unchanged.update(unsaved_since=None, last_error="", full=False, version=F("version") + 1))


def _collect_outdated(attachment: Attachment) -> None:
    """Remove outdated objects if they are many or large: removing a small object takes longer than storing one."""
    outdated = find_outdated_objects().filter(data=attachment.data_id)
    totals = outdated.aggregate(count=Count("pk"), size=Sum("size_bytes"))
    if totals["count"] < MIN_OUTDATED_OBJECTS and (totals["size"] or 0) < REPACK_SLACK_BYTES:
        return
    try:
        remove_outdated_objects(outdated)
    except StoreError as error:  # the changes are committed; the prune sweep removes the outdated objects
        log.warning("outdated objects left", agent=attachment.data.agent_did, error=str(error))


def require_free_space(attachment: Attachment, sandbox: Sandbox, provider: Provider, *, now: datetime) -> None:
    """Raise DataFull if /data exceeded its limits at the last scan and still does."""
    if attachment.full:
        persist(attachment, sandbox, provider, now=now)
        attachment.full = False


def find_unsaved() -> QuerySet[Attachment]:
    """Return attachments with changes that could not be stored, oldest first. Data above the limits is excluded.

    A sandbox with such changes is not suspended."""
    current = Attachment.objects.filter(unsaved_since__isnull=False, full=False, incarnation=F("sandbox__incarnation"))
    alive = current.filter(sandbox__state__in=AWAKE_STATES, sandbox__lost_at__isnull=True)
    return alive.select_related("data", "sandbox__pool").order_by("unsaved_since")


def mark_unsaved(attachment: Attachment, error: Exception, *, now: datetime) -> None:
    """Record that the sandbox has unsaved changes. A sweep retries, and the sandbox is not destroyed before.

    The new version makes a scan that began before these changes scan again, so that it does not clear the record."""
    full = isinstance(error, DataFull)
    if full and not attachment.full:
        record_event(attachment.data.agent_did, attachment.holder, DataEvent.Kind.FULL, detail=str(error), now=now)
    Attachment.objects.filter(pk=attachment.pk, incarnation=attachment.incarnation).update(
        unsaved_since=Coalesce(F("unsaved_since"), now), last_error=str(error), full=full, version=F("version") + 1
    )
    attachment.unsaved_since, attachment.full = attachment.unsaved_since or now, full
    log.error("data not stored", sandbox=str(attachment.pk), agent=attachment.data.agent_did, error=str(error))


def persist_final(attachment: Attachment, sandbox: Sandbox, provider: Provider, *, now: datetime) -> None:
    """Store the remaining changes of a sandbox that is about to be evicted or destroyed.

    Raise StoreError and ProviderError, which prevent that, with the changes recorded as unsaved; Missing if the sandbox is
    gone. Data above the limits is dropped and recorded as an event: DataFull was reported when the data was written."""
    try:
        persist(attachment, sandbox, provider, now=now, last=True)
    except Missing:
        raise
    except DataFull as error:
        record_dropped(sandbox, str(error), now=now)
    except (StoreError, ProviderError) as error:
        mark_unsaved(attachment, error, now=now)
        raise


def find_current(sandbox: Sandbox) -> Attachment | None:
    """Return the attachment of this incarnation of the sandbox, with the agent's data."""
    return Attachment.objects.select_related("data").filter(pk=sandbox.pk, incarnation=sandbox.incarnation).first()


def has_unsaved_changes(sandbox: Sandbox) -> bool:
    """Return whether changes in /data of this incarnation of the sandbox are known that could not be stored."""
    attachments = Attachment.objects.filter(pk=sandbox.pk, incarnation=sandbox.incarnation, unsaved_since__isnull=False)
    return attachments.exists()


def release_mount(attachment: Attachment, sandbox: Sandbox, *, now: datetime) -> None:
    """End a mount of the agent's data whose bucket does not answer, and record that as an event.

    Called before the processes of the sandbox are ended: a process that is blocked on the mount cannot be."""
    if attachment.data.keeping == DataStorageMode.MOUNT and mounts.release_unresponsive_mount(sandbox):
        record_dropped(sandbox, "The bucket of /data did not answer. Writes that were not uploaded yet are lost.", now=now)


def record_dropped(sandbox: Sandbox, detail: str, *, now: datetime) -> None:
    """Record that state of a sandbox which is about to be destroyed is not stored."""
    record_event(sandbox.agent_did, sandbox.holder, DataEvent.Kind.DROPPED, detail=detail, now=now)


def persist_waiting(sandbox: Sandbox, provider: Provider, *, now: datetime) -> None:
    """Store the changes in /data of an idle sandbox that goes on later. Data above the limits stays in the sandbox alone.

    Raise StoreError and ProviderError."""
    attachment = find_current(sandbox)
    if attachment is None:
        return
    try:
        persist(attachment, sandbox, provider, now=now)
    except DataFull as error:
        mark_unsaved(attachment, error, now=now)


def find_outdated_objects() -> QuerySet[DataObject]:
    """Return objects without any current file version, oldest first."""
    return DataObject.objects.filter(entries__isnull=True).order_by("at")


def remove_outdated_objects(objects: QuerySet[DataObject]) -> int:
    """Remove the given objects that no file row points to, from the store and then from the database. Return their number."""
    outdated = dict(objects.filter(entries__isnull=True).values_list("pk", "key"))
    get_store().remove_many(outdated.values())
    return DataObject.objects.filter(pk__in=outdated, entries__isnull=True).delete()[0]

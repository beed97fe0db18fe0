"""An agent's /data: brought into each sandbox before it is used, and what changed brought back after.

The DataFile rows say what there is; objects hold the bytes. What one use changed becomes one new object, a tar of the
changed files, and the rows move to it in one transaction: a crash leaves the old version or the new one, and at worst an
object that no row points to. Nothing is ever written over, so two sandboxes of an agent cannot spoil each other's files:
whoever comes second moves the row, and what it pointed to before is kept as `.conflicts/<lease>/<path>`.

How much crosses: a look at the tree that differs in nothing costs one query and one listing of the sandbox. Once more of
the objects is outdated than is not, the next change stores every file anew, which lets the old objects go."""

import time
from contextlib import ExitStack
from datetime import datetime, timedelta
from typing import Any

import structlog
from django.conf import settings
from django.db.models import Count, F, Q, QuerySet, Sum
from django.db.models.functions import Coalesce

from sandboxes.db.clock import Clock, clock_from
from sandboxes.errors import DataFull, SandboxBusy
from sandboxes.models import ALIVE_STATES, Sandbox, SandboxState
from sandboxes.models.state import AgentData, Attachment, DataEvent, DataFile, DataObject, DataStorageMode
from sandboxes.providers.base import DATA, Missing, Provider, ProviderError, Rejected, TooLarge
from sandboxes.state import changes, mounts, pull
from sandboxes.state.changes import REPACK_SLACK_BYTES
from sandboxes.state.merge import ConcurrentChange, record_changes, record_event
from sandboxes.storage import get_store
from sandboxes.storage.base import StoreError

log = structlog.get_logger(__name__)
PULL_WAIT_TIMEOUT = timedelta(seconds=30)  # with somebody else who is at it
POLL_SECONDS = 0.05  # seconds
MAX_ATTEMPTS = 5
MIN_OUTDATED_OBJECTS = 8  # outdated objects of an agent that are not worth a call to the store


def attach(sandbox: Sandbox, provider: Provider, *, skill: str = "", now: datetime) -> Attachment:
    """Have the newest version of every file of the agent in its sandbox's /data. Safe to repeat, from many processes.

    What was changed in the sandbox and is not stored yet stays as it is: `persist` decides about it. StoreError,
    ProviderError; then nothing may be run, and a repeat mends what was half done."""
    later, tries = clock_from(now), 0
    while _needs_pull(here := _ensure_attachment(sandbox, now=later()), sandbox):
        if pull.claim_pull(here, now=later()):
            try:
                pull.pull(here, sandbox, provider, later)
                break
            except pull.ObjectMissing:
                tries += 1
                if tries == MAX_ATTEMPTS:
                    raise
        elif later() > now + PULL_WAIT_TIMEOUT:
            raise SandboxBusy("Its data is still being written into its sandbox by somebody else.")
        else:
            time.sleep(POLL_SECONDS)
    if here.data.keeping == DataStorageMode.MOUNT:
        mounts.attach(sandbox, provider)
    if skill and here.skill != skill:
        _seed_skill(here, sandbox, provider, skill, now=later())
    return here


def _ensure_attachment(sandbox: Sandbox, *, now: datetime) -> Attachment:
    """The row for this incarnation of the sandbox; a new one starts with nothing."""
    assert sandbox.holder is not None
    mine = Attachment.objects.select_related("data").defer("base").filter(pk=sandbox.pk)
    same = mine.filter(incarnation=sandbox.incarnation, holder=sandbox.holder)
    if found := same.first():
        return found
    fresh: dict[str, Any] = {
        "incarnation": sandbox.incarnation, "holder": sandbox.holder, "revision": 0, "look": "", "base": {}, "pulling": [],
        "pull_until": None, "skill": "", "unsaved_since": None, "last_error": "",
    }  # fmt: skip
    data = ensure_agent_data(sandbox.agent_did, now=now)
    other = Q(incarnation__lt=sandbox.incarnation) | ~Q(holder=sandbox.holder)
    if not Attachment.objects.filter(other, pk=sandbox.pk).update(**fresh, data=data, version=F("version") + 1):
        Attachment.objects.get_or_create(sandbox=sandbox, defaults=fresh | {"data": data})
    return mine.get()


def ensure_agent_data(agent_did: str, *, now: datetime) -> AgentData:
    new = {"created_at": now, "changed_at": now, "keeping": settings.DATA_KEEPING}
    return AgentData.objects.get_or_create(agent_did=agent_did, defaults=new)[0]


def _needs_pull(here: Attachment, sandbox: Sandbox) -> bool:
    """Is something newer than it has? While another command runs in it, it keeps what it works with."""
    if here.data.keeping == DataStorageMode.MOUNT:
        return False
    if here.pulling or not here.revision:
        return bool(here.pulling) or here.data.revision > 0
    busy = Sandbox.objects.filter(pk=sandbox.pk, open_runs__gt=1)
    return here.revision < here.data.revision and not busy.exists()


def _seed_skill(here: Attachment, sandbox: Sandbox, provider: Provider, skill: str, *, now: datetime) -> None:
    """First use of a type: its skill comes from the image. One that the agent has removed since does not come back."""
    place = f"skills/{skill}"
    there = Q(path=place) | Q(path__startswith=f"{place}/")
    if not DataFile.objects.filter(there, data=here.data_id).exists():
        provider.seed(sandbox.ref, skill)
        if here.data.keeping == DataStorageMode.MOUNT:  # nothing else notes what was there
            seeded = {"kind": "directory", "mode": 0o755, "revision": 0, "at": now, "removed": True}
            DataFile.objects.get_or_create(data=here.data, path=place, defaults=seeded)
    Attachment.objects.filter(pk=here.pk, incarnation=here.incarnation).update(skill=skill)
    here.skill = skill


def persist(here: Attachment, sandbox: Sandbox, provider: Provider, *, now: datetime, last: bool = False) -> bool:
    """Store what was changed in the sandbox since it was given. True if anything was.

    DataFull when the agent has more than it may keep: nothing is stored then. StoreError and ProviderError when it did
    not work; then the rows are as before. In a sandbox that was given up nothing is stored, except by whoever is about
    to destroy it (`last`)."""
    if here.data.keeping == DataStorageMode.MOUNT:
        return False  # the bucket has it already
    later = clock_from(now)
    for _ in range(MAX_ATTEMPTS):
        try:
            return _persist_once(here, sandbox, provider, later, last=last)
        except ConcurrentChange:
            _wait_for_pull(here, later)
    raise StoreError(get_store().name, "persist", "others store for the same sandbox over and over")


def _wait_for_pull(here: Attachment, later: Clock) -> None:
    """Read the attachment again, once nobody writes into the sandbox any more."""
    patience = later() + PULL_WAIT_TIMEOUT
    while True:
        here.refresh_from_db()
        if here.pull_until is None or here.pull_until < later():
            return
        if later() > patience:
            raise StoreError(get_store().name, "persist", "its data is being written into the same sandbox for too long")
        time.sleep(POLL_SECONDS)


def _persist_once(here: Attachment, sandbox: Sandbox, provider: Provider, later: Clock, *, last: bool) -> bool:
    most = settings.DATA_MOST_FILES
    try:
        there = provider.manifest(sandbox.ref, DATA, max_entries=most)
    except TooLarge:
        raise DataFull(f"/data has more than {most} files and directories, which is as many as are kept.") from None
    look = changes.digest_manifest(there)
    if look == here.look:
        if here.unsaved_since:  # what could not be stored is not there any more
            Attachment.objects.filter(pk=here.pk).update(unsaved_since=None, last_error="", full=False)
        return False
    change = changes.diff_manifest(here, there, look)
    size = sum(stat.size for path, stat in there.items() if path not in change.left_out)
    if size > settings.DATA_MOST_BYTES:
        raise DataFull(
            f"/data has {size} bytes, and {settings.DATA_MOST_BYTES} are kept. Remove some of it: what was changed since it "
            "grew past that is only in this sandbox.",
            size_bytes=size,
            limit_bytes=settings.DATA_MOST_BYTES,
        )
    with ExitStack() as stack:
        pieces = changes.fetch_changes(here, sandbox, provider, change, stack, later) if change.files else {}
        recorded = record_changes(here, sandbox, change, pieces, later(), last=last)
    if recorded:
        _collect_outdated(here)
    return recorded


def _collect_outdated(here: Attachment) -> None:
    """Remove what is outdated now, if it is much: to remove a single small object takes a turn longer than to store one."""
    stale = find_outdated_objects().filter(data=here.data_id)
    found = stale.aggregate(count=Count("pk"), size=Sum("size_bytes"))
    if found["count"] < MIN_OUTDATED_OBJECTS and (found["size"] or 0) < REPACK_SLACK_BYTES:
        return
    try:
        remove_outdated_objects(stale)
    except StoreError as failed:  # what is stored is stored: the prune sweep removes the rest
        log.warning("outdated objects left", agent=here.data.agent_did, error=str(failed))


def require_free_space(here: Attachment, sandbox: Sandbox, provider: Provider, *, now: datetime) -> None:
    """DataFull if there was more in /data than is kept when it was last looked at, and still is."""
    if here.full:
        persist(here, sandbox, provider, now=now)
        here.full = False


def find_unsaved() -> QuerySet[Attachment]:
    """Sandboxes with something in /data that could not be stored, the longest waiting first."""
    here = Attachment.objects.filter(unsaved_since__isnull=False, full=False, incarnation=F("sandbox__incarnation"))
    alive = here.filter(sandbox__state__in=ALIVE_STATES, sandbox__lost_at__isnull=True)
    return alive.select_related("data", "sandbox__pool").order_by("unsaved_since")


def mark_unsaved(here: Attachment, why: Exception, *, now: datetime) -> None:
    """Say that something in this sandbox is stored nowhere yet. A sweep tries again, and nothing destroys it before."""
    full = isinstance(why, DataFull)
    if full and not here.full:
        record_event(here.data.agent_did, here.holder, DataEvent.Kind.FULL, detail=str(why)[:500], now=now)
    Attachment.objects.filter(pk=here.pk, incarnation=here.incarnation).update(
        unsaved_since=Coalesce(F("unsaved_since"), now), last_error=str(why)[:2000], full=full
    )
    here.unsaved_since, here.full = here.unsaved_since or now, full
    log.error("data not stored", sandbox=str(here.pk), agent=here.data.agent_did, error=str(why))


def persist_final(sandbox: Sandbox, provider: Provider, *, now: datetime) -> None:
    """Store what is left to store in a sandbox that is about to go. StoreError keeps it, and so does a ProviderError if
    it only falls asleep, or something in it is known to be unsaved. More than may be kept does not keep it: that was said
    when it was written."""
    here = Attachment.objects.select_related("data").filter(pk=sandbox.pk, incarnation=sandbox.incarnation).first()
    if here is None:
        return
    if here.data.keeping == DataStorageMode.MOUNT:
        mounts.release_unresponsive_mount(sandbox)
        return
    try:
        persist(here, sandbox, provider, now=now, last=True)
    except Missing:
        raise
    except (DataFull, Rejected) as refused:
        record_event(here.data.agent_did, here.holder, DataEvent.Kind.DROPPED, detail=str(refused)[:500], now=now)
    except (StoreError, ProviderError) as failed:
        if isinstance(failed, StoreError) or here.unsaved_since:
            mark_unsaved(here, failed, now=now)
            raise
        if sandbox.state == SandboxState.EVICTING:
            raise
        log.warning("data not looked at", sandbox=str(sandbox.pk), error=str(failed))


def find_outdated_objects() -> QuerySet[DataObject]:
    """Objects of which nothing is the newest version of anything any more."""
    return DataObject.objects.filter(entries__isnull=True).order_by("at")


def remove_outdated_objects(objects: QuerySet[DataObject]) -> int:
    """Remove objects that no row points to any more, from the store and then their rows; how many."""
    stale = dict(objects.filter(entries__isnull=True).values_list("pk", "key"))
    get_store().remove_many(stale.values())
    return DataObject.objects.filter(pk__in=stale, entries__isnull=True).delete()[0]

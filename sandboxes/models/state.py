"""Stored state of sandboxes and agents: rows that point to objects in the store. The verbs are in sandboxes.state.

The key of an object is claimed in ObjectUpload, then the object is written, then its first row; the object is removed after its
last row. A crash therefore leaves at worst orphaned objects, which the pruning sweep finds by listing the store."""

import uuid
from datetime import UTC, datetime

from django.db import models
from django.db.models import Q, Value

from sandboxes.db.message_fields import LongMessageField, MessageField
from sandboxes.db.prefix_index import PrefixIndex

KEY_TIMESTAMP_FORMAT = "%Y%m%dT%H%M%SZ"  # part of every key, so that pruning knows the age of an object


class SnapshotKind(models.TextChoices):
    """Origin of a snapshot."""

    SLEEP = "sleep"  # taken at eviction
    ASKED = "asked"  # requested through the API or console
    RESTORED = "restored"  # an earlier snapshot, made the newest
    FORKED = "forked"  # copied from another lease by a fork
    FOUND = "found"  # of files that the database did not record, since it lost its last changes


class Snapshot(models.Model):
    """One stored copy of a sandbox's files: one object per mount, under `key`.

    A wake reads the newest snapshot of the holder. The row is inserted after its objects are stored. Several rows may share
    a key: a fork and a restored snapshot point to existing objects."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    sandbox = models.ForeignKey("sandboxes.Sandbox", on_delete=models.PROTECT, related_name="snapshots")
    incarnation = models.PositiveIntegerField()
    holder = models.UUIDField()
    kind = models.CharField(max_length=16, choices=SnapshotKind.choices, default=SnapshotKind.SLEEP)
    name = models.CharField(max_length=100, blank=True, help_text="Name given by the client.")
    at = models.DateTimeField()
    key = models.CharField(max_length=255, help_text="Prefix of the objects in the store: KEY/workspace and others.")
    size_bytes = models.PositiveBigIntegerField()
    digests = models.JSONField(default=dict, help_text="SHA-256 of each object.")
    omitted = models.JSONField(
        default=list, db_default=Value([], models.JSONField()),
        help_text="Content that is not kept: kind, count, first paths. Empty: none, or an older snapshot.",
    )  # fmt: skip
    local = models.BooleanField(default=True, help_text="A second copy is in the state directory of `host`.")
    host = models.ForeignKey(
        "sandboxes.Host", on_delete=models.PROTECT, null=True, blank=True, related_name="+",
        help_text="Host that wrote the newest local copy.",
    )  # fmt: skip
    vendor_snapshot = models.CharField(
        max_length=100,
        blank=True,
        default="",
        db_default="",
        help_text="Id of the vendor's own snapshot of the same files, from which a wake is faster.",
    )
    vendor_host = models.ForeignKey(
        "sandboxes.Host", on_delete=models.PROTECT, null=True, blank=True, related_name="+",
        help_text="Account at the vendor that has the vendor's snapshot.",
    )  # fmt: skip
    vendor_digest = models.CharField(
        max_length=64,
        blank=True,
        default="",
        db_default="",
        editable=False,
        help_text="SHA-256 of the listing of the files in the vendor's snapshot.",
    )
    vendor_expires_at = models.DateTimeField(null=True, blank=True, help_text="Time at which the vendor deletes its snapshot.")
    forgotten_at = models.DateTimeField(null=True, blank=True, help_text="Time at which the objects were removed.")
    missing_since = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="Time since which the store does not find its objects. Empty: found."
    )
    metered = models.BooleanField(default=False, editable=False, help_text="All its time is in usage records.")
    metered_until = models.DateTimeField(
        null=True, editable=False, help_text="Full hour up to which its time is in usage records, while its objects exist."
    )

    class Meta:
        default_permissions = ("view",)
        ordering = ["-at", "-pk"]
        indexes = [
            models.Index(fields=["holder", "-at"], name="snapshot_holder"),
            models.Index(fields=["id"], condition=Q(missing_since__isnull=False), name="snapshot_missing"),
            models.Index(fields=["key"], name="snapshot_key"),
            models.Index(fields=["id"], condition=Q(metered=False), name="snapshot_unmetered"),
            models.Index(fields=["at"], condition=~Q(vendor_snapshot=""), name="snapshot_at_vendor"),
            models.Index(fields=["forgotten_at"], condition=Q(forgotten_at__isnull=False), name="snapshot_forgotten"),
            models.Index(fields=["at"], condition=Q(forgotten_at__isnull=True), name="snapshot_stored"),
        ]

    def __str__(self) -> str:
        return f"{self.at:%Y-%m-%d %H:%M:%S} {self.name}".rstrip()

    @property
    def own(self) -> bool:
        """True if the objects were stored for this row, False if they belong to another snapshot."""
        return self.key.endswith((self.pk.hex, str(self.pk)))


class DataStorageMode(models.TextChoices):
    """Storage of an agent's `/data`."""

    SYNC = "sync"  # copied into each sandbox before use; changes copied back after
    MOUNT = "mount"  # one directory mounted into every sandbox


class AgentData(models.Model):
    """Files of an agent, available as /data in each of its sandboxes. `revision` counts the changes."""

    agent_did = models.CharField(max_length=255, unique=True, verbose_name="agent")
    keeping = models.CharField(max_length=8, choices=DataStorageMode.choices, default=DataStorageMode.SYNC)
    revision = models.PositiveBigIntegerField(default=0)
    files = models.PositiveIntegerField(default=0)
    size_bytes = models.PositiveBigIntegerField(default=0)
    created_at = models.DateTimeField()
    changed_at = models.DateTimeField()

    class Meta:
        verbose_name = verbose_name_plural = "agent data"
        default_permissions = ("view",)
        permissions = [("read_agent_data", "Can download files of agents and sandboxes")]
        ordering = ["agent_did"]

    def __str__(self) -> str:
        return self.agent_did


class DataSize(models.Model):
    """Size of an agent's data from `at` until the next row, for the metering of storage.

    Rows are written under the lock of the AgentData row; `at` never decreases."""

    agent_did = models.CharField(max_length=255, verbose_name="agent")
    size_bytes = models.PositiveBigIntegerField()
    at = models.DateTimeField()
    metered = models.BooleanField(default=False, editable=False, help_text="Superseded, and all its time is in usage records.")
    metered_until = models.DateTimeField(
        null=True, editable=False, help_text="Full hour up to which its time is in usage records, until it is superseded."
    )

    class Meta:
        default_permissions = ()
        indexes = [
            models.Index(fields=["agent_did", "-id"], name="datasize_newest"),
            models.Index(fields=["id"], condition=Q(metered=False), name="datasize_unmetered"),
            models.Index(fields=["at"], name="datasize_at"),
        ]

    def __str__(self) -> str:
        return f"{self.agent_did}: {self.size_bytes} bytes"

    @classmethod
    def note(cls, agent_did: str, size_bytes: int, *, now: datetime) -> None:
        """Record a changed size. Called in the transaction that writes the size."""
        last = cls.objects.filter(agent_did=agent_did).order_by("-pk").first()
        if size_bytes != (last.size_bytes if last else 0):
            cls.objects.create(agent_did=agent_did, size_bytes=size_bytes, at=max(now, last.at) if last else now)


class StoredObject(models.Model):
    """An object in the store that other rows point into."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    key = models.CharField(max_length=512, unique=True)
    size_bytes = models.PositiveBigIntegerField()
    at = models.DateTimeField()

    class Meta:
        abstract = True
        default_permissions = ()

    def __str__(self) -> str:
        return self.key


class DataObject(StoredObject):
    """One tar in the store with the files changed in one persist. Some members may be outdated by later objects."""

    data = models.ForeignKey(AgentData, on_delete=models.CASCADE, related_name="bundles")


class ObjectUpload(models.Model):
    """Claim on the key of an object that is being stored. The verbs are in sandboxes.state.uploads."""

    key = models.CharField(primary_key=True, max_length=512)
    deadline_at = models.DateTimeField(db_index=True, help_text="The upload extends the deadline while it makes progress.")

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return self.key


class DataFile(models.Model):
    """Newest version of one path in an agent's data.

    The row of a removed path stays, with `removed` set, so that other sandboxes delete the file at their next pull."""

    data = models.ForeignKey(AgentData, on_delete=models.CASCADE, related_name="entries", db_index=False)
    path = models.CharField(max_length=1000, help_text="Relative to /data.")
    kind = models.CharField(max_length=9, choices=[("file", "file"), ("directory", "directory"), ("link", "link")])
    mode = models.PositiveSmallIntegerField(help_text="Permission bits.")
    size_bytes = models.PositiveBigIntegerField(default=0)
    mtime = models.BigIntegerField(default=0, help_text="Seconds since 1970, as reported by the sandbox.")
    digest = models.CharField(max_length=64, blank=True, help_text="SHA-256 of a file.")
    target = models.TextField(blank=True, help_text="Target of a link.")
    stored_in = models.ForeignKey(DataObject, on_delete=models.PROTECT, null=True, blank=True, related_name="entries")
    offset = models.PositiveBigIntegerField(default=0, help_text="Offset of the content in the object, bytes.")
    revision = models.PositiveBigIntegerField(help_text="Data revision that introduced this version.")
    holder = models.UUIDField(null=True, blank=True, help_text="Lease whose sandbox wrote this version.")
    at = models.DateTimeField()
    removed = models.BooleanField(default=False)

    class Meta:
        default_permissions = ("view",)
        ordering = ["path"]
        constraints = [
            models.UniqueConstraint(fields=["data", "path"], name="datafile_one_a_path"),
            models.CheckConstraint(
                condition=Q(removed=True) | ~Q(kind="file") | Q(stored_in__isnull=False), name="datafile_has_its_bytes"
            ),
        ]
        indexes = [models.Index(fields=["data", "revision"], name="datafile_revision")]

    def __str__(self) -> str:
        return self.path


class Attachment(models.Model):
    """Sync state of one sandbox with its agent's data.

    `base` is the manifest at the last sync: a path that differs was changed in the sandbox. `pulling` lists paths that are
    being written into the sandbox; after a crash their content is undefined and they are written again."""

    sandbox = models.OneToOneField("sandboxes.Sandbox", on_delete=models.CASCADE, primary_key=True, related_name="attachment")
    incarnation = models.PositiveIntegerField()
    data = models.ForeignKey(AgentData, on_delete=models.CASCADE, related_name="attachments")
    holder = models.UUIDField()
    revision = models.PositiveBigIntegerField(default=0, help_text="Data revision that the sandbox has completely.")
    version = models.PositiveBigIntegerField(default=0, help_text="Write counter of this row, for optimistic locking.")
    look = models.CharField(max_length=64, blank=True, help_text="SHA-256 of the last listing without unsaved changes.")
    base = models.JSONField(default=dict, help_text="Path -> revision, digest, stamp.")
    pulling = models.JSONField(default=list, blank=True)
    pull_until = models.DateTimeField(null=True, blank=True, help_text="Deadline of the worker that writes the pulled paths.")
    skill = models.CharField(max_length=63, blank=True, help_text="Environment type whose skill is written.")
    unsaved_since = models.DateTimeField(null=True, blank=True, help_text="Time since which changes could not be stored.")
    full = models.BooleanField(default=False, help_text="Changes not stored because the data limit was exceeded.")
    last_error = LongMessageField(blank=True)

    class Meta:
        default_permissions = ()
        indexes = [models.Index(fields=["unsaved_since"], condition=Q(unsaved_since__isnull=False), name="attachment_unsaved")]

    def __str__(self) -> str:
        return f"{self.data} in {self.sandbox_id}"


class DataEvent(models.Model):
    """Incident of stored state that is reported to the agent and to operators."""

    class Kind(models.TextChoices):
        CONFLICT = "conflict"  # two sandboxes of one agent changed the same file
        LEFT_OUT = "left_out"  # not storable: special file, name not UTF-8, path too long
        FULL = "full"  # data limit of the agent exceeded
        CORRUPT = "corrupt"  # checksum of a stored copy does not match
        OLDER = "older_copy"  # newest copy unreadable, previous copy used
        FOUND = "found"  # files that the database did not record were kept, as a snapshot or as copies in /data
        DROPPED = "dropped"  # lost for good: changes that could not be stored, or stored state that no longer exists

    holder = models.UUIDField(null=True, blank=True)
    agent_did = models.CharField(max_length=255, db_index=True)
    at = models.DateTimeField()
    kind = models.CharField(max_length=16, choices=Kind.choices)
    path = MessageField(max_length=1000, blank=True)
    detail = MessageField(max_length=500, blank=True)

    class Meta:
        default_permissions = ("view",)
        ordering = ["-at", "-pk"]
        indexes = [
            models.Index(fields=["holder", "-at", "-id"], name="dataevent_holder"),
            models.Index(fields=["-at", "-id"], name="dataevent_newest"),
            PrefixIndex(fields=["path"], name="dataevent_path_prefix"),
        ]

    def __str__(self) -> str:
        return f"{self.get_kind_display()} {self.path}"


def format_key_timestamp(at: datetime) -> str:
    """Format a time as the timestamp part of a key, UTC, to the second."""
    return at.astimezone(UTC).strftime(KEY_TIMESTAMP_FORMAT)


def parse_key_timestamp(stamp: str) -> datetime:
    """Parse the timestamp part of a key. Raise ValueError for any other text."""
    return datetime.strptime(stamp, KEY_TIMESTAMP_FORMAT).replace(tzinfo=UTC)

"""What is stored of sandboxes and agents, and where: pointers to objects in the store. The verbs are in storage/.

An object is written before the row that points to it, and removed after the last such row has gone: a crash leaves at
worst objects that nothing points to, which a sweep finds by listing."""

import uuid
from datetime import UTC, datetime

from django.db import models
from django.db.models import Q

KEY_TIMESTAMP_FORMAT = "%Y%m%dT%H%M%SZ"  # in keys, so that the age of an object is known wherever it lies


class SnapshotKind(models.TextChoices):
    SLEEP = "sleep"  # taken when its sandbox went to sleep
    ASKED = "asked"  # somebody asked for it
    RESTORED = "restored"  # an earlier one, made the newest again
    FORKED = "forked"  # another lease's, from which this one starts


class Snapshot(models.Model):
    """One stored copy of a sandbox's files: an object for each place, under `key`.

    The newest of a holder is the one that a wake reads; the row is written after the objects, so it always has them.
    Several rows may have one key: a fork or a restored copy points to the objects that are there."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    sandbox = models.ForeignKey("sandboxes.Sandbox", on_delete=models.PROTECT, related_name="snapshots")
    incarnation = models.PositiveIntegerField()
    holder = models.UUIDField()
    kind = models.CharField(max_length=16, choices=SnapshotKind.choices, default=SnapshotKind.SLEEP)
    name = models.CharField(max_length=100, blank=True, help_text="What whoever asked for it called it.")
    at = models.DateTimeField()
    key = models.CharField(max_length=255, help_text="Its objects in the store are named KEY/workspace and the like.")
    size_bytes = models.PositiveBigIntegerField()
    digests = models.JSONField(default=dict, help_text="SHA-256 of each object.")
    local = models.BooleanField(default=True, help_text="There is a copy in this installation's state directory, too.")
    forgotten_at = models.DateTimeField(null=True, blank=True, help_text="Its objects were removed.")
    metered = models.BooleanField(default=False, editable=False, help_text="All of its time is in usage records.")

    class Meta:
        default_permissions = ("view",)
        ordering = ["-at", "-pk"]
        constraints = [
            models.UniqueConstraint(
                fields=["sandbox", "incarnation"], condition=Q(kind="sleep"), name="snapshot_once_an_incarnation"
            )
        ]
        indexes = [
            models.Index(fields=["holder", "-at"], name="snapshot_holder"),
            models.Index(fields=["key"], name="snapshot_key"),
            models.Index(fields=["id"], condition=Q(metered=False), name="snapshot_unmetered"),
        ]

    def __str__(self) -> str:
        return f"{self.at:%Y-%m-%d %H:%M:%S} {self.name}".rstrip()

    @property
    def own(self) -> bool:
        """Were its objects stored for it? Else it points to those of another."""
        return self.key.endswith((self.pk.hex, str(self.pk)))


class DataStorageMode(models.TextChoices):
    SYNC = "sync"  # copied into each sandbox before it is used, and what changed back after
    MOUNT = "mount"  # one directory, mounted into each sandbox


class AgentData(models.Model):
    """What belongs to an agent and follows it into every sandbox, as /data. `revision` counts its changes."""

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
        permissions = [("read_agent_data", "Can download what agents and their sandboxes keep")]
        ordering = ["agent_did"]

    def __str__(self) -> str:
        return self.agent_did


class DataSize(models.Model):
    """How large an agent's data was from a moment on, until the next such row: what its storage is metered by. Written under
    the lock of the data's row, and never earlier than the one before."""

    agent_did = models.CharField(max_length=255, verbose_name="agent")
    size_bytes = models.PositiveBigIntegerField()
    at = models.DateTimeField()
    metered = models.BooleanField(default=False, editable=False, help_text="It is over, and all of it is in usage records.")

    class Meta:
        default_permissions = ()
        indexes = [
            models.Index(fields=["agent_did", "-id"], name="datasize_newest"),
            models.Index(fields=["id"], condition=Q(metered=False), name="datasize_unmetered"),
        ]

    def __str__(self) -> str:
        return f"{self.agent_did}: {self.size_bytes} bytes"

    @classmethod
    def note(cls, agent_did: str, size_bytes: int, *, now: datetime) -> None:
        """Call it where the size is written, in the same transaction."""
        last = cls.objects.filter(agent_did=agent_did).order_by("-pk").first()
        if size_bytes != (last.size_bytes if last else 0):
            cls.objects.create(agent_did=agent_did, size_bytes=size_bytes, at=max(now, last.at) if last else now)


class DataObject(models.Model):
    """One object in the store with what one persist found changed: a tar, of which some members may be outdated since."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    data = models.ForeignKey(AgentData, on_delete=models.CASCADE, related_name="bundles")
    key = models.CharField(max_length=512, unique=True)
    size_bytes = models.PositiveBigIntegerField()
    at = models.DateTimeField()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return self.key


class DataFile(models.Model):
    """The newest version of one path in an agent's data; one that was removed stays, marked, so that sandboxes that have
    it yet learn of it."""

    data = models.ForeignKey(AgentData, on_delete=models.CASCADE, related_name="entries")
    path = models.CharField(max_length=1000, help_text="Relative to /data.")
    kind = models.CharField(max_length=9, choices=[("file", "file"), ("directory", "directory"), ("link", "link")])
    mode = models.PositiveSmallIntegerField(help_text="Permission bits.")
    size_bytes = models.PositiveBigIntegerField(default=0)
    mtime = models.BigIntegerField(default=0, help_text="Seconds since 1970, as its sandbox said.")
    digest = models.CharField(max_length=64, blank=True, help_text="SHA-256 of a file.")
    target = models.TextField(blank=True, help_text="Of a link.")
    stored_in = models.ForeignKey(DataObject, on_delete=models.PROTECT, null=True, blank=True, related_name="entries")
    offset = models.PositiveBigIntegerField(default=0, help_text="Where its bytes begin in the object.")
    revision = models.PositiveBigIntegerField(help_text="The data's revision that this version came with.")
    holder = models.UUIDField(null=True, blank=True, help_text="The lease in whose sandbox it was written.")
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
    """What one sandbox has of its agent's data: what it was given, and what it looked like then.

    Whatever differs from `base` was changed in the sandbox. `pulling` names what is being written into it: after a crash
    those paths hold anything, and are written again."""

    sandbox = models.OneToOneField("sandboxes.Sandbox", on_delete=models.CASCADE, primary_key=True, related_name="attachment")
    incarnation = models.PositiveIntegerField()
    data = models.ForeignKey(AgentData, on_delete=models.CASCADE, related_name="attachments")
    holder = models.UUIDField()
    revision = models.PositiveBigIntegerField(default=0, help_text="It has everything up to this revision of the data.")
    version = models.PositiveBigIntegerField(default=0, help_text="Counts the writes of this row.")
    look = models.CharField(max_length=64, blank=True, help_text="SHA-256 of a listing in which nothing was unsaved.")
    base = models.JSONField(default=dict, help_text="Path -> revision, digest, stamp.")
    pulling = models.JSONField(default=list, blank=True)
    pull_until = models.DateTimeField(null=True, blank=True, help_text="Until then somebody is writing them.")
    skill = models.CharField(max_length=63, blank=True, help_text="The skill that was seeded, or found there.")
    unsaved_since = models.DateTimeField(null=True, blank=True, help_text="The last try to store what changed failed.")
    full = models.BooleanField(default=False, help_text="It could not be stored because it is more than is kept.")
    last_error = models.TextField(blank=True)

    class Meta:
        default_permissions = ()
        indexes = [models.Index(fields=["unsaved_since"], condition=Q(unsaved_since__isnull=False), name="attachment_unsaved")]

    def __str__(self) -> str:
        return f"{self.data} in {self.sandbox_id}"


class DataEvent(models.Model):
    """Something about stored state that its agent and operators should know."""

    class Kind(models.TextChoices):
        CONFLICT = "conflict"  # two sandboxes of one agent changed one file
        LEFT_OUT = "left_out"  # it cannot be stored: no regular file, no text for a name, too long a path
        FULL = "full"  # more than the agent may keep
        CORRUPT = "corrupt"  # a stored copy is not what was stored
        OLDER = "older_copy"  # the newest copy could not be read, and the one before it was
        DROPPED = "dropped"  # its sandbox went with changes that could not be stored

    holder = models.UUIDField(null=True, blank=True)
    agent_did = models.CharField(max_length=255, db_index=True)
    at = models.DateTimeField()
    kind = models.CharField(max_length=16, choices=Kind.choices)
    path = models.CharField(max_length=1000, blank=True)
    detail = models.CharField(max_length=500, blank=True)

    class Meta:
        default_permissions = ("view",)
        ordering = ["-at", "-pk"]
        indexes = [models.Index(fields=["holder", "-at", "-id"], name="dataevent_holder")]

    def __str__(self) -> str:
        return f"{self.get_kind_display()} {self.path}"


def format_key_timestamp(at: datetime) -> str:
    """A moment as keys have it."""
    return at.astimezone(UTC).strftime(KEY_TIMESTAMP_FORMAT)


def parse_key_timestamp(stamp: str) -> datetime:
    return datetime.strptime(stamp, KEY_TIMESTAMP_FORMAT).replace(tzinfo=UTC)

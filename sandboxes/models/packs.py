"""Environment packs: versions, and the version that each environment type uses."""

from django.db.models import (
    PROTECT,
    BinaryField,
    CharField,
    DateTimeField,
    ForeignKey,
    JSONField,
    Model,
    SlugField,
    TextChoices,
    UniqueConstraint,
)


class PackOrigin(TextChoices):
    SHIPPED = "shipped"  # part of this release; upgraded with it
    ADDED = "added"  # by an operator


class PackVersion(Model):
    """Immutable version of an environment pack: its manifest, its schemas and the files of its skill."""

    pack = SlugField(max_length=63, db_index=False)
    version = CharField(max_length=63)
    digest = CharField(max_length=64, help_text="SHA-256 of all files of the pack.")
    description = CharField(max_length=200, blank=True)
    origin = CharField(max_length=7, choices=PackOrigin.choices)
    defaults = JSONField(default=dict, help_text="Defaults of the environment type, as in pack.toml.")
    schemas = JSONField(default=dict, help_text="JSON Schemas of state and action.")
    files = JSONField(default=dict, help_text="Path below /data/skills/<type> -> SHA-256.")
    marker_digest = CharField(max_length=64, help_text="SHA-256 of the marker file in a sandbox that has this version.")
    archive = BinaryField(editable=False, help_text="Skill as an uncompressed tar, compressed by zlib.")
    created_at = DateTimeField()

    class Meta:
        default_permissions = ("view",)
        ordering = ["pack", "-pk"]
        constraints = [UniqueConstraint(fields=["pack", "version"], name="pack_version_once")]

    def __str__(self) -> str:
        return f"{self.pack} {self.version}"


class PackAssignment(Model):
    """Pack version whose skill is written into the sandboxes of an environment type."""

    environment_type = SlugField(max_length=63, unique=True)
    version = ForeignKey(PackVersion, on_delete=PROTECT, related_name="assignments")
    assigned_at = DateTimeField()

    class Meta:
        default_permissions = ("view",)
        ordering = ["environment_type"]

    def __str__(self) -> str:
        return f"{self.environment_type}: {self.version}"

"""Versions of image templates. The verbs are in sandboxes.templates."""

import uuid

from django.db import models
from django.db.models import Q
from django.utils import timezone

from sandboxes.db.message_fields import MessageField
from sandboxes.providers.base import TEMPLATE_TAG_PREFIX


class TemplateState(models.TextChoices):
    BUILDING = "building", "Building"  # waits for a worker, or a worker builds it
    READY = "ready", "Ready"
    FAILED = "failed", "Failed"


class TemplateFailure(models.TextChoices):
    """Reasons of a failed build."""

    BASE_UNAVAILABLE = "base_unavailable", "base image not available"
    COMMAND_FAILED = "command_failed", "a command failed"
    BUILD_REFUSED = "build_refused", "the engine refused the build"
    NO_PROGRESS = "no_progress", "no output for too long"
    OUTPUT_LIMIT = "output_limit", "too much output"
    UNUSABLE_IMAGE = "unusable_image", "no sandbox can run on the image"
    ABANDONED = "abandoned", "the builder died or lost the engine too often"


class ImageTemplate(models.Model):
    """One version of a template on one host. The version is the hash of the specification, so a version never changes."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    host = models.ForeignKey(
        "sandboxes.Host", on_delete=models.PROTECT, related_name="templates", db_index=False,
        help_text="Host whose engine, or vendor's account, has the image.",
    )  # fmt: skip
    name = models.SlugField(max_length=63, db_index=False)
    version = models.CharField(max_length=64, help_text="SHA-256 of the specification.")
    base = models.CharField(max_length=255, blank=True, help_text="Image that the commands extend. Empty with a Dockerfile.")
    commands = models.JSONField(default=list, help_text="Shell commands, run as root in this order.")
    dockerfile = models.TextField(blank=True, help_text="Dockerfile, instead of base and commands.")
    state = models.CharField(max_length=8, choices=TemplateState.choices, default=TemplateState.BUILDING)
    failure = models.CharField(max_length=16, choices=TemplateFailure.choices, blank=True)
    error = MessageField(max_length=2000, blank=True, help_text="Message of the failed build.")
    image = models.CharField(max_length=255, blank=True, help_text="Name of the built image, for a pool. Empty: never built.")
    image_id = models.CharField(max_length=100, blank=True, help_text="Identity of the built image at the engine.")
    size_bytes = models.BigIntegerField(
        null=True, blank=True, help_text="Size of the image with its base, if the vendor states it."
    )
    log = models.TextField(blank=True, help_text="Output of the last build, redacted; its middle is omitted if it is long.")
    created_at = models.DateTimeField(default=timezone.now)  # noqa: TID251 - decides nothing
    requested_by = MessageField(max_length=255, blank=True, help_text="Operator or API key of the last request.")
    started_at = models.DateTimeField(null=True, blank=True, help_text="Start of the last attempt.")
    finished_at = models.DateTimeField(null=True, blank=True, help_text="End of the last build.")
    build_number = models.PositiveIntegerField(default=1, db_default=1, help_text="Number of the last requested build, from 1.")
    attempts = models.PositiveSmallIntegerField(default=0, help_text="Attempts of the present build.")
    # A row in flight: a build, or a removal. The deadline of a waiting build is the time at which a sweep queues it again.
    claim = models.UUIDField(null=True, blank=True, editable=False)
    claimed_by = models.CharField(max_length=128, blank=True, editable=False)
    deadline_at = models.DateTimeField(null=True, blank=True, editable=False)

    class Meta:
        default_permissions = ("view",)
        permissions = [("manage_imagetemplate", "Can build and remove image templates")]
        ordering = ["name", "-created_at"]
        indexes = [
            models.Index(fields=["-created_at", "-id"], name="imagetemplate_newest"),
            models.Index(fields=["deadline_at"], condition=Q(state="building"), name="imagetemplate_due"),
        ]
        constraints = [
            models.UniqueConstraint(fields=["host", "name", "version"], name="imagetemplate_once"),
            models.CheckConstraint(
                condition=~Q(state="building") | Q(deadline_at__isnull=False), name="imagetemplate_building_has_deadline"
            ),
            models.CheckConstraint(condition=~Q(state="ready") | ~Q(image=""), name="imagetemplate_ready_has_image"),
            models.CheckConstraint(
                condition=(Q(state="failed") & ~Q(failure="")) | (~Q(state="failed") & Q(failure="")),
                name="imagetemplate_failed_has_reason",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.name}:{self.short_version}"

    @property
    def short_version(self) -> str:
        return self.version[:12]

    @property
    def tag(self) -> str:
        """Name of the image for pools, and at an engine whose images have names."""
        return f"{TEMPLATE_TAG_PREFIX}{self.name}:{self.short_version}"

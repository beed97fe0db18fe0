"""Tables of repositories and of the coding tasks in them."""

import uuid
from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models
from django.db.models import Q, Value
from django.utils import timezone

from leases.coding.forges.base import MAX_URL_CHARS
from leases.projects.models import DEFAULT_PROJECT_ID, Project
from sandboxes.db.message_fields import MessageField
from sandboxes.db.prefix_index import PrefixIndex

BRANCH_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_-]*(?:[./][A-Za-z0-9_-]+)*"
BRANCH_DESCRIPTION = "a branch name of letters, digits and - _, with single . and / between them"
MAX_PATTERNS = 64


def list_default_protected_paths() -> list[str]:
    """Default of the migration that created the column."""
    return []


class ForgeKind(models.TextChoices):
    BARE = "bare", "Bare repository without pull requests"
    GITHUB = "github", "GitHub-compatible REST API"


class CodingTaskStatus(models.TextChoices):
    """Progress of a task. `pushed` lasts until the forge has the pull request."""

    OPEN = "open"
    PUSHED = "pushed"
    PROPOSED = "proposed"
    MERGED = "merged"
    CLOSED = "closed"
    ABANDONED = "abandoned"


ENDED_TASK_STATUSES = (CodingTaskStatus.MERGED, CodingTaskStatus.CLOSED, CodingTaskStatus.ABANDONED)


class CompletesOn(models.TextChoices):
    """Event that ends the leases of the task."""

    PULL_REQUEST = "pull_request", "Pull request opened"
    MERGE = "merge", "Pull request merged"


def check_path_patterns(value: Any) -> None:
    fits = isinstance(value, list) and len(value) <= MAX_PATTERNS
    if not fits or not all(isinstance(pattern, str) and 0 < len(pattern) <= 200 for pattern in value):
        raise ValidationError(f"Must be a list of at most {MAX_PATTERNS} patterns, each of at most 200 characters.")


class Repository(models.Model):
    """Git repository in which agents work, with the forge of its pull requests. Its credentials never enter a sandbox."""

    name = models.SlugField(max_length=63, unique=True)
    clone_url = models.CharField(max_length=500, help_text="https, ssh or an absolute path on the control plane's host.")
    base_branch = models.CharField(
        max_length=200, default="main", validators=[RegexValidator(rf"\A{BRANCH_PATTERN}\Z", f"Not {BRANCH_DESCRIPTION}.")]
    )
    forge = models.CharField(max_length=16, choices=ForgeKind, default=ForgeKind.BARE)
    api_url = models.CharField(max_length=500, blank=True, help_text="Such as https://api.github.com.")
    forge_project = models.CharField(max_length=200, blank=True, help_text="owner/name at the forge.")
    ssh_key_path = models.CharField(max_length=500, blank=True, help_text="Private key for ssh, on the control plane's host.")
    sealed_token = models.BinaryField(null=True, editable=False, help_text="Encrypted by sandboxes.db.encryption.")
    depth = models.PositiveIntegerField(
        default=50, validators=[MinValueValidator(1), MaxValueValidator(100_000)], help_text="Commits in a sandbox's copy."
    )
    max_mib = models.PositiveIntegerField(
        default=500, validators=[MinValueValidator(1), MaxValueValidator(10_000)], verbose_name="maximum size",
        help_text="Of the copy's objects, MiB.",
    )  # fmt: skip
    max_change_mib = models.PositiveIntegerField(
        default=10, validators=[MinValueValidator(1), MaxValueValidator(100)], verbose_name="maximum size of a change",
        help_text="Of all files of all commits that an agent submits, MiB.",
    )  # fmt: skip
    protected_paths = models.JSONField(
        default=list, blank=True, validators=[check_path_patterns],
        help_text='Patterns of paths that an agent may not change, beside the built-in ones, such as "deploy/*".',
    )  # fmt: skip
    allowed_paths = models.JSONField(
        default=list, db_default=Value([], models.JSONField()), blank=True, validators=[check_path_patterns],
        help_text='Patterns of built-in protected paths that an agent may change, such as ".github/workflows/docs.yml".',
    )  # fmt: skip
    enabled = models.BooleanField(default=True, help_text="New tasks may be created.")
    project = models.ForeignKey(
        Project, on_delete=models.PROTECT, default=DEFAULT_PROJECT_ID, db_default=Value(DEFAULT_PROJECT_ID), related_name="+",
        help_text="Project of the environments whose tasks use the repository.",
    )  # fmt: skip
    created_at = models.DateTimeField(default=timezone.now, editable=False)  # noqa: TID251 - decides nothing

    class Meta:
        ordering = ["name"]
        verbose_name_plural = "repositories"
        default_permissions = ("add", "change", "view")
        permissions = [("enable_repository", "Can enable and disable repositories")]

    def __str__(self) -> str:
        return self.name


class CodingTask(models.Model):
    """Task of one environment: a branch of a repository, and its pull request."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    environment = models.OneToOneField("leases.Environment", on_delete=models.CASCADE, related_name="coding_task")
    repository = models.ForeignKey(Repository, on_delete=models.PROTECT, related_name="tasks")
    title = models.CharField(max_length=200)
    description = models.TextField(blank=True)
    test_command = models.CharField(max_length=500, blank=True)
    completes_on = models.CharField(max_length=16, choices=CompletesOn, default=CompletesOn.PULL_REQUEST)
    base_branch = models.CharField(max_length=200)
    base_commit = models.CharField(max_length=64, blank=True, help_text="Set by the first checkout.")
    branch = models.CharField(max_length=255, help_text="Branch of the pull request.")
    status = models.CharField(max_length=16, choices=CodingTaskStatus, default=CodingTaskStatus.OPEN)
    head_commit = models.CharField(max_length=64, blank=True, help_text="Last commit that was pushed.")
    pushing_commit = models.CharField(max_length=64, blank=True, help_text="Set before a push. It may have been pushed.")
    proposal_title = models.CharField(max_length=200, blank=True)
    proposal_body = models.TextField(blank=True)
    pull_request_number = models.PositiveIntegerField(null=True, blank=True)
    pull_request_url = models.CharField(max_length=MAX_URL_CHARS, blank=True)
    submissions = models.PositiveIntegerField(default=0)
    refusals = models.JSONField(default=list, blank=True, help_text="Reasons why the last submission was refused.")
    created_at = models.DateTimeField(default=timezone.now, editable=False)  # noqa: TID251 - decides nothing
    created_by = MessageField(max_length=255, blank=True)
    submitted_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)
    busy_until = models.DateTimeField(null=True, blank=True, help_text="Deadline of the submission in progress.")
    next_poll_at = models.DateTimeField(null=True, blank=True, help_text="Next request to the forge.")
    poll_error = MessageField(max_length=500, blank=True)

    class Meta:
        default_permissions = ("view",)
        ordering = ["-created_at", "-pk"]
        constraints = [
            models.CheckConstraint(
                condition=Q(status__in=ENDED_TASK_STATUSES, ended_at__isnull=False, next_poll_at__isnull=True)
                | (~Q(status__in=ENDED_TASK_STATUSES) & Q(ended_at__isnull=True)),
                name="codingtask_ended",
            ),
            models.CheckConstraint(
                condition=~Q(status__in=["pushed", "proposed", "merged", "closed"]) | ~Q(head_commit=""),
                name="codingtask_pushed_has_head",
            ),
        ]
        indexes = [
            models.Index(fields=["-created_at", "-id"], name="codingtask_newest"),
            models.Index(fields=["next_poll_at"], condition=Q(next_poll_at__isnull=False), name="codingtask_poll"),
            PrefixIndex(fields=["title"], name="codingtask_title_prefix"),
            PrefixIndex(fields=["branch"], name="codingtask_branch_prefix"),
        ]

    def __str__(self) -> str:
        return self.title

"""Capacity pools and per-agent quotas: columns, constraints and indexes."""

import uuid

from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator, RegexValidator
from django.db import models
from django.db.models import F, Q, Value
from django.utils import timezone

from sandboxes.db.message_fields import LongMessageField, MessageField
from sandboxes.models.resource_limits import MIN_MEMORY_MIB, MIN_MILLICPUS, ResourceLimits, validate_images
from sandboxes.providers.registry import MAX_RUNTIME_CHARS, PROVIDERS, RUNTIME_PATTERN, RUNTIME_PROVIDERS

UNMEASURED_CAPACITY = 1000  # places, where the engine's memory is not known


def default_capacity() -> int:
    return int(settings.MAX_SANDBOXES or UNMEASURED_CAPACITY)


def default_memory_mib() -> int:
    return int(settings.SANDBOX_MEMORY_MIB)


def default_millicpus() -> int:
    return int(settings.SANDBOX_MILLICPUS)


def default_pids() -> int:
    return int(settings.SANDBOX_PIDS)


def list_provider_choices() -> list[tuple[str, str]]:
    return [(name, name) for name in PROVIDERS]


class Pool(ResourceLimits):
    """Capacity and defaults of one kind of sandbox, with its counters."""

    name = models.SlugField(max_length=63, unique=True)
    owner = models.UUIDField(
        default=uuid.uuid4, unique=True, editable=False, help_text="Provider label of this pool's sandboxes."
    )
    provider = models.CharField(
        max_length=32,
        blank=True,
        choices=list_provider_choices,
        help_text="Empty: SANDBOX_PROVIDER.",
    )
    image = models.CharField(
        max_length=255, blank=True, help_text="Empty: the default of the provider, such as LEASEHOLD_SANDBOX_IMAGE."
    )
    capacity = models.PositiveIntegerField(
        default=default_capacity,
        validators=[MinValueValidator(1)],
        help_text="Maximum number of sandboxes, cold ones and those being destroyed included.",
    )
    automatic_capacity = models.BooleanField(
        default=False,
        db_default=False,
        help_text="Set the capacity to LEASEHOLD_MAX_SANDBOXES, or if that is unset by the engine's memory.",
    )
    capacity_origin = MessageField(
        max_length=255,
        blank=True,
        default="",
        db_default="",
        editable=False,
        help_text="Origin of an automatic capacity. Empty: not derived yet.",
    )
    used = models.PositiveIntegerField(default=0, editable=False)
    max_starting = models.PositiveIntegerField(
        null=True, blank=True, validators=[MinValueValidator(1)],
        help_text="Maximum number of sandboxes that start or wake at the same time. Empty: no limit.",
    )  # fmt: skip
    draining = models.BooleanField(default=False, editable=False, help_text="No new sandboxes; existing ones end normally.")
    restricted = models.BooleanField(
        default=False,
        db_default=False,
        help_text="Only API keys that list this pool, and environment types that set it, may use it.",
    )
    warm_target = models.PositiveIntegerField(
        default=0, help_text="Number of sandboxes to keep ready without a lease on each host, starting ones included."
    )
    warm_failures = models.PositiveIntegerField(default=0, editable=False, help_text="Consecutive failed starts.")
    warm_paused_until = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="End of the pause after repeated failed starts."
    )
    warm_error = LongMessageField(blank=True, editable=False)
    # Failed starts of this pool since the last one that succeeded: sandboxes.pool.start_failures.
    starts_failing_since = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="First failed start since the last one that succeeded."
    )
    start_error = LongMessageField(blank=True, default="", db_default="", editable=False)
    start_error_code = models.CharField(max_length=64, blank=True, default="", db_default="", editable=False)
    workspace_limit_mib = models.PositiveIntegerField(
        default=2048, validators=[MinValueValidator(1)], help_text="Size of /workspace, MiB, above which an exec is refused."
    )
    memory_mib = models.PositiveIntegerField(default=default_memory_mib, validators=[MinValueValidator(MIN_MEMORY_MIB)])
    millicpus = models.PositiveIntegerField(default=default_millicpus, validators=[MinValueValidator(MIN_MILLICPUS)])
    allowed_images = models.JSONField(
        default=list, db_default=Value([], models.JSONField()), blank=True, validators=[validate_images],
        help_text="Further images that a lease may request, such as those of image templates: a list of names.",
    )  # fmt: skip
    max_memory_mib = models.PositiveIntegerField(
        null=True, blank=True, validators=[MinValueValidator(MIN_MEMORY_MIB)],
        help_text="Maximum memory that a lease may request, MiB. Empty: the memory above.",
    )  # fmt: skip
    max_millicpus = models.PositiveIntegerField(
        null=True, blank=True, validators=[MinValueValidator(MIN_MILLICPUS)],
        help_text="Maximum CPU that a lease may request, millicores. Empty: the CPU above.",
    )  # fmt: skip
    max_disk_mib = models.PositiveIntegerField(
        null=True, blank=True,
        help_text="Maximum disk that a lease may request, MiB, at a provider that can set one. Empty: no disk by request.",
    )  # fmt: skip
    max_gpus = models.PositiveSmallIntegerField(
        null=True, blank=True,
        help_text="Maximum number of GPUs that a lease may request, at a provider that has some. Empty: none.",
    )  # fmt: skip
    pids = models.PositiveIntegerField(default=default_pids, validators=[MinValueValidator(16)])
    runtime = models.CharField(
        max_length=MAX_RUNTIME_CHARS, blank=True, default="", db_default="",
        validators=[RegexValidator(rf"\A{RUNTIME_PATTERN}\Z")],
        help_text="OCI runtime or RuntimeClass from the next start on, such as runsc (gVisor). Empty: the provider's setting.",
    )  # fmt: skip
    created_at = models.DateTimeField(default=timezone.now, editable=False)  # noqa: TID251 - decides nothing
    # Counts of destroyed sandboxes and of evictions. sandboxes.pool_stats adds the counters of live sandboxes.
    warm_hits = models.PositiveBigIntegerField(default=0, editable=False)
    woken_local = models.PositiveBigIntegerField(default=0, editable=False)
    woken_cloud = models.PositiveBigIntegerField(default=0, editable=False)
    woken_vendor = models.PositiveBigIntegerField(default=0, db_default=0, editable=False)
    woken_fresh = models.PositiveBigIntegerField(default=0, editable=False)
    slept = models.PositiveBigIntegerField(default=0, editable=False)
    claimed_warm = models.PositiveBigIntegerField(default=0, editable=False)
    evicted_cold = models.PositiveBigIntegerField(default=0, editable=False)
    evicted_warm = models.PositiveBigIntegerField(default=0, editable=False)
    evicted_waiting = models.PositiveBigIntegerField(default=0, editable=False)

    class Meta:
        permissions = [("drain_pool", "Can drain and resume pools")]

    def __str__(self) -> str:
        return self.name

    def clean(self) -> None:
        super().clean()
        if self.runtime and self.provider and self.provider not in RUNTIME_PROVIDERS:
            raise ValidationError({"runtime": f"The {self.provider} provider has no runtimes to choose from."})


class Quota(models.Model):
    """Limit, guarantee and current count of one agent's sandboxes in one pool."""

    pool = models.ForeignKey(Pool, on_delete=models.CASCADE, related_name="quotas", db_index=False)
    agent_did = models.CharField(max_length=255, verbose_name="agent")
    most = models.PositiveIntegerField(null=True, blank=True, help_text="Maximum number of sandboxes. Empty: no limit.")
    guaranteed = models.PositiveIntegerField(
        default=0, help_text="Number of sandboxes that are never evicted for other agents."
    )
    used = models.PositiveIntegerField(default=0, editable=False)
    admitted_at = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="Last time at which a waiting request of the agent got a place."
    )

    class Meta:
        ordering = ["agent_did"]
        constraints = [
            models.UniqueConstraint(fields=["pool", "agent_did"], name="quota_once"),
            models.CheckConstraint(
                condition=Q(most__isnull=True) | Q(most__gte=F("guaranteed")),
                name="quota_guarantee_within_most",
                violation_error_message="The guarantee may not exceed the maximum.",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.agent_did} in {self.pool}"

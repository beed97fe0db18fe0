"""Tables of leases and their timelines. State changes are in `leasing`."""

import uuid

from django.db import models
from django.db.models import F, Q, Value

from leases.models.environment_types import EnvironmentType
from sandboxes.db.message_fields import MessageField
from sandboxes.models import Pool, SkipReason

ENVIRONMENT_ID_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,199}"
ENVIRONMENT_ID_DESCRIPTION = "1 to 200 letters, digits and . _ : @ -, the first a letter or digit"


class LeaseStatus(models.TextChoices):
    ACTIVE = "active"
    EXPIRED = "expired"  # the lease has ended; its sandbox may still exist
    DESTROYED = "destroyed"  # the provider has confirmed that the sandbox is gone


END_REASONS = ("ttl", "max_ttl", "released", "budget", "operator", "lost", "failed")  # besides condition:<name>


class Lease(models.Model):
    """An agent's right to a sandbox in one environment. A later lease is a new row; an ended one is kept for its retention."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    agent_did = models.CharField(max_length=255, verbose_name="agent")
    environment_id = models.CharField(max_length=200, verbose_name="environment")
    environment_type = models.ForeignKey(EnvironmentType, to_field="name", on_delete=models.PROTECT, related_name="leases")
    pool = models.ForeignKey(
        Pool, on_delete=models.PROTECT, related_name="leases",
        help_text="Pool of the lease's sandbox, or of the last one; before the first one, the first pool that is tried.",
    )  # fmt: skip
    pools = models.JSONField(
        default=list, db_default=Value([], models.JSONField()), blank=True,
        help_text="Names of the pools that the lease may use: that of its request, or those of the API key. Empty: those of "
        "the environment type.",
    )  # fmt: skip
    memory_mib = models.PositiveIntegerField(
        null=True, blank=True, help_text="Memory of its sandboxes, MiB, as requested. Empty: that of the pool."
    )
    millicpus = models.PositiveIntegerField(
        null=True, blank=True, help_text="CPU of its sandboxes, millicores, as requested. Empty: that of the pool."
    )
    size = models.CharField(
        max_length=32,
        blank=True,
        default="",
        db_default="",
        help_text="Instance type whose memory and CPU were requested. Empty: none was named.",
    )
    disk_mib = models.PositiveIntegerField(
        null=True, blank=True, help_text="Disk of its sandboxes, MiB, as requested. Empty: that of the vendor."
    )
    gpus = models.PositiveSmallIntegerField(default=0, db_default=0, help_text="Number of GPUs of its sandboxes, as requested.")
    gpu_type = models.CharField(
        max_length=32, blank=True, default="", db_default="", help_text="Type of its GPUs, as requested. Empty: any."
    )
    image = models.CharField(
        max_length=255,
        blank=True,
        default="",
        db_default="",
        help_text="Image of its sandboxes, as requested. Empty: that of the pool.",
    )
    status = models.CharField(max_length=16, choices=LeaseStatus.choices, default=LeaseStatus.ACTIVE)
    leased_at = models.DateTimeField()
    last_activity_at = models.DateTimeField()
    ttl = models.DurationField()
    expires_at = models.DateTimeField(help_text="Earliest of the lease's clocks, see leasing.compute_expires_at.")
    expires_minute = models.IntegerField(
        help_text="expires_at in whole minutes since 1970, for the index that sweeps search. An index on the exact time "
        "would be rewritten by every renewal."
    )
    max_expires_at = models.DateTimeField()
    sleep_after = models.DurationField()
    auto_stop = models.DurationField(
        null=True, blank=True, help_text="Idle time after which the vendor stops the sandbox. 0: never. Empty: its setting."
    )
    auto_delete = models.DurationField(
        null=True,
        blank=True,
        help_text="Time after a stop at which the vendor deletes the sandbox. 0: never. Empty: its setting.",
    )
    expiry_conditions = models.JSONField(default=list)
    llm_limit = models.DecimalField(
        max_digits=18, decimal_places=9, null=True, blank=True, verbose_name="spend limit",
        help_text="Model-call budget of this lease, USD. Empty: no limit.",
    )  # fmt: skip
    llm_token_limit = models.BigIntegerField(
        null=True, blank=True, verbose_name="token limit",
        help_text="Input and output tokens of this lease's model calls. Empty: no limit.",
    )  # fmt: skip
    llm_enabled = models.BooleanField(
        default=True, db_default=True, editable=False, verbose_name="model proxy",
        help_text="Model calls of its sandboxes are answered, within policy and limits.",
    )  # fmt: skip
    ended_at = models.DateTimeField(null=True, blank=True)
    end_reason = models.CharField(max_length=80, blank=True)
    end_detail = MessageField(
        max_length=500, blank=True, help_text="Detail of end_reason, such as the budget or the error message."
    )
    forked_from = models.ForeignKey(
        "self", on_delete=models.PROTECT, null=True, blank=True, related_name="+", db_index=False,
        help_text="Source of the fork.",
    )  # fmt: skip
    destroyed_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        default_permissions = ("view",)
        permissions = [("end_lease", "Can end leases"), ("grant_lease", "Can grant leases")]
        ordering = ["-leased_at", "-pk"]
        constraints = [
            models.CheckConstraint(condition=Q(status__in=LeaseStatus.values), name="lease_status_known"),
            models.CheckConstraint(
                condition=Q(end_reason__in=("", *END_REASONS)) | Q(end_reason__startswith="condition:"),
                name="lease_reason_known",
            ),
            models.CheckConstraint(
                condition=Q(status="active", ended_at__isnull=True, end_reason="")
                | (~Q(status="active") & Q(ended_at__isnull=False) & ~Q(end_reason="")),
                name="lease_ended_iff_not_active",
            ),
            models.CheckConstraint(
                condition=Q(status="destroyed", destroyed_at__isnull=False)
                | (~Q(status="destroyed") & Q(destroyed_at__isnull=True)),
                name="lease_destroyed_has_time",
            ),
            models.CheckConstraint(condition=Q(expires_at__lte=F("max_expires_at")), name="lease_within_max"),
            models.UniqueConstraint(
                fields=["agent_did", "environment_id"], condition=Q(status="active"), name="lease_one_active"
            ),
        ]
        indexes = [
            models.Index(fields=["-leased_at", "-id"], name="lease_newest"),
            # Also for prefix searches: PostgreSQL cannot use an index in the order of a language for LIKE.
            models.Index(
                fields=["agent_did", "-leased_at"],
                opclasses=["varchar_pattern_ops", "timestamptz_ops"],
                name="lease_agent_prefix",
            ),
            models.Index(
                fields=["environment_id", "-leased_at", "-id"],
                opclasses=["varchar_pattern_ops", "timestamptz_ops", "uuid_ops"],
                name="lease_environment_prefix",
            ),
            models.Index(fields=["expires_minute"], condition=Q(status="active"), name="lease_expiry"),
            models.Index(fields=["ended_at"], condition=Q(status="expired"), name="lease_to_reclaim"),
            models.Index(fields=["ended_at"], condition=Q(status="destroyed"), name="lease_destroyed"),
            models.Index(fields=["forked_from"], condition=Q(forked_from__isnull=False), name="lease_fork"),
        ]

    def __str__(self) -> str:
        return self.sandbox_id

    @property
    def sandbox_id(self) -> str:
        """Sandbox name, the same for successive leases of the agent in the environment."""
        return f"{self.agent_did}::{self.environment_id}"


class LeaseEvent(models.Model):
    """Entry in the timeline of a lease. Kept as long as the lease."""

    lease = models.ForeignKey(Lease, on_delete=models.PROTECT, related_name="events", db_index=False)
    at = models.DateTimeField()
    # granted, ended, destroyed, failed, recovered, workspace_over_limit, call_limits, snapshot, restored, forked, pool_skipped
    kind = models.CharField(max_length=32)
    actor = MessageField(max_length=255, blank=True)
    reason = MessageField(max_length=500, blank=True)
    pool = models.ForeignKey(
        Pool, on_delete=models.PROTECT, null=True, blank=True, editable=False, related_name="+", db_index=False,
        help_text="Pool that was passed over.",
    )  # fmt: skip
    skip_reason = models.CharField(
        max_length=16,
        blank=True,
        default="",
        db_default="",
        choices=SkipReason.choices,
        editable=False,
        help_text="Reason for which it was passed over.",
    )
    request = models.OneToOneField(
        "self", on_delete=models.PROTECT, null=True, blank=True, editable=False, related_name="outcome",
        help_text="The queued request whose outcome this entry is. Unique, so that a task delivered twice acts once.",
    )  # fmt: skip

    class Meta:
        default_permissions = ("view",)
        ordering = ["-at", "-pk"]
        indexes = [models.Index(fields=["lease", "-at", "-id"], name="event_lease")]

    def __str__(self) -> str:
        return self.kind

"""Tables of agents, API keys, environment types, leases and turns. State changes are in `leasing` and `turns`."""

import json
import uuid
from datetime import timedelta
from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator, RegexValidator
from django.db import models
from django.db.models import F, Q
from django.utils import timezone

from leases.agent_runs.models import AgentRun as AgentRun  # makes the table known to Django
from leases.atproto.models import AtprotoAccount as AtprotoAccount
from leases.atproto.models import AtprotoRecord as AtprotoRecord
from leases.catalog.models import CatalogAgent as CatalogAgent
from leases.coding.models import CodingTask as CodingTask
from leases.coding.models import Repository as Repository
from leases.environments.models import Environment as Environment  # makes the tables known to Django
from leases.environments.models import EnvironmentSecret as EnvironmentSecret
from leases.queue.models import QueueAgent as QueueAgent  # makes the tables known to Django
from leases.queue.models import QueuedRun as QueuedRun
from sandboxes.db import durations
from sandboxes.models import Policy, Pool, Run, SkipReason
from sandboxes.models.resource_limits import ResourceLimits
from sandboxes.nsid import MAX_NSID_LENGTH, NSID_DESCRIPTION, NSID_PATTERN

DID_PATTERN = r"did:[a-z0-9]+:[A-Za-z0-9._:%-]*[A-Za-z0-9._-]"
DID_DESCRIPTION = "a DID such as did:plc:abc123: letters, digits and . _ : % - after did:<method>:, at most 255 characters"
ENVIRONMENT_ID_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,199}"
ENVIRONMENT_ID_DESCRIPTION = "1 to 200 letters, digits and . _ : @ -, the first a letter or digit"
CONDITION_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
CONDITION_DESCRIPTION = "1 to 64 letters, digits and . _ -, the first a letter or digit"

MIN_SUSPEND_AFTER = timedelta(seconds=1)

# Django %-formats the message of a validator.
validate_did = RegexValidator(rf"\A{DID_PATTERN}\Z", f"Not {DID_DESCRIPTION}.".replace("%", "%%"))


def check_conditions(value: Any) -> None:
    """Raise ValidationError unless the value is a list of at most 32 distinct condition names."""
    condition = RegexValidator(rf"\A{CONDITION_PATTERN}\Z")
    if not isinstance(value, list) or len(value) > 32 or not all(isinstance(name, str) for name in value):
        raise ValidationError("Must be a list of at most 32 condition names.")
    if len(set(value)) < len(value):
        raise ValidationError("Must not contain a condition twice.")
    for name in value:
        condition(name)


def check_argv(value: Any) -> None:
    if not isinstance(value, list) or not value or not all(isinstance(part, str) and "\0" not in part for part in value):
        raise ValidationError("Must be a list of strings, the program first.")


def check_excludes(value: Any) -> None:
    fits = isinstance(value, list) and len(value) <= 64
    if not fits or not all(isinstance(name, str) and 0 < len(name) <= 200 for name in value):
        raise ValidationError("Must be a list of at most 64 names or patterns, each of at most 200 characters.")


def check_sleep_after(value: str) -> None:
    try:
        durations.parse_duration(value)
    except ValueError as error:
        raise ValidationError(str(error)) from None


def check_suspend_after(value: timedelta) -> None:
    if value < MIN_SUSPEND_AFTER:
        raise ValidationError(f"Must be at least {MIN_SUSPEND_AFTER.total_seconds():.0f} second.")


def check_vendor_interval(value: timedelta) -> None:
    if not timedelta(0) <= value <= durations.MAX_DURATION:
        raise ValidationError(f"Must be at least 0 and at most {durations.MAX_DURATION.days} days.")


def default_turn_argv() -> list[str]:
    return ["python3", "/opt/leasehold/take_turn.py"]


class Agent(models.Model):
    """API principal. Other tables refer to an agent by its DID; the row is for the console and the agent API."""

    did = models.CharField(max_length=255, unique=True, validators=[validate_did], verbose_name="DID")
    name = models.CharField(max_length=100, blank=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["did"]

    def __str__(self) -> str:
        return self.name or self.did


class KeyScope(models.TextChoices):
    """Part of the HTTP API that a key may use."""

    LEASES = "leases", "leases: work with leases and their sandboxes"
    READ = "read", "read: read leases and their sandboxes, change nothing"
    COSTS = "costs", "costs: read costs, budgets and statements"
    TEMPLATES = "templates", "templates: build and remove image templates, with an operator's key"


def default_key_scopes() -> list[str]:
    """Return the scopes that together permit every request but builds of images. `leases` includes `read`.

    A build runs commands as root, with a network: a key needs `templates` explicitly."""
    return [KeyScope.LEASES, KeyScope.COSTS]


class AgentKey(ResourceLimits):
    """API key. Only the SHA-256 of its random secret is stored, so the key can be shown only when it is issued or rotated.

    A rotation replaces the secret; everything that refers to the row stays."""

    prefix = models.CharField(max_length=16, unique=True, editable=False)
    digest = models.CharField(max_length=64, unique=True, editable=False)
    first_digest = models.CharField(
        max_length=64, editable=False, help_text="Digest of the first secret. Run ids of repeated requests derive from it."
    )
    previous_digest = models.CharField(max_length=64, blank=True, editable=False)
    previous_valid_until = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="The secret before the last rotation is accepted until then."
    )
    rotated_at = models.DateTimeField(null=True, blank=True, editable=False)
    name = models.CharField(max_length=100, blank=True, help_text="Purpose of the key.")
    dids = models.JSONField(default=list, blank=True, help_text="Agents that the key may act for.", verbose_name="DIDs")
    operator = models.BooleanField(default=False, help_text="The key may act for all agents.")
    scopes = models.JSONField(default=default_key_scopes, help_text="Requests that the key permits.")
    allowed_environment_types = models.JSONField(
        default=list, blank=True,
        help_text="Environment types of new leases. Empty: every environment type that is not restricted.",
    )  # fmt: skip
    allowed_pools = models.JSONField(
        default=list, blank=True,
        help_text="Pools of new leases. Empty: every pool that is not restricted, and the pool that the environment type sets.",
    )  # fmt: skip
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    last_used_at = models.DateTimeField(null=True, blank=True, editable=False, help_text="Accurate to one minute.")
    expires_at = models.DateTimeField(null=True, blank=True, help_text="The key is rejected from then on. Empty: never.")
    revoked_at = models.DateTimeField(null=True, blank=True, editable=False)
    tokens = models.FloatField(default=0, editable=False, help_text="Level of the token bucket that limits new leases.")
    tokens_at = models.DateTimeField(null=True, blank=True, editable=False)

    class Meta:
        verbose_name = "API key"
        default_permissions = ("add", "change", "view")
        permissions = [("revoke_key", "Can revoke API keys")]
        ordering = ["-created_at", "-pk"]

    def __str__(self) -> str:
        return f"{self.prefix}…"


class EnvironmentType(ResourceLimits):
    """Defaults and limits of the leases in one kind of environment. Operators edit these rows."""

    name = models.SlugField(max_length=63, unique=True)
    expiry_conditions = models.JSONField(
        default=list, blank=True, validators=[check_conditions], help_text="Conditions whose posting ends a lease."
    )
    ttl = models.DurationField(default=timedelta(hours=4), help_text="A lease ends after this time without use.")
    max_ttl = models.DurationField(
        default=timedelta(hours=24), help_text="A lease ends this long after it was granted, at the latest."
    )
    sleep_after = models.CharField(
        max_length=16,
        blank=True,
        validators=[check_sleep_after],
        help_text='Idle time before eviction, such as "5m". Empty: SANDBOX_SLEEP_AFTER, else LEASEHOLD_IDLE_TIMEOUT.',
    )
    suspend_after = models.DurationField(
        null=True, blank=True, validators=[check_suspend_after],
        help_text="A waiting sandbox is suspended after this time: its processes are frozen and keep their memory, or at a "
        "vendor its state is stored and it is stopped. Applies to new sandboxes at providers that can suspend. Empty: never.",
    )  # fmt: skip
    auto_stop = models.DurationField(
        null=True, blank=True, validators=[check_vendor_interval],
        help_text="Idle time after which the vendor of a remote provider stops a sandbox by itself. 0: never. Empty: the "
        "provider's setting.",
    )  # fmt: skip
    auto_delete = models.DurationField(
        null=True, blank=True, validators=[check_vendor_interval],
        help_text="Time after a stop at which the vendor of a remote provider deletes a sandbox by itself, never before the "
        "end of its lease. 0: never. Empty: the provider's setting.",
    )  # fmt: skip
    snapshot_excludes = models.JSONField(
        default=list, blank=True, validators=[check_excludes],
        help_text='Names or patterns excluded from snapshots of /workspace, such as "node_modules", ".venv" or "*.pyc".',
    )  # fmt: skip
    turn_argv = models.JSONField(
        default=default_turn_argv, validators=[check_argv], help_text="Command of a turn. It receives the state on stdin."
    )
    turn_timeout = models.DurationField(null=True, blank=True, help_text="Empty: LEASEHOLD_TURN_TIMEOUT.")
    turn_collection = models.CharField(
        max_length=MAX_NSID_LENGTH, blank=True, validators=[RegexValidator(rf"\A{NSID_PATTERN}\Z", f"Not {NSID_DESCRIPTION}.")],
        help_text="Collection of the agent's AT Protocol repository in which a record of each action is created: an NSID that "
        "the policy lists. Empty: no records.",
    )  # fmt: skip
    pool = models.ForeignKey(
        Pool, on_delete=models.PROTECT, null=True, blank=True, related_name="+", help_text='Empty: the pool "default".'
    )
    cheapest_pool = models.BooleanField(
        default=False, help_text="Try the pools in the order of their hourly price instead of the order of the list."
    )
    policy = models.ForeignKey(
        Policy, on_delete=models.PROTECT, null=True, blank=True, related_name="environment_types",
        help_text="Policy of new sandboxes. Empty: sealed.",
    )  # fmt: skip
    llm_limit = models.DecimalField(
        max_digits=18, decimal_places=9, null=True, blank=True, validators=[MinValueValidator(0)],
        verbose_name="spend limit", help_text="Model-call budget of each new lease, USD. Empty: no limit.",
    )  # fmt: skip
    restricted = models.BooleanField(
        default=False, help_text="Only API keys that list this environment type may acquire leases of it."
    )

    class Meta:
        ordering = ["name"]
        constraints = [
            models.CheckConstraint(
                condition=Q(ttl__gt=timedelta(0)) & Q(max_ttl__gte=F("ttl")),
                name="environmenttype_ttl_within_max",
                violation_error_message="ttl must be greater than 0 and at most max_ttl.",
            ),
        ]

    def __str__(self) -> str:
        return self.name


class AlternativePool(models.Model):
    """Further pool of an environment type, tried after its `pool` and the alternatives with a lower position."""

    environment_type = models.ForeignKey(
        EnvironmentType, on_delete=models.CASCADE, related_name="alternative_pools", db_index=False
    )
    pool = models.ForeignKey(Pool, on_delete=models.PROTECT, related_name="+")
    position = models.PositiveSmallIntegerField(default=0, help_text="Lower positions are tried first.")

    class Meta:
        default_permissions = ()
        ordering = ["position", "pk"]
        constraints = [
            models.UniqueConstraint(
                fields=["environment_type", "pool"], name="alternative_pool_once",
                violation_error_message="A pool may be listed once.",
            ),
        ]  # fmt: skip

    def __str__(self) -> str:
        return f"{self.environment_type}: {self.pool}"

    def clean(self) -> None:
        """Refuse the pool that the environment type tries first."""
        if self.environment_type_id and self.pool_id and self.pool_id == self.environment_type.pool_id:
            raise ValidationError({"pool": "This is the first pool of the environment type."})


class LeaseStatus(models.TextChoices):
    ACTIVE = "active"
    EXPIRED = "expired"  # the lease has ended; its sandbox may still exist
    DESTROYED = "destroyed"  # the provider has confirmed that the sandbox is gone


END_REASONS = ("ttl", "max_ttl", "released", "budget", "operator", "lost", "failed")  # besides condition:<name>


class Lease(models.Model):
    """An agent's right to a sandbox in one environment. Ended leases are kept; a later lease is a new row."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    agent_did = models.CharField(max_length=255, verbose_name="agent")
    environment_id = models.CharField(max_length=200, verbose_name="environment")
    environment_type = models.ForeignKey(EnvironmentType, to_field="name", on_delete=models.PROTECT, related_name="leases")
    pool = models.ForeignKey(
        Pool, on_delete=models.PROTECT, related_name="leases",
        help_text="Pool of the lease's sandbox, or of the last one; before the first one, the first pool that is tried.",
    )  # fmt: skip
    pools = models.JSONField(
        default=list, blank=True,
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
        max_length=32, blank=True, help_text="Instance type whose memory and CPU were requested. Empty: none was named."
    )
    disk_mib = models.PositiveIntegerField(
        null=True, blank=True, help_text="Disk of its sandboxes, MiB, as requested. Empty: that of the vendor."
    )
    gpus = models.PositiveSmallIntegerField(default=0, help_text="Number of GPUs of its sandboxes, as requested.")
    gpu_type = models.CharField(max_length=32, blank=True, help_text="Type of its GPUs, as requested. Empty: any.")
    image = models.CharField(
        max_length=255, blank=True, help_text="Image of its sandboxes, as requested. Empty: that of the pool."
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
    ended_at = models.DateTimeField(null=True, blank=True)
    end_reason = models.CharField(max_length=80, blank=True)
    end_detail = models.CharField(
        max_length=500, blank=True, help_text="Detail of end_reason, such as the budget or the error message."
    )
    forked_from = models.ForeignKey(
        "self", on_delete=models.PROTECT, null=True, blank=True, related_name="+", db_index=False,
        help_text="Source of the fork.",
    )  # fmt: skip
    destroyed_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        default_permissions = ("view",)
        permissions = [("end_lease", "Can end leases")]
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
            models.Index(fields=["agent_did", "-leased_at"], name="lease_agent"),
            models.Index(fields=["environment_id", "-leased_at", "-id"], name="lease_environment"),
            models.Index(fields=["expires_minute"], condition=Q(status="active"), name="lease_expiry"),
            models.Index(fields=["ended_at"], condition=Q(status="expired"), name="lease_to_reclaim"),
        ]

    def __str__(self) -> str:
        return self.sandbox_id

    @property
    def sandbox_id(self) -> str:
        """Sandbox name, the same for successive leases of the agent in the environment."""
        return f"{self.agent_did}::{self.environment_id}"


class LeaseEvent(models.Model):
    """Entry in the timeline of a lease. Kept after the sandbox is destroyed."""

    lease = models.ForeignKey(Lease, on_delete=models.PROTECT, related_name="events", db_index=False)
    at = models.DateTimeField()
    # granted, ended, destroyed, failed, workspace_over_limit, spend_limit, snapshot, restored, forked, pool_skipped
    kind = models.CharField(max_length=32)
    actor = models.CharField(max_length=255, blank=True)
    reason = models.CharField(max_length=500, blank=True)
    pool = models.ForeignKey(
        Pool, on_delete=models.PROTECT, null=True, blank=True, editable=False, related_name="+", db_index=False,
        help_text="Pool that was passed over.",
    )  # fmt: skip
    skip_reason = models.CharField(
        max_length=16, blank=True, choices=SkipReason.choices, editable=False, help_text="Reason for which it was passed over."
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


class TurnManager(models.Manager["Turn"]):
    """Manager of turns that reads the state only at its first use: lists would load up to 64 KiB for each turn."""

    def get_queryset(self) -> models.QuerySet["Turn"]:
        return super().get_queryset().defer("state")


class Turn(models.Model):
    """Turn of a lease. The process that inserts the row plays the turn; a repeated number returns the stored answer."""

    lease = models.ForeignKey(Lease, on_delete=models.PROTECT, related_name="turns", db_index=False)
    number = models.BigIntegerField()
    run = models.OneToOneField(Run, on_delete=models.PROTECT, null=True, blank=True, related_name="turn")
    started_at = models.DateTimeField()
    deadline_at = models.DateTimeField(help_text="Past this time a sweep settles the turn: its worker counts as dead.")
    ended_at = models.DateTimeField(null=True, blank=True)
    skipped = models.BooleanField(default=False)
    answer = models.TextField(blank=True, help_text="Action as JSON text.")
    state = models.TextField(
        blank=True, editable=False,
        help_text="Input as JSON text. Empty: longer than turns.MAX_STATE_BYTES, or past its retention.",
    )  # fmt: skip

    objects = TurnManager()

    class Meta:
        default_permissions = ("view",)
        ordering = ["-started_at", "-pk"]
        constraints = [models.UniqueConstraint(fields=["lease", "number"], name="turn_once")]
        indexes = [models.Index(fields=["started_at"], condition=~Q(state=""), name="turn_with_state")]

    def __str__(self) -> str:
        return f"turn {self.number}"

    @property
    def action(self) -> dict[str, Any]:
        return json.loads(self.answer) if self.answer else {}


class Shell(models.Model):
    """Named working directory and environment of a lease, in which its commands are executed. Outlives the sandbox's sleep."""

    lease = models.ForeignKey(Lease, on_delete=models.CASCADE, related_name="shells", db_index=False)
    name = models.CharField(max_length=100)
    cwd = models.CharField(max_length=4096)
    env_names = models.JSONField(default=list, help_text="Names of the variables.")
    sealed_env = models.BinaryField(editable=False, help_text="Variables as JSON, encrypted by sandboxes.db.encryption.")
    created_at = models.DateTimeField()

    class Meta:
        default_permissions = ("view",)
        ordering = ["name"]
        constraints = [models.UniqueConstraint(fields=["lease", "name"], name="shell_name_once")]

    def __str__(self) -> str:
        return self.name


class IdempotentRequest(models.Model):
    """Stored response to a POST with an Idempotency-Key. A repeated request receives it."""

    key_holder = models.ForeignKey(AgentKey, on_delete=models.CASCADE, related_name="+", db_index=False)
    key = models.CharField(max_length=255)
    fingerprint = models.CharField(max_length=64, help_text="SHA-256 of method, path and body.")
    started_at = models.DateTimeField()
    deadline_at = models.DateTimeField(help_text="Past this time a request without a response counts as abandoned.")
    claimed_by = models.CharField(max_length=64, blank=True, help_text="Control-plane instance that executes the request.")
    expires_at = models.DateTimeField(db_index=True)
    status_code = models.PositiveSmallIntegerField(null=True)
    body = models.TextField(blank=True)

    class Meta:
        default_permissions = ()
        constraints = [models.UniqueConstraint(fields=["key_holder", "key"], name="idempotency_key_once")]

    def __str__(self) -> str:
        return self.key

"""Tables of environment types and their pools."""

from datetime import timedelta
from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models
from django.db.models import F, Q

from sandboxes.call_limits import MAX_TOKENS
from sandboxes.db import durations
from sandboxes.models import Policy, Pool
from sandboxes.models.resource_limits import ResourceLimits
from sandboxes.nsid import MAX_NSID_LENGTH, NSID_DESCRIPTION, NSID_PATTERN

CONDITION_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
CONDITION_DESCRIPTION = "1 to 64 letters, digits and . _ -, the first a letter or digit"

MIN_SUSPEND_AFTER = timedelta(seconds=1)


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
        max_length=MAX_NSID_LENGTH, blank=True, default="", db_default="",
        validators=[RegexValidator(rf"\A{NSID_PATTERN}\Z", f"Not {NSID_DESCRIPTION}.")],
        help_text="Collection of the agent's AT Protocol repository in which a record of each action is created: an NSID that "
        "the policy lists. Empty: no records.",
    )  # fmt: skip
    pool = models.ForeignKey(
        Pool, on_delete=models.PROTECT, null=True, blank=True, related_name="+", help_text='Empty: the pool "default".'
    )
    cheapest_pool = models.BooleanField(
        default=False,
        db_default=False,
        help_text="Try the pools in the order of their hourly price instead of the order of the list.",
    )
    policy = models.ForeignKey(
        Policy, on_delete=models.PROTECT, null=True, blank=True, related_name="environment_types",
        help_text="Policy of new sandboxes. Empty: sealed.",
    )  # fmt: skip
    llm_limit = models.DecimalField(
        max_digits=18, decimal_places=9, null=True, blank=True, validators=[MinValueValidator(0)],
        verbose_name="spend limit", help_text="Model-call budget of each new lease, USD. Empty: no limit.",
    )  # fmt: skip
    llm_token_limit = models.BigIntegerField(
        null=True, blank=True, validators=[MinValueValidator(0), MaxValueValidator(MAX_TOKENS)],
        verbose_name="token limit",
        help_text="Input and output tokens of the model calls of each new lease. Empty: no limit.",
    )  # fmt: skip
    open_to_project = models.BooleanField(
        default=False, db_default=False,
        help_text="Every agent of the project may enter a new environment of this type, as in a game. Otherwise only the "
        "agents that are named, or the agent whose lease creates the environment.",
    )  # fmt: skip
    restricted = models.BooleanField(
        default=False, db_default=False, help_text="Only API keys that list this environment type may acquire leases of it."
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

"""Budgets, and tabs: the budget-relevant attributes of leases."""

import re
from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import uuid4
from zoneinfo import available_timezones

from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator
from django.db import models
from django.db.models import Q, Value
from django.utils import timezone

from sandboxes.db.message_fields import MessageField

DEFAULT_PROJECT_NAME = "default"  # its row is of leases.projects, which billing does not import
MIN_BUDGET_AMOUNT = Decimal("0.000001")
MAX_WARN_PERCENTS = 10
UTC_ZONE_NAME = "UTC"
MODEL_PATTERN = re.compile(r"[^\s\0\[\]\\]+")


def get_default_warn_percents() -> list[int]:
    return [50, 80, 100]


def validate_warn_percents(value: Any) -> None:
    """Raise ValidationError unless the value is an ascending list of at most MAX_WARN_PERCENTS percentages."""
    is_list = isinstance(value, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in value)
    if not is_list or any(not 1 <= each <= 100 for each in value):
        raise ValidationError("Enter whole numbers from 1 to 100.")
    if value != sorted({*value}) or len(value) > MAX_WARN_PERCENTS:
        raise ValidationError(f"Enter at most {MAX_WARN_PERCENTS} different numbers in ascending order.")


def validate_time_zone(value: str) -> None:
    if value not in available_timezones():
        raise ValidationError("Enter the name of a time zone of the IANA database, such as Europe/Berlin.")


def validate_model_pattern(value: str) -> None:
    if not MODEL_PATTERN.fullmatch(value):
        raise ValidationError("Enter the name of a model, or a pattern with * and ?, without spaces, brackets and backslashes.")


def validate_amount(unit: str, amount: Any) -> None:
    """Raise ValidationError if an amount of tokens is not a whole number. The field refuses what is no number."""
    is_number = isinstance(amount, Decimal) and amount.is_finite()
    if unit == Unit.TOKENS and is_number and amount != amount.to_integral_value():
        raise ValidationError({"amount": "Enter a whole number of tokens."})


class Scope(models.TextChoices):
    """Leases that a budget applies to."""

    ALL = "all", "everything"
    AGENT = "agent"
    KEY = "key", "API key"
    ENVIRONMENT_TYPE = "environment_type", "environment type"
    ACCOUNT = "account"
    PROJECT = "project"


class Unit(models.TextChoices):
    USD = "usd", "USD"
    HOURS = "hours", "sandbox-hours"
    TOKENS = "tokens", "model tokens"


class Period(models.TextChoices):
    """Calendar hour in UTC, day, ISO week or month in the budget's time zone, or a lifetime (`ever`), which does not reset."""

    HOUR = "hour"
    DAY = "day"
    WEEK = "week"
    MONTH = "month"
    EVER = "ever"


class Budget(models.Model):
    """Spending limit per period. A hard budget refuses and ends leases once it is exhausted; a soft budget only warns.

    The spending and the marks of warnings and exhaustion are written by budgets.update_spending, from usage and costs. A
    change of a field in budgets.updates.GRACE_RESET_FIELDS clears the mark of exhaustion."""

    scope = models.CharField(max_length=16, choices=Scope.choices)
    subject = models.CharField(
        max_length=255, blank=True,
        help_text="DID, API key id, environment type, account or project name. Empty if the scope is everything.",
    )  # fmt: skip
    model = models.CharField(
        max_length=200, blank=True, default="", db_default="", validators=[validate_model_pattern],
        help_text="Only model calls of this model or pattern, such as claude-opus*. Empty: sandboxes and all model calls.",
    )  # fmt: skip
    unit = models.CharField(max_length=8, choices=Unit.choices)
    amount = models.DecimalField(max_digits=18, decimal_places=6, validators=[MinValueValidator(MIN_BUDGET_AMOUNT)])
    period = models.CharField(max_length=5, choices=Period.choices)
    time_zone = models.CharField(
        max_length=63, default=UTC_ZONE_NAME, db_default=UTC_ZONE_NAME, validators=[validate_time_zone],
        help_text="IANA name of the time zone in which days, weeks and months begin, such as Europe/Berlin.",
    )  # fmt: skip
    hard = models.BooleanField(
        default=True, help_text="Refuse new leases and end active ones once the budget is exhausted. A soft budget only warns."
    )
    warn_percents = models.JSONField(
        default=get_default_warn_percents, db_default=Value(get_default_warn_percents(), models.JSONField()), blank=True,
        validators=[validate_warn_percents], help_text="Send a warning at these percentages, in ascending order.",
    )  # fmt: skip
    grace = models.DurationField(
        default=timedelta(minutes=5),
        help_text="Time that running work may continue after exhaustion, before its lease is ended.",
    )
    created_at = models.DateTimeField(default=timezone.now, editable=False)  # noqa: TID251 - decides nothing
    active = models.BooleanField(default=True)
    spent = models.DecimalField(max_digits=24, decimal_places=9, default=Decimal(0), editable=False)
    calls_spent = models.DecimalField(
        max_digits=24, decimal_places=9, default=Decimal(0), db_default=Decimal(0), editable=False,
        help_text="Part of the amount spent that is model calls.",
    )  # fmt: skip
    calls_before = models.DecimalField(
        max_digits=24, decimal_places=9, default=Decimal(0), db_default=Decimal(0), editable=False,
        help_text="Cost or tokens of the model calls of the period before the day `calls_day`.",
    )  # fmt: skip
    calls_day = models.DateField(null=True, blank=True, editable=False)
    calls_metered = models.BigIntegerField(
        default=0, db_default=0, editable=False,
        help_text="Metered model calls of the day `calls_day` and later, in billionths of USD or in tokens.",
    )  # fmt: skip
    calls_metered_mark = models.BigIntegerField(
        null=True, blank=True, editable=False,
        help_text="Id of the newest usage record of model calls in `calls_metered`. Empty: to be summed again.",
    )  # fmt: skip
    reserved = models.DecimalField(
        max_digits=24, decimal_places=9, default=Decimal(0), db_default=Decimal(0), editable=False,
        help_text="Reservation of the running sandboxes at the last update.",
    )  # fmt: skip
    unpriced = models.PositiveBigIntegerField(
        default=0, db_default=0, editable=False,
        help_text="Number of model calls without a price, which the amount spent does not include.",
    )  # fmt: skip
    estimated_usd = models.DecimalField(
        max_digits=18, decimal_places=9, default=Decimal(0), db_default=Decimal(0), editable=False,
        help_text="Estimated part of the amount spent, of a budget in USD.",
    )  # fmt: skip
    estimated_tokens = models.BigIntegerField(
        default=0, db_default=0, editable=False, help_text="Estimated part of the amount spent, of a budget in tokens."
    )
    spent_at = models.DateTimeField(null=True, blank=True, editable=False, help_text="Last update of the amount spent.")
    period_began = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="Start of the period of the amount spent."
    )
    warned_percent = models.PositiveSmallIntegerField(
        null=True, blank=True, editable=False, help_text="Highest percentage of which a warning was sent in that period."
    )
    warned_for = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="Start of the period in which the warning was sent."
    )
    exhausted_for = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="Start of the period in which the budget was exhausted."
    )
    exhausted_at = models.DateTimeField(null=True, blank=True, editable=False)
    topped_up = models.DecimalField(
        max_digits=18, decimal_places=6, default=Decimal(0), db_default=Decimal(0), editable=False,
        help_text="Sum of the top-ups of the period that began at `topped_up_for`.",
    )  # fmt: skip
    topped_up_for = models.DateTimeField(null=True, blank=True, editable=False)
    request_id = models.UUIDField(
        null=True, blank=True, unique=True, editable=False, help_text="API request that created the budget, if one did."
    )

    class Meta:
        ordering = ["pk"]
        constraints = [
            models.CheckConstraint(condition=Q(amount__gt=0), name="budget_positive"),
            models.CheckConstraint(
                condition=Q(scope__in=Scope.values, unit__in=Unit.values, period__in=Period.values), name="budget_known"
            ),
            models.CheckConstraint(
                condition=Q(scope="all", subject="") | (~Q(scope="all") & ~Q(subject="")),
                name="budget_has_its_subject",
                violation_error_message="Leave the subject empty for a budget on everything. Every other scope requires one.",
            ),
            models.CheckConstraint(
                condition=Q(model="") | Q(unit__in=["usd", "tokens"]),
                name="budget_of_model_counts_calls",
                violation_error_message="A budget for a model is in USD or tokens: model calls have no sandbox-hours.",
            ),
            models.CheckConstraint(
                condition=Q(grace__gte=timedelta(0)),
                name="budget_grace",
                violation_error_message="The grace period must not be negative.",
            ),
        ]
        indexes = [
            models.Index(fields=["scope", "subject"], condition=Q(active=True, hard=True), name="budget_admission"),
            models.Index(
                fields=["exhausted_at"],
                condition=Q(exhausted_at__isnull=False, active=True, hard=True),
                name="budget_exhausted",
            ),
        ]

    def __str__(self) -> str:
        period_suffix = (
            " (lifetime)" if self.period == Period.EVER else f" {'an' if self.period == Period.HOUR else 'a'} {self.period}"
        )
        amount = f"{self.amount:,.0f}" if self.unit == Unit.TOKENS else f"{self.amount.normalize():f}"
        zone = "" if self.time_zone == UTC_ZONE_NAME else f" ({self.time_zone})"
        return f"{amount} {self.unit_label}{period_suffix}{zone} for {self.subject_label}"

    @property
    def subject_label(self) -> str:
        model = f"model {self.model}" if self.model else ""
        if self.scope == Scope.ALL:
            return model or "everything"
        return ", ".join(filter(None, [f"{Scope(self.scope).label.lower()} {self.subject}", model]))

    @property
    def unit_label(self) -> str:
        return "USD" if self.unit == Unit.USD else str(self.unit)

    @property
    def counts_calls_alone(self) -> bool:
        """The budget counts and refuses model calls, and leaves sandboxes and leases alone."""
        return bool(self.model) or self.unit == Unit.TOKENS

    def clean(self) -> None:
        validate_amount(self.unit, self.amount)
        if self.scope == Scope.KEY and not self.subject.isdecimal():
            raise ValidationError({"subject": "Enter the numeric id of an API key."})


class BudgetTopUp(models.Model):
    """Amount that an operator added to one period of a budget. Never changed; it expires with the period."""

    id = models.UUIDField(primary_key=True, default=uuid4, editable=False, help_text="Also identifies a repeated request.")
    budget = models.ForeignKey(Budget, on_delete=models.CASCADE, related_name="top_ups", editable=False)
    period_began = models.DateTimeField(editable=False, help_text="Start of the period that the amount is added to.")
    amount = models.DecimalField(
        max_digits=18, decimal_places=6, validators=[MinValueValidator(MIN_BUDGET_AMOUNT)], editable=False
    )
    note = MessageField(max_length=300, blank=True, editable=False)
    actor = MessageField(max_length=200, editable=False)
    created_at = models.DateTimeField(editable=False)

    class Meta:
        verbose_name = "top-up"
        default_permissions = ()
        ordering = ["-created_at", "-pk"]
        constraints = [models.CheckConstraint(condition=Q(amount__gt=0), name="topup_positive")]

    def __str__(self) -> str:
        return f"{self.amount.normalize():f} of budget {self.budget_id}"

    def clean(self) -> None:
        validate_amount(self.budget.unit, self.amount)


class Tab(models.Model):
    """Budget-relevant attributes of a lease. Opened in the transaction that grants the lease, closed in the one that ends it.

    `holder` is the lease's id. Billing does not import the lease itself."""

    holder = models.UUIDField(primary_key=True)
    agent_did = models.CharField(max_length=255, verbose_name="agent")
    environment_type = models.CharField(max_length=63)
    key_id = models.CharField(
        max_length=20,
        blank=True,
        help_text="Id of the API key that acquired the lease. Empty if it was acquired without a key.",
    )
    project = models.CharField(
        max_length=63, default=DEFAULT_PROJECT_NAME, db_default=DEFAULT_PROJECT_NAME, help_text="Name of the agent's project."
    )
    opened_at = models.DateTimeField()
    closed_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        default_permissions = ()
        indexes = [
            models.Index(fields=["agent_did"], condition=Q(closed_at__isnull=True), name="tab_agent_open"),
            models.Index(fields=["key_id"], condition=Q(closed_at__isnull=True), name="tab_key_open"),
            models.Index(fields=["environment_type"], condition=Q(closed_at__isnull=True), name="tab_type_open"),
            models.Index(fields=["project"], condition=Q(closed_at__isnull=True), name="tab_project_open"),
            models.Index(fields=["key_id"], name="tab_key"),
            models.Index(fields=["environment_type"], name="tab_type"),
            models.Index(fields=["project"], name="tab_project"),
        ]

    def __str__(self) -> str:
        return str(self.holder)

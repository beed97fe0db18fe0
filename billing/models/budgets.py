"""Budgets, and tabs: the budget-relevant attributes of leases."""

from datetime import timedelta
from decimal import Decimal

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.db.models import Q
from django.utils import timezone

DEFAULT_PROJECT_NAME = "default"  # its row is of leases.projects, which billing does not import
MIN_BUDGET_AMOUNT = Decimal("0.000001")


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


class Period(models.TextChoices):
    """UTC calendar hour, day or month, or a lifetime (`ever`), which does not reset."""

    HOUR = "hour"
    DAY = "day"
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
    unit = models.CharField(max_length=5, choices=Unit.choices)
    amount = models.DecimalField(max_digits=15, decimal_places=6, validators=[MinValueValidator(MIN_BUDGET_AMOUNT)])
    period = models.CharField(max_length=5, choices=Period.choices)
    hard = models.BooleanField(
        default=True, help_text="Refuse new leases and end active ones once the budget is exhausted. A soft budget only warns."
    )
    warn_percent = models.PositiveSmallIntegerField(
        default=80, validators=[MinValueValidator(1), MaxValueValidator(100)], help_text="Send a warning at this percentage."
    )
    grace = models.DurationField(
        default=timedelta(minutes=5),
        help_text="Time that running work may continue after exhaustion, before its lease is ended.",
    )
    created_at = models.DateTimeField(default=timezone.now, editable=False)  # noqa: TID251 - decides nothing
    active = models.BooleanField(default=True)
    spent = models.DecimalField(max_digits=18, decimal_places=9, default=Decimal(0), editable=False)
    calls_spent = models.DecimalField(
        max_digits=18, decimal_places=9, default=Decimal(0), db_default=Decimal(0), editable=False,
        help_text="Part of the amount spent that is model calls.",
    )  # fmt: skip
    calls_before = models.DecimalField(
        max_digits=18, decimal_places=9, default=Decimal(0), db_default=Decimal(0), editable=False,
        help_text="Cost of the model calls of the period before the day `calls_day`.",
    )  # fmt: skip
    calls_day = models.DateField(null=True, blank=True, editable=False)
    reserved = models.DecimalField(
        max_digits=18, decimal_places=9, default=Decimal(0), db_default=Decimal(0), editable=False,
        help_text="Reservation of the running sandboxes at the last update.",
    )  # fmt: skip
    unpriced = models.PositiveBigIntegerField(
        default=0, db_default=0, editable=False,
        help_text="Number of model calls without a price, which the amount spent does not include.",
    )  # fmt: skip
    estimated_usd = models.DecimalField(
        max_digits=18, decimal_places=9, default=Decimal(0), db_default=Decimal(0), editable=False,
        help_text="Estimated part of the amount spent.",
    )  # fmt: skip
    spent_at = models.DateTimeField(null=True, blank=True, editable=False, help_text="Last update of the amount spent.")
    period_began = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="Start of the period of the amount spent."
    )
    warned_for = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="Start of the period in which the warning was sent."
    )
    exhausted_for = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="Start of the period in which the budget was exhausted."
    )
    exhausted_at = models.DateTimeField(null=True, blank=True, editable=False)

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
            models.CheckConstraint(condition=Q(warn_percent__gte=1, warn_percent__lte=100), name="budget_warns_in_time"),
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
        amount = f"{self.amount.normalize():f}"
        return f"{amount} {'USD' if self.unit == Unit.USD else 'hours'}{period_suffix} for {self.subject_label}"

    @property
    def subject_label(self) -> str:
        return "everything" if self.scope == Scope.ALL else f"{Scope(self.scope).label.lower()} {self.subject}"

    def clean(self) -> None:
        if self.scope == Scope.KEY and not self.subject.isdecimal():
            raise ValidationError({"subject": "Enter the numeric id of an API key."})


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

"""Credits and statements: append-only rows. A correction is a further row."""

from collections.abc import Iterable
from decimal import Decimal
from typing import Any, NoReturn, TypeVar

from django.core.exceptions import ValidationError
from django.db import models
from django.db.models import F, Q, QuerySet, Value
from django.db.models.functions import Coalesce
from django.db.models.lookups import Exact

from billing.uncertainty import Uncertainty
from sandboxes.db.expressions import DayOfMonth
from sandboxes.db.message_fields import MessageField

__all__ = ["AppendOnlyModel", "Credit", "Statement", "StatementCharge", "StatementLine"]
RowT = TypeVar("RowT", bound="AppendOnlyModel")


class AppendOnlyQuerySet(QuerySet[RowT]):
    """Query set without bulk changes."""

    def update(self, **values: Any) -> NoReturn:
        raise ValidationError("Credits and statements cannot be changed.")

    def delete(self) -> NoReturn:
        raise ValidationError("Credits and statements cannot be deleted.")

    def bulk_update(self, objs: Iterable[Any], fields: Any, batch_size: int | None = None) -> NoReturn:
        raise ValidationError("Credits and statements cannot be changed.")

    delete.alters_data = delete.queryset_only = True  # type: ignore[attr-defined]


class AppendOnlyModel(models.Model):
    """Abstract append-only model."""

    objects = AppendOnlyQuerySet.as_manager()

    class Meta:
        abstract = True

    def save(self, *args: Any, **options: Any) -> None:
        """Insert the row. Raise ValidationError if it exists."""
        if not self._state.adding:
            raise ValidationError("Credits and statements cannot be changed.")
        super().save(*args, **{**options, "force_insert": True})

    def delete(self, *args: Any, **options: Any) -> NoReturn:
        raise ValidationError("Credits and statements cannot be deleted.")


class Credit(AppendOnlyModel):
    """Prepaid money that statements use up before anything is due. A reversal takes back the remainder of a credit."""

    class Kind(models.TextChoices):
        GRANT = "grant", "grant"
        REVERSAL = "reversal", "reversal"

    account = models.ForeignKey("billing.Account", on_delete=models.PROTECT, related_name="credits", db_index=False)
    kind = models.CharField(max_length=8, choices=Kind.choices, default=Kind.GRANT)
    usd = models.DecimalField("USD", max_digits=15, decimal_places=2, help_text="Negative for a reversal.")
    at = models.DateTimeField()
    reason = MessageField(max_length=200)
    actor = MessageField(max_length=255, verbose_name="by")
    reversed = models.OneToOneField(
        "self",
        on_delete=models.PROTECT,
        null=True,
        blank=True,
        related_name="reversal",
        help_text="Credit that this reversal takes back.",
    )

    class Meta:
        default_permissions = ("view", "add")
        ordering = ["-at", "-pk"]
        constraints = [
            models.CheckConstraint(
                condition=Q(kind="grant", usd__gt=0, reversed__isnull=True)
                | Q(kind="reversal", usd__lt=0, reversed__isnull=False),
                name="credit_kind",
            )
        ]
        indexes = [models.Index(fields=["account", "at"], name="credit_account")]

    def __str__(self) -> str:
        return f"{self.usd} USD for {self.account}"


class Statement(AppendOnlyModel):
    """Amount due by one account for one calendar month (UTC), fixed when the month is closed. A negative total is a refund."""

    account = models.ForeignKey("billing.Account", on_delete=models.PROTECT, related_name="statements", db_index=False)
    month = models.DateField(help_text="First day of the month.")
    closed_at = models.DateTimeField()
    closed_by = MessageField(max_length=255)
    subtotal = models.DecimalField(max_digits=15, decimal_places=2, help_text="Sum of the lines.")
    unpriced = models.BigIntegerField(default=0, db_default=0, help_text="Number of the month's model calls without a price.")
    estimated_usd = models.DecimalField(
        "estimated, USD", max_digits=15, decimal_places=2, default=Decimal(0), db_default=Decimal(0),
        help_text="Estimated part of the month's usage.",
    )  # fmt: skip
    credit_used = models.DecimalField(max_digits=15, decimal_places=2)
    total = models.DecimalField(max_digits=15, decimal_places=2)
    has_charges = models.BooleanField(
        default=False, db_default=False, editable=False,
        help_text="The charges of its lines are stored. Not on statements of earlier versions.",
    )  # fmt: skip

    class Meta:
        default_permissions = ("view",)
        permissions = [("close_statement", "Can close months")]
        ordering = ["-month", "account"]
        constraints = [
            models.UniqueConstraint(fields=["account", "month"], name="statement_once"),
            models.CheckConstraint(condition=Exact(DayOfMonth("month"), 1), name="statement_of_a_month"),
            models.CheckConstraint(
                condition=Q(credit_used=0) | Q(credit_used__gt=0, credit_used__lte=F("subtotal")), name="statement_credit"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.account} {self.month:%Y-%m}"

    @property
    def uncertainty(self) -> str:
        """Estimated part of the month's usage, and calls without a price, as text. Empty if there are none."""
        return str(Uncertainty(self.unpriced, self.estimated_usd))


class StatementLine(AppendOnlyModel):
    """Cost of one agent's use of one item at one provider in one month by one rate, rounded to cents.

    usd = (quantity - free) x rate, rounded half up. A correction is the difference between that cost and the sum on earlier
    statements. Lines of statements closed before lines had a rate, and lines of model calls, have none. Each model has its
    own line."""

    class Kind(models.TextChoices):
        USAGE = "usage", "usage"
        CORRECTION = "correction", "correction"

    statement = models.ForeignKey(Statement, on_delete=models.PROTECT, related_name="lines", db_index=False)
    kind = models.CharField(max_length=10, choices=Kind.choices)
    for_month = models.DateField(help_text="First day of the month of use.")
    agent_did = models.CharField(max_length=255, blank=True, verbose_name="agent")
    provider = models.CharField(max_length=32, blank=True)
    item = models.CharField(max_length=8)
    model = models.CharField(
        max_length=200, blank=True, default="", db_default="",
        help_text="Of model calls. Empty: a line of all models, as on statements closed before lines had a model.",
    )  # fmt: skip
    quantity = models.DecimalField(max_digits=18, decimal_places=9, help_text="In units of the item.")
    free = models.DecimalField(
        max_digits=18,
        decimal_places=9,
        default=Decimal(0),
        db_default=Decimal(0),
        help_text="Part of the quantity within the allowance.",
    )
    rate = models.ForeignKey(
        "billing.Rate", on_delete=models.PROTECT, null=True, blank=True, related_name="+", help_text="Empty for model calls."
    )
    usd = models.DecimalField("USD", max_digits=15, decimal_places=2)
    unpriced = models.BigIntegerField(default=0, db_default=0, help_text="Number of model calls without a price.")
    estimated_usd = models.DecimalField(
        "estimated, USD", max_digits=15, decimal_places=2, default=Decimal(0), db_default=Decimal(0),
        help_text="Estimated part of the amount.",
    )  # fmt: skip
    input_tokens = models.BigIntegerField(
        default=0, db_default=0, help_text="Includes tokens read from and written to the cache."
    )
    cached_tokens = models.BigIntegerField(default=0, db_default=0)
    cache_written_tokens = models.BigIntegerField(default=0, db_default=0)
    output_tokens = models.BigIntegerField(default=0, db_default=0)
    estimated_tokens = models.BigIntegerField(
        null=True, blank=True,
        help_text="Estimated tokens, beside those that the upstreams reported. Empty: on statements of earlier versions.",
    )  # fmt: skip

    class Meta:
        default_permissions = ("view",)
        ordering = ["-for_month", "agent_did", "provider", "item", "model", "rate_id"]
        constraints = [
            models.UniqueConstraint(
                "statement", "for_month", "agent_did", "provider", "item", "model",
                Coalesce("rate", Value(0), output_field=models.BigIntegerField()),
                name="statement_line_once",
            ),
            models.CheckConstraint(
                condition=Q(kind="correction") | Q(quantity__gte=0, usd__gte=0), name="statement_usage_positive"
            ),
        ]  # fmt: skip

    def __str__(self) -> str:
        return f"{self.item} in {self.for_month:%Y-%m}: {self.usd} USD"


class StatementCharge(AppendOnlyModel):
    """Part of a line of usage: cost of one lease on one day, as it was when the month was closed.

    The amounts are not rounded to cents: the line has the rounding of their sum. Agent, provider, item, model and rate are
    those of the line. Lines of corrections have no charges."""

    line = models.ForeignKey(StatementLine, on_delete=models.PROTECT, related_name="charges")
    day = models.DateField()
    environment_id = models.CharField(max_length=200, blank=True)
    environment_type = models.CharField(max_length=63, blank=True)
    holder = models.UUIDField(null=True, blank=True, help_text="Lease id. Empty for sandboxes without a lease and for plans.")
    project = models.CharField(max_length=63, blank=True)
    quantity = models.DecimalField(max_digits=18, decimal_places=9, help_text="In units of the item.")
    free = models.DecimalField(
        max_digits=18, decimal_places=9, default=Decimal(0), help_text="Part of the quantity within the allowance."
    )
    usd = models.DecimalField("USD", max_digits=18, decimal_places=9)
    unpriced = models.BigIntegerField(default=0, help_text="Number of model calls without a price.")
    estimated_usd = models.DecimalField(
        "estimated, USD", max_digits=18, decimal_places=9, default=Decimal(0), help_text="Estimated part of the cost."
    )
    input_tokens = models.BigIntegerField(default=0, help_text="Includes tokens read from and written to the cache.")
    cached_tokens = models.BigIntegerField(default=0)
    cache_written_tokens = models.BigIntegerField(default=0)
    output_tokens = models.BigIntegerField(default=0)
    estimated_tokens = models.BigIntegerField(
        default=0, help_text="Estimated tokens, beside those that the upstreams reported."
    )

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.day}: {self.usd} USD"

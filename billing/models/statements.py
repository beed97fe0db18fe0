"""What accounts were billed: credits and statements. Rows are added and never changed; others put right what was wrong."""

from collections.abc import Iterable
from typing import Any, NoReturn, TypeVar

from django.core.exceptions import ValidationError
from django.db import models
from django.db.models import F, Q, QuerySet

__all__ = ["Credit", "Frozen", "Statement", "StatementLine"]
RowT = TypeVar("RowT", bound="Frozen")


class AppendOnlyQuerySet(QuerySet[RowT]):
    """Rows that are read, and added to."""

    def update(self, **values: Any) -> NoReturn:
        raise ValidationError("What was booked stays as it is.")

    def delete(self) -> NoReturn:
        raise ValidationError("What was booked stays.")

    def bulk_update(self, objs: Iterable[Any], fields: Any, batch_size: int | None = None) -> NoReturn:
        raise ValidationError("What was booked stays as it is.")

    delete.alters_data = delete.queryset_only = True  # type: ignore[attr-defined]


class Frozen(models.Model):
    """A row that is written once."""

    objects = AppendOnlyQuerySet.as_manager()

    class Meta:
        abstract = True

    def save(self, *args: Any, **options: Any) -> None:
        """ValidationError for one that is there already."""
        if not self._state.adding:
            raise ValidationError("What was booked stays as it is.")
        super().save(*args, **{**options, "force_insert": True})

    def delete(self, *args: Any, **options: Any) -> NoReturn:
        raise ValidationError("What was booked stays.")


class Credit(Frozen):
    """Money that an account's statements use up before anything is to be paid. A reversal takes back what is left of one."""

    class Kind(models.TextChoices):
        GRANT = "grant", "granted"
        REVERSAL = "reversal", "taken back"

    account = models.ForeignKey("billing.Account", on_delete=models.PROTECT, related_name="credits")
    kind = models.CharField(max_length=8, choices=Kind.choices, default=Kind.GRANT)
    usd = models.DecimalField("USD", max_digits=15, decimal_places=2, help_text="Below 0 for what is taken back.")
    at = models.DateTimeField()
    reason = models.CharField(max_length=200)
    actor = models.CharField(max_length=255, verbose_name="by")
    reversed = models.OneToOneField(
        "self", on_delete=models.PROTECT, null=True, blank=True, related_name="reversal", help_text="The credit taken back."
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


class Statement(Frozen):
    """What one account owes for one calendar month, UTC, as it was when it was closed. A total below 0 is money back."""

    account = models.ForeignKey("billing.Account", on_delete=models.PROTECT, related_name="statements")
    month = models.DateField(help_text="Its first day.")
    closed_at = models.DateTimeField()
    closed_by = models.CharField(max_length=255)
    subtotal = models.DecimalField(max_digits=15, decimal_places=2, help_text="The sum of its lines.")
    credit_used = models.DecimalField(max_digits=15, decimal_places=2)
    total = models.DecimalField(max_digits=15, decimal_places=2)

    class Meta:
        default_permissions = ("view",)
        permissions = [("close_statement", "Can close months")]
        ordering = ["-month", "account"]
        constraints = [
            models.UniqueConstraint(fields=["account", "month"], name="statement_once"),
            models.CheckConstraint(condition=Q(month__day=1), name="statement_of_a_month"),
            models.CheckConstraint(
                condition=Q(credit_used=0) | Q(credit_used__gt=0, credit_used__lte=F("subtotal")), name="statement_credit"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.account} {self.month:%Y-%m}"


class StatementLine(Frozen):
    """What an agent used of one item at one provider in a month, in cents: or how much more or less that was than statements
    said before."""

    class Kind(models.TextChoices):
        USAGE = "usage", "usage"
        CORRECTION = "correction", "correction"

    statement = models.ForeignKey(Statement, on_delete=models.PROTECT, related_name="lines")
    kind = models.CharField(max_length=10, choices=Kind.choices)
    for_month = models.DateField(help_text="The first day of the month in which it was used.")
    agent_did = models.CharField(max_length=255, blank=True, verbose_name="agent")
    provider = models.CharField(max_length=32, blank=True)
    item = models.CharField(max_length=8)
    quantity = models.DecimalField(max_digits=18, decimal_places=9, help_text="In the unit of the item.")
    usd = models.DecimalField("USD", max_digits=15, decimal_places=2)

    class Meta:
        default_permissions = ("view",)
        ordering = ["-for_month", "agent_did", "provider", "item"]
        constraints = [
            models.UniqueConstraint(
                fields=["statement", "for_month", "agent_did", "provider", "item"], name="statement_line_once"
            ),
            models.CheckConstraint(
                condition=Q(kind="correction") | Q(quantity__gte=0, usd__gte=0), name="statement_usage_positive"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.item} in {self.for_month:%Y-%m}: {self.usd} USD"

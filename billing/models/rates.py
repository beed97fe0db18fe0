"""Priced items and their dated rates."""

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator
from django.db import models, transaction
from django.db.models import Q

from billing.models.usage import Unpriced, UsageRecord
from sandboxes.db import database_time
from sandboxes.db.message_fields import MessageField

MAX_RATE_DIGITS = 15  # significant digits; SQLite stores no more


class BillableItem(models.TextChoices):
    """Priced items. The label is the unit of quantities and rates."""

    TIME = "time", "sandbox-hours"
    MEMORY = "memory", "GiB-hours of memory"
    CPU = "cpu", "vCPU-minutes"
    DISK = "disk", "GB-hours of disk"
    GPU = "gpu", "GPU-hours"
    SUSPENSION = "suspend", "GiB-hours of suspended memory"
    STORAGE = "storage", "GB-months of storage"
    REQUEST = "request", "requests (runs)"
    PLAN = "plan", "months of a plan"
    LLM = "llm", "model calls"


class Rate(models.Model):
    """Price per unit of an item at a provider, from `valid_from` on.

    A rate that has begun never changes. A new price is a new row with a later start, so earlier usage keeps its price."""

    provider = models.SlugField(max_length=32, db_index=False)
    instance_type = models.CharField(
        max_length=32, blank=True, help_text="For example basic, or the type of a GPU. Empty for all."
    )
    item = models.CharField(max_length=8, choices=[choice for choice in BillableItem.choices if choice[0] != BillableItem.LLM])
    usd = models.DecimalField(
        "USD", max_digits=18, decimal_places=12, validators=[MinValueValidator(Decimal(0))], help_text="USD per unit."
    )
    allowance = models.DecimalField(
        max_digits=15, decimal_places=6, default=Decimal(0), validators=[MinValueValidator(Decimal(0))],
        help_text="Free units per account and calendar month (UTC).",
    )  # fmt: skip
    valid_from = models.DateTimeField(help_text="Applies to usage from this time on.")
    source = MessageField(max_length=300, blank=True, help_text="Source of the price, such as a price page.")
    own = models.BooleanField("set your own", default=False, help_text="Placeholder of 0: add a rate with your own price.")
    by_use = models.BooleanField(
        default=False, help_text="CPU and memory only: charge measured use where available, not allocated resources."
    )  # fmt: skip

    class Meta:
        ordering = ["provider", "item", "instance_type", "-valid_from"]
        constraints = [
            models.UniqueConstraint(fields=["provider", "instance_type", "item", "valid_from"], name="rate_once"),
            models.CheckConstraint(
                condition=Q(usd__gte=0, allowance__gte=0),
                name="rate_positive",
                violation_error_message="A rate must not be negative.",
            ),
            models.CheckConstraint(
                condition=Q(by_use=False) | Q(item__in=["cpu", "memory"]),
                name="rate_by_use",
                violation_error_message="Only CPU and memory can be charged by use.",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.provider} {self.instance_type} {self.item}".replace("  ", " ")

    def clean(self) -> None:
        """Refuse to change a rate that has begun and to backdate a rate: that usage has been priced."""
        stored = Rate.objects.filter(pk=self.pk).first() if self.pk else None
        if stored and stored.valid_from <= database_time.now():
            raise ValidationError("This rate has begun and cannot change. Add a rate that begins later.")
        if self.valid_from and self.valid_from < get_earliest_start(database_time.now()):
            raise ValidationError({"valid_from": "A rate cannot begin in the past: usage until now has been priced."})
        if isinstance(self.usd, Decimal) and len(self.usd.normalize().as_tuple().digits) > MAX_RATE_DIGITS:
            raise ValidationError({"usd": f"At most {MAX_RATE_DIGITS} digits."})

    def save(self, *args: Any, **options: Any) -> None:
        """Save the rate and mark the usage from its start on as unpriced. Raise ValidationError if it has begun."""
        self.full_clean()
        with transaction.atomic():
            super().save(*args, **options)
            since = self.valid_from.astimezone(UTC).date()
            Unpriced.note(UsageRecord.objects.filter(day__gte=since).order_by().values_list("day", flat=True).distinct())

    def delete(self, *args: Any, **options: Any) -> tuple[int, dict[str, int]]:
        """Delete a rate that has not begun. Raise ValidationError if the stored row has begun."""
        with transaction.atomic():
            stored = Rate.objects.select_for_update().filter(pk=self.pk).first()
            if stored and stored.valid_from <= database_time.now():
                raise ValidationError("This rate has begun and cannot be deleted.")
            return super().delete(*args, **options)


def get_earliest_start(now: datetime) -> datetime:
    """Return the earliest start of a new rate. Usage up to now has been priced, or is being priced."""
    return now

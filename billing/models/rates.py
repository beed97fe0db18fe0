"""Priced items and their dated rates."""

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator
from django.db import models, transaction
from django.db.models import Q
from django.utils import timezone

from billing.models.usage import Unpriced, UsageRecord

MAX_RATE_DIGITS = 15  # of a number: SQLite keeps no more


class BillableItem(models.TextChoices):
    """What rates and costs are for, and in which unit."""

    TIME = "time", "sandbox-hours"
    MEMORY = "memory", "GiB-hours of memory"
    CPU = "cpu", "vCPU-minutes"
    DISK = "disk", "GB-hours of disk"
    STORAGE = "storage", "GB-months of storage"
    REQUEST = "request", "requests (runs)"
    PLAN = "plan", "months of a plan"
    LLM = "llm", "model calls"


class Rate(models.Model):
    """What one unit costs at a provider from a moment on. One that has begun never changes: a new price is a new row, which
    begins later, and nothing before it costs something else."""

    provider = models.SlugField(max_length=32)
    instance_type = models.CharField(max_length=32, blank=True, help_text="Such as basic. Empty: of any.")
    item = models.CharField(max_length=8, choices=[choice for choice in BillableItem.choices if choice[0] != BillableItem.LLM])
    usd = models.DecimalField(
        "USD", max_digits=18, decimal_places=12, validators=[MinValueValidator(Decimal(0))], help_text="For one unit."
    )
    allowance = models.DecimalField(
        max_digits=15, decimal_places=6, default=Decimal(0), validators=[MinValueValidator(Decimal(0))],
        help_text="Units that each account has free in each calendar month, UTC.",
    )  # fmt: skip
    valid_from = models.DateTimeField(help_text="What was used before is not priced by it.")
    source = models.CharField(max_length=300, blank=True, help_text="Where the figure is from.")
    own = models.BooleanField("set your own", default=False, help_text="A zero in the place of a price that only you know.")
    by_use = models.BooleanField(
        default=False, help_text="CPU and memory: for what was used, where that is measured. Else for what a sandbox was given."
    )  # fmt: skip

    class Meta:
        ordering = ["provider", "item", "instance_type", "-valid_from"]
        constraints = [
            models.UniqueConstraint(fields=["provider", "instance_type", "item", "valid_from"], name="rate_once"),
            models.CheckConstraint(
                condition=Q(usd__gte=0, allowance__gte=0),
                name="rate_positive",
                violation_error_message="A rate is not below 0.",
            ),
            models.CheckConstraint(
                condition=Q(by_use=False) | Q(item__in=["cpu", "memory"]),
                name="rate_by_use",
                violation_error_message="Only CPU and memory are measured by use.",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.provider} {self.instance_type} {self.item}".replace("  ", " ")

    def clean(self) -> None:
        """That it has not begun, before and after, as of now: what is priced by it cannot change."""
        stored = Rate.objects.filter(pk=self.pk).first() if self.pk else None
        if stored and stored.valid_from <= timezone.now():
            raise ValidationError("This rate has begun, and what it priced stays. Add another one that begins later.")
        if self.valid_from and self.valid_from < get_earliest_start(timezone.now()):
            raise ValidationError({"valid_from": "A rate does not begin in the past: what was used then has its price."})
        if isinstance(self.usd, Decimal) and len(self.usd.normalize().as_tuple().digits) > MAX_RATE_DIGITS:
            raise ValidationError({"usd": f"At most {MAX_RATE_DIGITS} digits."})

    def save(self, *args: Any, **options: Any) -> None:
        """ValidationError for one that has begun. Whatever was used since it begins is priced again."""
        self.full_clean()
        with transaction.atomic():
            super().save(*args, **options)
            since = self.valid_from.astimezone(UTC).date()
            Unpriced.note(UsageRecord.objects.filter(day__gte=since).order_by().values_list("day", flat=True).distinct())

    def delete(self, *args: Any, **options: Any) -> tuple[int, dict[str, int]]:
        if self.valid_from <= timezone.now():
            raise ValidationError("This rate has begun, and what it priced stays.")
        return super().delete(*args, **options)


def get_earliest_start(now: datetime) -> datetime:
    """When a new rate may begin at the earliest. What is used up to now has a price already, or is about to get it."""
    return now

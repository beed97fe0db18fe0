"""Usage records and the watermarks of their derivation. Every row can be deleted and derived again from the facts."""

from collections.abc import Iterable
from datetime import date, datetime
from decimal import Decimal
from typing import Any

from django.db import models, transaction
from django.db.models import F, Q, QuerySet


class Watermark(models.Model):
    """Up to when something has been derived. Whoever derives holds its lock, so one pass at a time does, and never back."""

    name = models.CharField(max_length=32, primary_key=True)
    at = models.DateTimeField()

    class Meta:
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.name} {self.at:%Y-%m-%d %H:%M:%S}"

    @classmethod
    def hold(cls, name: str, now: datetime) -> datetime:
        """Lock it until the transaction ends, and move it to now, but never back; where it is then."""
        cls.objects.get_or_create(name=name, defaults={"at": now})
        mark = cls.objects.select_for_update().get(name=name)
        if mark.at < now:
            mark.at = now
            mark.save(update_fields=["at"])
        return mark.at


class UsageKind(models.TextChoices):
    TIME = "time", "sandbox time"
    USE = "use", "CPU and memory used"
    RUNS = "runs", "runs"
    STORAGE = "storage", "storage"
    TOKENS = "tokens", "model calls"


class Unpriced(models.Model):
    """A day whose costs do not follow from its usage yet: something was written or removed since they were derived.

    One row for each change, so nobody waits for anybody: whoever prices removes the rows it saw before it read the usage."""

    day = models.DateField()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return str(self.day)

    @classmethod
    def note(cls, days: Iterable[date]) -> None:
        """Call it in the transaction that changes what these days cost."""
        Unpriced.objects.bulk_create([Unpriced(day=day) for day in sorted({*days})], batch_size=200)


class UsageRecordQuerySet(QuerySet["UsageRecord"]):
    """Whatever is written or removed leaves its day unpriced, in the same transaction."""

    def bulk_create(self, objs: Iterable[Any], *args: Any, **options: Any) -> list[Any]:
        records = [*objs]
        with transaction.atomic():
            Unpriced.note(record.day for record in records)
            return super().bulk_create(records, *args, **options)

    def delete(self) -> tuple[int, dict[str, int]]:
        with transaction.atomic():
            Unpriced.note(self.order_by().values_list("day", flat=True).distinct())
            return super().delete()

    delete.alters_data = delete.queryset_only = True  # type: ignore[attr-defined]


class UsageRecord(models.Model):
    """One fact's share of one day, UTC: a sandbox's time in one state, the bytes of a snapshot, one lease's calls of a model.

    Of what is not over yet the part up to the watermark is here, and grows with the next pass."""

    item = models.CharField(max_length=8, choices=UsageKind.choices)
    source = models.CharField(
        max_length=320, help_text="The fact: the transition that began it, the snapshot, lease and model."
    )
    day = models.DateField()
    began_at = models.DateTimeField()
    ended_at = models.DateTimeField()
    sandbox = models.ForeignKey(
        "sandboxes.Sandbox", on_delete=models.PROTECT, null=True, blank=True, related_name="usage", db_index=False
    )
    holder = models.UUIDField(null=True, blank=True, help_text="The lease. Empty: a sandbox that nobody held yet.")
    agent_did = models.CharField(max_length=255, blank=True, verbose_name="agent")
    environment_id = models.CharField(max_length=200, blank=True)
    provider = models.CharField(max_length=32, blank=True)
    state = models.CharField(max_length=16, blank=True)
    memory_mib = models.PositiveIntegerField(default=0)
    millicpus = models.PositiveIntegerField(default=0)
    measured = models.BooleanField(default=False, help_text="What it used of CPU and memory is in records of its own.")
    cpu_micros = models.PositiveBigIntegerField("CPU", default=0, help_text="Used, in microseconds.")
    mib_micros = models.PositiveBigIntegerField("memory", default=0, help_text="Used, in microseconds x MiB.")
    size_bytes = models.PositiveBigIntegerField(default=0)
    model = models.CharField(max_length=200, blank=True)
    calls = models.PositiveBigIntegerField(default=0, help_text="Of a model; or runs.")
    unpriced = models.PositiveBigIntegerField(default=0, help_text="Calls of which nobody knows what they cost.")
    input_tokens = models.PositiveBigIntegerField(default=0)
    cached_tokens = models.PositiveBigIntegerField(default=0)
    output_tokens = models.PositiveBigIntegerField(default=0)
    usd = models.DecimalField(max_digits=18, decimal_places=9, default=Decimal(0), help_text="Of model calls.")

    objects = UsageRecordQuerySet.as_manager()

    class Meta:
        default_permissions = ("view",)
        ordering = ["-day", "-pk"]
        constraints = [
            models.UniqueConstraint(fields=["source", "day"], name="usage_once_a_day"),
            models.CheckConstraint(condition=Q(ended_at__gte=F("began_at")), name="usage_ends_later"),
        ]
        indexes = [
            models.Index(fields=["day", "item"], name="usage_day"),
            models.Index(fields=["holder", "day"], name="usage_holder"),
            models.Index(fields=["agent_did", "day"], name="usage_agent"),
        ]

    def __str__(self) -> str:
        return f"{self.source} on {self.day}"


class Meter(models.Model):
    """How far the life of one sandbox has been read: the transition whose state it is in now, and since when.

    A sandbox's transitions follow one another, so none is passed over; a table's do not."""

    sandbox = models.OneToOneField("sandboxes.Sandbox", on_delete=models.PROTECT, primary_key=True, related_name="meter")
    transition = models.BigIntegerField()
    began_at = models.DateTimeField()
    read_at = models.DateTimeField(help_text="The watermark when its usage was last written.")

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.sandbox_id} at {self.transition}"


# --- money ------------------------------------------------------------------------------------------------------------

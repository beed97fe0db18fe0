"""Usage records and the watermarks of their derivation. Every row can be deleted and derived again from the facts."""

from collections.abc import Iterable
from datetime import date, datetime
from decimal import Decimal
from typing import Any

from django.db import models, transaction
from django.db.models import F, Q, QuerySet


class Watermark(models.Model):
    """Time up to which a kind of usage, or costs, have been derived. Its row lock serializes the passes of a derivation."""

    name = models.CharField(max_length=32, primary_key=True)
    at = models.DateTimeField()

    class Meta:
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.name} {self.at:%Y-%m-%d %H:%M:%S}"

    @classmethod
    def hold(cls, name: str, now: datetime) -> datetime:
        """Lock the watermark until the transaction ends and advance it to `now`, never back. Return its time."""
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
    """A day whose usage, rates or memberships have changed since its costs were derived.

    Each change adds its own row, so that concurrent changes never wait for each other. A pricing pass reads these rows before
    the usage and deletes only the rows that it has read."""

    day = models.DateField()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return str(self.day)

    @classmethod
    def note(cls, days: Iterable[date]) -> None:
        """Mark days as unpriced. Call it in the transaction that changes their usage, rates or accounts."""
        Unpriced.objects.bulk_create([Unpriced(day=day) for day in sorted({*days})], batch_size=200)


class UsageRecordQuerySet(QuerySet["UsageRecord"]):
    """Query set that marks the days of inserted and deleted records as unpriced, in the same transaction."""

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
    """Share of one fact in one UTC day, such as a sandbox's time in one state, a snapshot's bytes or a lease's model calls.

    The record of a fact that has not ended covers the time up to the watermark, and grows with the next pass. Short facts of
    one hour share a record (billing.rollup): the time of such a record ends at its start plus the sum of the durations."""

    item = models.CharField(max_length=8, choices=UsageKind.choices)
    source = models.CharField(
        max_length=320,
        help_text="Recorded fact: a transition, a reading, a snapshot, a lease and model, or the facts of an hour.",
    )
    day = models.DateField()
    began_at = models.DateTimeField()
    ended_at = models.DateTimeField()
    sandbox = models.ForeignKey(
        "sandboxes.Sandbox", on_delete=models.PROTECT, null=True, blank=True, related_name="usage", db_index=False
    )
    holder = models.UUIDField(null=True, blank=True, help_text="Lease id. Empty for sandboxes without a lease.")
    agent_did = models.CharField(max_length=255, blank=True, verbose_name="agent")
    environment_id = models.CharField(max_length=200, blank=True)
    provider = models.CharField(max_length=32, blank=True)
    state = models.CharField(max_length=16, blank=True)
    memory_mib = models.PositiveIntegerField(default=0)
    millicpus = models.PositiveIntegerField(default=0)
    measured = models.BooleanField(default=False, help_text="CPU and memory use is measured, in separate records.")
    cpu_micros = models.PositiveBigIntegerField("CPU", default=0, help_text="CPU time used, in microseconds.")
    mib_micros = models.PositiveBigIntegerField("memory", default=0, help_text="Memory used, in microseconds x MiB.")
    size_bytes = models.PositiveBigIntegerField(default=0)
    model = models.CharField(max_length=200, blank=True)
    calls = models.PositiveBigIntegerField(default=0, help_text="Number of model calls or runs.")
    unpriced = models.PositiveBigIntegerField(default=0, help_text="Number of model calls with unknown cost.")
    input_tokens = models.PositiveBigIntegerField(default=0)
    cached_tokens = models.PositiveBigIntegerField(default=0)
    cache_written_tokens = models.PositiveBigIntegerField(
        default=0, db_default=0, help_text="Part of the input that was written to the cache."
    )
    output_tokens = models.PositiveBigIntegerField(default=0)
    usd = models.DecimalField(max_digits=18, decimal_places=9, default=Decimal(0), help_text="Cost of model calls.")
    estimated = models.PositiveBigIntegerField(
        default=0, db_default=0, help_text="Number of model calls with an estimated cost."
    )
    estimated_usd = models.DecimalField(
        "estimated, USD", max_digits=18, decimal_places=9, default=Decimal(0), db_default=Decimal(0),
        help_text="Estimated part of the cost.",
    )  # fmt: skip
    estimated_tokens = models.BigIntegerField(
        default=0, db_default=0, help_text="Estimated tokens of model calls, beside those that the upstream reported."
    )

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
            models.Index(fields=["-day", "-id"], condition=Q(unpriced__gt=0), name="usage_unpriced"),
            models.Index(fields=["id"], condition=Q(item="tokens"), name="usage_newest_tokens"),
            # Also for prefix searches: PostgreSQL cannot use an index in the order of a language for LIKE.
            models.Index(fields=["agent_did", "day"], opclasses=["varchar_pattern_ops", "date_ops"], name="usage_agent_prefix"),
            models.Index(fields=["environment_id"], opclasses=["varchar_pattern_ops"], name="usage_environment_prefix"),
        ]

    def __str__(self) -> str:
        return f"{self.source} on {self.day}"


class Meter(models.Model):
    """Progress of metering one sandbox: the last transition read and the start of the state after it.

    Kept per sandbox because the transitions of one sandbox commit in the order of their ids; those of the table do not."""

    sandbox = models.OneToOneField("sandboxes.Sandbox", on_delete=models.PROTECT, primary_key=True, related_name="meter")
    transition = models.BigIntegerField()
    began_at = models.DateTimeField()
    read_at = models.DateTimeField(help_text="Watermark of the last write of the sandbox's usage.")

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.sandbox_id} at {self.transition}"

"""CPU and memory readings: columns, constraints and indexes. The verbs are in sandboxes.usage.readings."""

from django.db import models
from django.db.models import F, Q


class Reading(models.Model):
    """Resource use of one incarnation since the previous reading, or since the incarnation became ready.

    `counted` is the provider's cumulative counter, from which the next reading continues."""

    sandbox = models.ForeignKey("sandboxes.Sandbox", on_delete=models.PROTECT, related_name="readings", db_index=False)
    incarnation = models.PositiveIntegerField()
    number = models.PositiveIntegerField(help_text="Sequence number within the incarnation, from 1.")
    holder = models.UUIDField(null=True, blank=True)
    since = models.DateTimeField()
    at = models.DateTimeField()
    counted = models.PositiveBigIntegerField(help_text="Provider's CPU counter, microseconds.")
    cpu_micros = models.PositiveBigIntegerField("CPU", help_text="CPU time since the previous reading, microseconds.")
    memory_mib = models.PositiveIntegerField("memory", help_text="Memory at the time of the reading, MiB, rounded up.")
    metered = models.BooleanField(default=False, editable=False, help_text="Included in usage records.")

    class Meta:
        default_permissions = ("view",)
        ordering = ["-at", "-pk"]
        constraints = [
            models.UniqueConstraint(fields=["sandbox", "incarnation", "number"], name="reading_once"),
            models.CheckConstraint(condition=Q(at__gt=F("since")), name="reading_takes_time"),
        ]
        indexes = [
            models.Index(fields=["-at", "-id"], name="reading_newest"),
            models.Index(fields=["holder", "-at", "-id"], name="reading_holder"),
            models.Index(fields=["id"], condition=Q(metered=False), name="reading_unmetered"),
        ]

    def __str__(self) -> str:
        return f"reading {self.pk}"

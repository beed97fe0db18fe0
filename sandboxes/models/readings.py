"""What sandboxes had used when their provider was asked: the rows. The verbs are in measuring."""

from django.db import models
from django.db.models import F, Q


class Reading(models.Model):
    """What one incarnation of a sandbox has used since the reading before, or since it was ready: a fact, as a Transition is.

    `counted` is what the provider's own counter said, so the next reading knows where to go on."""

    sandbox = models.ForeignKey("sandboxes.Sandbox", on_delete=models.PROTECT, related_name="readings", db_index=False)
    incarnation = models.PositiveIntegerField()
    number = models.PositiveIntegerField(help_text="Of the readings of this incarnation, from 1.")
    holder = models.UUIDField(null=True, blank=True)
    since = models.DateTimeField()
    at = models.DateTimeField()
    counted = models.PositiveBigIntegerField(help_text="Microseconds of CPU by the provider's counter.")
    cpu_micros = models.PositiveBigIntegerField("CPU", help_text="Microseconds that are new in that.")
    memory_mib = models.PositiveIntegerField("memory", help_text="That it had then, in whole MiB, rounded up.")
    metered = models.BooleanField(default=False, editable=False, help_text="It is in usage records.")

    class Meta:
        default_permissions = ("view",)
        ordering = ["-at", "-pk"]
        constraints = [
            models.UniqueConstraint(fields=["sandbox", "incarnation", "number"], name="reading_once"),
            models.CheckConstraint(condition=Q(at__gt=F("since")), name="reading_takes_time"),
        ]
        indexes = [
            models.Index(fields=["-at", "-id"], name="reading_newest"),
            models.Index(fields=["id"], condition=Q(metered=False), name="reading_unmetered"),
        ]

    def __str__(self) -> str:
        return f"reading {self.pk}"

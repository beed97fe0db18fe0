"""Last start, duration and counts of each scheduled sweep."""

from datetime import timedelta

from django.db import models
from django.db.models import Q

from sandboxes.db.message_fields import LongMessageField
from sandboxes.models.hosts import Host


class Sweep(models.Model):
    """Last execution of one sweep. Health checks read these rows, the worker's heartbeat included."""

    name = models.CharField(max_length=32)
    host = models.ForeignKey(
        Host, on_delete=models.CASCADE, null=True, blank=True, related_name="sweeps",
        help_text="Host whose work the sweep does. Empty: the whole installation's.",
    )  # fmt: skip
    started_by = models.ForeignKey(
        Host, on_delete=models.SET_NULL, null=True, blank=True, related_name="+", help_text="Host of the last execution."
    )
    every = models.DurationField(default=timedelta(minutes=1), help_text="Expected interval between successful executions.")
    started_at = models.DateTimeField(null=True, blank=True)
    running_until = models.DateTimeField(
        null=True, blank=True, help_text="Deadline of an execution in progress for the whole installation."
    )
    claim = models.UUIDField(null=True, editable=False, help_text="Token of the execution in progress.")
    claimed_by = models.CharField(max_length=64, blank=True, editable=False, db_default="", default="")
    succeeded_at = models.DateTimeField(null=True, blank=True)
    took = models.DurationField(null=True, blank=True)
    counts = models.JSONField(default=dict)
    last_error = LongMessageField(blank=True)

    class Meta:
        default_permissions = ("view",)
        ordering = ["name", "host"]
        constraints = [
            models.UniqueConstraint(fields=["name"], condition=Q(host__isnull=True), name="sweep_once"),
            models.UniqueConstraint(fields=["name", "host"], condition=Q(host__isnull=False), name="sweep_once_per_host"),
        ]

    def __str__(self) -> str:
        return f"{self.name} on {self.host}" if self.host else self.name

"""Last start, duration and counts of each scheduled sweep."""

from datetime import timedelta

from django.db import models


class Sweep(models.Model):
    """Last execution of one sweep. Health checks read these rows, the worker's heartbeat included."""

    name = models.CharField(max_length=32, unique=True)
    every = models.DurationField(default=timedelta(minutes=1), help_text="Expected interval between successful executions.")
    started_at = models.DateTimeField(null=True, blank=True)
    succeeded_at = models.DateTimeField(null=True, blank=True)
    took = models.DurationField(null=True, blank=True)
    counts = models.JSONField(default=dict)
    last_error = models.TextField(blank=True)

    class Meta:
        default_permissions = ("view",)
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

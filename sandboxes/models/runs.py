"""Runs, one command in one sandbox each: columns, constraints and indexes. The verbs are in sandboxes.runs."""

import uuid
from datetime import timedelta

from django.db import models
from django.db.models import F, Q

from sandboxes.models.sandboxes import Sandbox


class RunOutcome(models.TextChoices):
    OPEN = "open", "running"
    OK = "ok", "ok"
    FAILED = "failed", "failed"  # the command ended with another code than 0
    TIMED_OUT = "timed_out", "timed out"
    OOM = "oom", "out of memory"
    LOST = "lost", "lost"  # whoever waited for it died, or its sandbox was destroyed under it: the exit is unknown
    ERROR = "error", "provider error"  # it may never have started


RUN_KINDS = ("exec", "turn", "file", "process")


class Run(models.Model):
    """One command in one sandbox and how it ended. Open until ended_at; never open past its deadline for long."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    sandbox = models.ForeignKey(Sandbox, on_delete=models.PROTECT, related_name="runs")
    holder = models.UUIDField(null=True, blank=True)
    agent_did = models.CharField(max_length=255, blank=True)
    incarnation = models.PositiveIntegerField(default=1)
    kind = models.CharField(max_length=16, choices=[(kind, kind) for kind in RUN_KINDS], default="exec")
    turn_number = models.BigIntegerField(null=True, blank=True)
    argv = models.JSONField()
    cwd = models.CharField(max_length=4096, default="/workspace")
    claimed_by = models.CharField(max_length=64, blank=True, help_text="The instance of the control plane that waits for it.")
    env_names = models.JSONField(default=list, help_text="Names only: values may be secret.")
    stdin_bytes = models.PositiveIntegerField(default=0)
    started_at = models.DateTimeField()
    deadline_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True)
    outcome = models.CharField(max_length=16, choices=RunOutcome.choices, default=RunOutcome.OPEN)
    exit_code = models.IntegerField(null=True, blank=True)
    timed_out = models.BooleanField(default=False)
    oom = models.BooleanField(default=False)
    truncated = models.BooleanField(default=False, help_text="Output was longer than the limit of an exec.")
    stdout = models.BinaryField(default=b"", help_text="The first bytes, up to LEASEHOLD_RUN_OUTPUT_KEPT_BYTES.")
    stderr = models.BinaryField(default=b"")
    stdout_bytes = models.PositiveBigIntegerField(default=0, help_text="Bytes received, of which the first are kept.")
    stderr_bytes = models.PositiveBigIntegerField(default=0)
    note = models.CharField(max_length=500, blank=True, help_text="Why it was closed, when the command itself cannot say.")
    metered = models.BooleanField(default=False, editable=False, help_text="It is in usage records.")

    class Meta:
        default_permissions = ("view",)
        ordering = ["-started_at", "-pk"]
        constraints = [
            models.CheckConstraint(condition=Q(outcome__in=RunOutcome.values), name="run_outcome_known"),
            models.CheckConstraint(
                condition=Q(outcome="open", ended_at__isnull=True) | (~Q(outcome="open") & Q(ended_at__isnull=False)),
                name="run_open_iff_not_ended",
            ),
            models.CheckConstraint(condition=Q(deadline_at__gt=F("started_at")), name="run_deadline_after_start"),
        ]
        indexes = [
            models.Index(fields=["-started_at", "-id"], name="run_newest"),
            models.Index(fields=["sandbox", "-started_at", "-id"], name="run_sandbox"),
            models.Index(fields=["holder", "-started_at", "-id"], name="run_holder"),
            models.Index(fields=["deadline_at"], condition=Q(ended_at__isnull=True), name="run_open"),
            models.Index(fields=["sandbox", "id"], condition=Q(metered=False), name="run_unmetered"),
        ]

    def __str__(self) -> str:
        return f"run {self.pk}"

    @property
    def duration(self) -> timedelta | None:
        return self.ended_at - self.started_at if self.ended_at else None

"""Programs that go on after the call that started them: the rows. The verbs are in processes."""

import uuid
from datetime import datetime

from django.db import models
from django.db.models import Q


class ProcessStatus(models.TextChoices):
    RUNNING = "running"
    EXITED = "exited"  # by itself, or killed by somebody inside
    KILLED = "killed"  # by whoever asked for that here
    GONE = "gone"  # its sandbox slept, was destroyed or was lost
    FAILED = "failed"  # it was never started


class Process(models.Model):
    """One program in the background of one incarnation of a sandbox. It does not keep the sandbox awake, and ends with it."""

    # Also the mark by which its processes are found, and the id of the Run that started it.
    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    sandbox = models.ForeignKey("sandboxes.Sandbox", on_delete=models.PROTECT, related_name="processes")
    holder = models.UUIDField()
    agent_did = models.CharField(max_length=255, verbose_name="agent")
    incarnation = models.PositiveIntegerField()
    name = models.CharField(max_length=100, blank=True, help_text="As whoever started it calls it.")
    argv = models.JSONField()
    cwd = models.CharField(max_length=4096)
    env_names = models.JSONField(default=list, help_text="Names only: values may be secret.")
    started_at = models.DateTimeField()
    starts_by = models.DateTimeField(help_text="If it was not seen by then, it was never started.")
    state = models.CharField(max_length=16, choices=ProcessStatus.choices, default=ProcessStatus.RUNNING)
    ended_at = models.DateTimeField(null=True, blank=True, help_text="When its end was noticed.")
    exit_code = models.IntegerField(null=True, blank=True)
    note = models.CharField(max_length=500, blank=True, help_text="Why it ended, when an exit code does not say it.")

    class Meta:
        default_permissions = ("view",)
        verbose_name_plural = "processes"
        ordering = ["-started_at", "-pk"]
        constraints = [
            models.CheckConstraint(condition=Q(state__in=ProcessStatus.values), name="process_state_known"),
            models.CheckConstraint(
                condition=Q(state="running", ended_at__isnull=True) | (~Q(state="running") & Q(ended_at__isnull=False)),
                name="process_running_iff_not_ended",
            ),
        ]
        indexes = [
            models.Index(fields=["-started_at", "-id"], name="process_newest"),
            models.Index(fields=["holder", "-started_at", "-id"], name="process_holder"),
            models.Index(fields=["sandbox"], condition=Q(ended_at__isnull=True), name="process_running"),
        ]

    def __str__(self) -> str:
        return self.name or f"process {self.pk}"


def close_all_processes(sandbox: uuid.UUID, *, now: datetime, note: str) -> int:
    """Nothing runs in the background of a sandbox any more, as that is gone; how many were open. Called in the
    transaction that says so of the sandbox."""
    running = Process.objects.filter(sandbox=sandbox, ended_at__isnull=True)
    return running.update(state=ProcessStatus.GONE, ended_at=now, note=note[:500])

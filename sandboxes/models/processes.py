"""Background processes of sandboxes: columns, constraints and indexes. The verbs are in sandboxes.processes."""

import uuid
from datetime import datetime

from django.db import models
from django.db.models import Q


class ProcessStatus(models.TextChoices):
    """State of a background process."""

    RUNNING = "running"
    EXITED = "exited"  # by itself, or killed inside the sandbox
    KILLED = "killed"  # through the control plane
    GONE = "gone"  # sandbox evicted, destroyed, restarted or lost
    FAILED = "failed"  # never started


class Process(models.Model):
    """One background process in one incarnation of a sandbox. It ends with its sandbox, and does not delay an eviction."""

    # Also the environment mark that identifies its child processes, and the id of the Run that started it.
    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    sandbox = models.ForeignKey("sandboxes.Sandbox", on_delete=models.PROTECT, related_name="processes")
    holder = models.UUIDField()
    agent_did = models.CharField(max_length=255, verbose_name="agent")
    incarnation = models.PositiveIntegerField()
    name = models.CharField(max_length=100, blank=True, help_text="Name given by the client.")
    argv = models.JSONField()
    cwd = models.CharField(max_length=4096)
    env_names = models.JSONField(default=list, help_text="Names only; values may be secret.")
    keep_awake = models.BooleanField(default=False, help_text="The sandbox is not suspended while the process runs.")
    is_terminal = models.BooleanField(default=False, help_text="The program has a terminal, to which clients connect.")
    started_at = models.DateTimeField()
    starts_by = models.DateTimeField(help_text="Deadline of the start. A process not listed by then counts as never started.")
    state = models.CharField(max_length=16, choices=ProcessStatus.choices, default=ProcessStatus.RUNNING)
    ended_at = models.DateTimeField(null=True, blank=True, help_text="Time at which the end was detected.")
    exit_code = models.IntegerField(null=True, blank=True)
    note = models.CharField(max_length=500, blank=True, help_text="Cause of the end, if the exit code does not show it.")

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
    """Close all open processes of a sandbox, and return their number.

    Called in the transaction that evicts or destroys the sandbox, or marks it as lost."""
    running = Process.objects.filter(sandbox=sandbox, ended_at__isnull=True)
    return running.update(state=ProcessStatus.GONE, ended_at=now, note=note[:500])

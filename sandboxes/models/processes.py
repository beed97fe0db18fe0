"""Background processes of sandboxes: columns, constraints and indexes. The verbs are in sandboxes.processes."""

import uuid
from datetime import datetime

from django.db import models
from django.db.models import Case, F, Q, Value, When
from django.db.models.functions import Coalesce

from sandboxes.db.message_fields import MessageField


class ProcessStatus(models.TextChoices):
    """State of a background process."""

    RUNNING = "running"
    EXITED = "exited"  # by itself, or killed inside the sandbox
    KILLED = "killed"  # through the control plane
    GONE = "gone"  # sandbox evicted, destroyed, restarted or lost
    FAILED = "failed"  # never started


class RestartPolicy(models.TextChoices):
    """Condition under which a background process is restarted after its exit."""

    NEVER = "never"
    ON_FAILURE = "on_failure"  # exit code other than 0
    ALWAYS = "always"


# Of an ended process: a restart is due, follows the next wake, or has variables.
MAY_RESTART = Q(Q(restart_at__isnull=False) | Q(wake_pending=True) | Q(sealed_env__isnull=False), ended_at__isnull=False)


class Process(models.Model):
    """One background process of a holder. It ends with its sandbox, and does not delay an eviction.

    The row stays the same over restarts (sandboxes.process_restarts); state and exit code are those of the last start."""

    # Also the id of the Run that started it, and until a restart the environment mark that identifies its child processes.
    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    sandbox = models.ForeignKey("sandboxes.Sandbox", on_delete=models.PROTECT, related_name="processes")
    holder = models.UUIDField()
    agent_did = models.CharField(max_length=255, verbose_name="agent")
    incarnation = models.PositiveIntegerField()
    name = models.CharField(max_length=100, blank=True, help_text="Name given by the client.")
    argv = models.JSONField()
    cwd = models.CharField(max_length=4096)
    env_names = models.JSONField(default=list, help_text="Names only; values may be secret.")
    keep_awake = models.BooleanField(
        default=False, db_default=False, help_text="The sandbox is not suspended while the process runs."
    )
    is_terminal = models.BooleanField(
        default=False, db_default=False, help_text="The program has a terminal, to which clients connect."
    )
    started_at = models.DateTimeField()
    starts_by = models.DateTimeField(help_text="Deadline of the start. A process not listed by then counts as never started.")
    checked_at = models.DateTimeField(null=True, editable=False, help_text="Time of the last listing by a sweep.")
    state = models.CharField(max_length=16, choices=ProcessStatus.choices, default=ProcessStatus.RUNNING)
    ended_at = models.DateTimeField(null=True, blank=True, help_text="Time at which the end was detected.")
    exit_code = models.IntegerField(null=True, blank=True)
    note = MessageField(max_length=500, blank=True, help_text="Cause of the end, if the exit code does not show it.")
    restart = models.CharField(
        max_length=16,
        choices=RestartPolicy,
        default=RestartPolicy.NEVER,
        db_default=RestartPolicy.NEVER,
        verbose_name="restart policy",
    )
    restart_after_wake = models.BooleanField(
        default=False, db_default=False, help_text="Started again after a wake of its sandbox."
    )
    max_restarts = models.PositiveIntegerField(default=5, db_default=5, help_text="Maximum number of restarts in the window.")
    restart_window_seconds = models.PositiveIntegerField(default=600, db_default=600, verbose_name="restart window, seconds")
    restarts = models.PositiveIntegerField(default=0, db_default=0, help_text="Restarts so far, after exits and wakes.")
    restarted_at = models.DateTimeField(null=True, blank=True, help_text="Time of the last restart.")
    restart_at = models.DateTimeField(null=True, blank=True, help_text="Time of the next restart, of an ended process.")
    window_started_at = models.DateTimeField(null=True, blank=True)
    window_restarts = models.PositiveIntegerField(default=0, db_default=0, help_text="Restarts in the current window.")
    wake_pending = models.BooleanField(default=False, db_default=False, help_text="To be restarted by the next wake.")
    kill_requested_at = models.DateTimeField(null=True, blank=True, help_text="Time of the kill, which ends all restarts.")
    mark = models.UUIDField(null=True, blank=True, editable=False, help_text="Mark of the last restart. Empty: the id.")
    start_confirmed = models.BooleanField(
        default=True, db_default=True, help_text="The provider has confirmed the last restart."
    )
    has_stdin = models.BooleanField(default=False, db_default=False)
    sealed_env = models.BinaryField(null=True, editable=False, help_text="Variables for a restart, encrypted.")

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
            models.CheckConstraint(condition=Q(restart__in=RestartPolicy.values), name="process_restart_known"),
            models.CheckConstraint(
                condition=Q(restart_at__isnull=True) | Q(ended_at__isnull=False, kill_requested_at__isnull=True),
                name="process_restart_after_end",
            ),
        ]
        indexes = [
            models.Index(fields=["-started_at", "-id"], name="process_newest"),
            models.Index(fields=["holder", "-started_at", "-id"], name="process_holder"),
            models.Index(fields=["sandbox"], condition=Q(ended_at__isnull=True), name="process_running"),
            models.Index(fields=["restart_at"], condition=Q(restart_at__isnull=False), name="process_restart_due"),
            models.Index(fields=["holder"], condition=Q(wake_pending=True), name="process_wake_pending"),
            models.Index(fields=["holder"], condition=MAY_RESTART, name="process_may_restart"),
        ]

    @property
    def current_mark(self) -> str:
        """Mark of the last start, by which the provider knows the process."""
        return str(self.mark or self.pk)

    def __str__(self) -> str:
        return self.name or f"process {self.pk}"


def close_all_processes(
    sandbox: uuid.UUID, *, now: datetime, note: str, may_wake: bool = True, restarts: bool = False, resumes: bool = False
) -> int:
    """Close all open processes of a sandbox, and end its pending restarts. Return the number of changed rows.

    Called in the transaction that evicts, restarts or destroys the sandbox, or marks it as lost. With `may_wake` the holder's
    next sandbox starts the processes with `restart_after_wake` again. With `restarts`, for a sandbox that was restarted without
    a request of its holder, the processes with a restart policy are due at once. With `resumes`, for a suspension that ended
    them, so are those with `restart_after_wake`: no process is restarted before the sandbox is resumed."""
    rows = Process.objects.filter(Q(ended_at__isnull=True) | Q(restart_at__isnull=False), sandbox=sandbox)
    is_running, never = Q(ended_at__isnull=True), Q(pk__in=[])
    unkilled = Q(kill_requested_at__isnull=True)
    wakes = unkilled & Q(restart_after_wake=True) if may_wake else never
    is_due = unkilled & ~Q(restart=RestartPolicy.NEVER) if restarts or resumes else never
    if resumes:
        is_due |= unkilled & Q(restart_after_wake=True)
    return rows.update(
        state=Case(When(is_running, then=Value(ProcessStatus.GONE.value)), default=F("state")),
        note=Case(When(is_running, then=Value(note, output_field=Process._meta.get_field("note"))), default=F("note")),
        ended_at=Coalesce("ended_at", Value(now, output_field=models.DateTimeField())),
        restart_at=Case(When(is_due, then=Value(now)), default=None, output_field=models.DateTimeField()),
        wake_pending=Case(When(wakes, then=Value(True)), default=Value(False)),
        sealed_env=Case(
            When(wakes | is_due, then=F("sealed_env")), default=Value(None, output_field=models.BinaryField(null=True))
        ),
    )

"""Table of agent runs: one agent CLI in the sandbox of a lease, from its prompt to its result."""

import uuid

from django.db import models
from django.db.models import Q

from sandboxes.db.message_fields import MessageField

SESSION_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}"


class AgentRunState(models.TextChoices):
    RUNNING = "running", "running"
    COMPLETED = "completed", "completed"
    FAILED = "failed", "failed"
    INTERRUPTED = "interrupted", "interrupted"  # by a request, or because the policy was violated


class AgentRun(models.Model):
    """Execution of an agent CLI. Its id is that of the Run whose command is the CLI.

    Messages are in the chat history of the lease, and counted here. `stdout_offset` is the end of the last recorded message:
    another process continues there if the recording one dies."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    lease = models.ForeignKey("leases.Lease", on_delete=models.PROTECT, related_name="agent_runs", db_index=False)
    cli = models.CharField(max_length=32, verbose_name="agent CLI")
    model = models.CharField(max_length=200, blank=True)
    requested_session = models.CharField(
        max_length=128, blank=True, help_text="Session of the CLI to resume. Empty: a new one."
    )
    session_id = models.CharField(max_length=128, blank=True, help_text="Session of the CLI, as the CLI reports it.")
    policy = models.JSONField(
        default=dict, help_text="Limits of this run: of the environment type and of the request together."
    )
    state = models.CharField(max_length=16, choices=AgentRunState.choices, default=AgentRunState.RUNNING)
    started_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True)
    interrupted_at = models.DateTimeField(null=True, blank=True, help_text="Time of the request to interrupt the run.")
    violation = MessageField(max_length=500, blank=True, help_text="Violation of the policy that interrupted the run.")
    queued = models.BooleanField(
        default=False,
        db_default=False,
        editable=False,
        help_text="Started by the queue, which counts the run as a queued run.",
    )
    stdout_offset = models.PositiveBigIntegerField(default=0, editable=False)
    stderr_offset = models.PositiveBigIntegerField(default=0, editable=False)
    recorder_deadline = models.DateTimeField(editable=False, help_text="Past this time another process may record the run.")
    message_count = models.PositiveIntegerField(default=0)
    malformed_count = models.PositiveIntegerField(default=0, help_text="Lines of output that are not JSON objects.")
    lost_bytes = models.PositiveBigIntegerField(default=0, help_text="Bytes of output that were dropped before they were read.")
    turn_count = models.PositiveIntegerField(default=0, help_text="Answers of the model.")
    result = models.TextField(blank=True, help_text="Last answer of the agent; its beginning if it is long.")
    is_error = models.BooleanField(null=True, help_text="Result that the CLI reported. Empty: none yet.")
    reported_cost = models.DecimalField(
        max_digits=18, decimal_places=9, null=True, blank=True, help_text="USD, as the CLI reports it. Not billed."
    )
    note = MessageField(max_length=500, blank=True)

    class Meta:
        default_permissions = ("view",)
        ordering = ["-started_at", "-pk"]
        constraints = [
            models.CheckConstraint(condition=Q(state__in=AgentRunState.values), name="agentrun_state_known"),
            models.CheckConstraint(
                condition=Q(state="running", ended_at__isnull=True) | (~Q(state="running") & Q(ended_at__isnull=False)),
                name="agentrun_running_iff_not_ended",
            ),
        ]
        indexes = [
            models.Index(fields=["lease", "-started_at", "-id"], name="agentrun_lease"),
            models.Index(fields=["recorder_deadline"], condition=Q(ended_at__isnull=True), name="agentrun_open"),
        ]

    def __str__(self) -> str:
        return f"agent run {self.pk}"

    @property
    def resumed(self) -> bool | None:
        """Return whether the CLI resumed the requested session. None without a request, and until the CLI reports a session."""
        return self.session_id == self.requested_session if self.requested_session and self.session_id else None

"""Table of queued runs: commands that wait for a runner, with or without a lease."""

import uuid

from django.db import models
from django.db.models import F, Q

from sandboxes.db.message_fields import MessageField
from sandboxes.models import Pool

MAX_RUN_ATTEMPT = (1 << 15) - 1  # of Run.attempt: a wider column would rewrite the largest table


class QueuedRunState(models.TextChoices):
    QUEUED = "queued", "queued"
    STARTED = "started", "started"
    COMPLETED = "completed", "completed"  # exit code 0
    FAILED = "failed", "failed"
    INTERRUPTED = "interrupted", "interrupted"
    EXPIRED = "expired", "expired"  # not started within its pending timeout


class QueuedRun(models.Model):
    """A command that a runner executes later: in the sandbox of a lease or, without one, in a new sandbox.

    Each attempt has a Run of its own, whose id is derived from this row's and the attempt. The runner of an attempt holds a
    claim on the row (`runner_deadline`). Environment variables, stdin and prompt are encrypted, and deleted at the end."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    agent_did = models.CharField(max_length=255, verbose_name="agent")
    lease = models.ForeignKey("leases.Lease", on_delete=models.PROTECT, null=True, blank=True, related_name="queued_runs")
    pool = models.ForeignKey(Pool, on_delete=models.PROTECT, related_name="+", db_index=False)
    request = models.JSONField(help_text="Command and options, without secrets.")
    sealed = models.BinaryField(default=b"", help_text="Environment variables, stdin and prompt, encrypted.")
    actor = MessageField(max_length=255, blank=True)
    turn_number = models.BigIntegerField(
        null=True, blank=True, help_text="Of a turn. The turns of an agent in an environment are played in this order."
    )
    priority = models.SmallIntegerField(default=0, help_text="Higher first, among the runs of one agent.")
    state = models.CharField(max_length=16, choices=QueuedRunState.choices, default=QueuedRunState.QUEUED)
    repeatable = models.BooleanField(default=False, help_text="An attempt with an unknown outcome is repeated.")
    attempt = models.PositiveIntegerField(default=0, help_text="Number of attempts, with those whose command has not begun.")
    max_attempts = models.PositiveSmallIntegerField(default=1, help_text="Executions of a repeatable run.")
    queued_at = models.DateTimeField()
    available_at = models.DateTimeField(help_text="Not started before: backoff after a failed attempt.")
    expires_at = models.DateTimeField(help_text="End of the pending timeout.")
    started_at = models.DateTimeField(null=True, blank=True, help_text="Beginning of the last attempt.")
    ended_at = models.DateTimeField(null=True, blank=True)
    interrupted_at = models.DateTimeField(null=True, blank=True, help_text="Time of the request to interrupt the run.")
    runner = models.CharField(max_length=100, blank=True, help_text="Runner of the last attempt.")
    runner_deadline = models.DateTimeField(null=True, blank=True)
    exit_code = models.IntegerField(null=True, blank=True)
    error = models.JSONField(null=True, blank=True)

    class Meta:
        default_permissions = ("view",)
        permissions = [("interrupt_run", "Can interrupt queued runs and agent runs")]
        ordering = ["-queued_at", "-pk"]
        constraints = [
            models.CheckConstraint(condition=Q(state__in=QueuedRunState.values), name="queuedrun_state_known"),
            models.CheckConstraint(
                condition=Q(state__in=["queued", "started"], ended_at__isnull=True)
                | (~Q(state__in=["queued", "started"]) & Q(ended_at__isnull=False)),
                name="queuedrun_open_iff_not_ended",
            ),
            models.CheckConstraint(
                condition=Q(state="started", runner_deadline__isnull=False)
                | (~Q(state="started") & Q(runner_deadline__isnull=True)),
                name="queuedrun_runner_iff_started",
            ),
            models.CheckConstraint(condition=Q(expires_at__gt=F("queued_at")), name="queuedrun_expires_later"),
        ]
        indexes = [
            models.Index(fields=["-queued_at", "-id"], name="queuedrun_newest"),
            # Also for prefix searches: PostgreSQL cannot use an index in the order of a language for LIKE.
            models.Index(
                fields=["agent_did", "-queued_at", "-id"],
                opclasses=["varchar_pattern_ops", "timestamptz_ops", "uuid_ops"],
                name="queuedrun_agent_prefix",
            ),
            models.Index(fields=["agent_did", "-priority", "queued_at"], condition=Q(state="queued"), name="queuedrun_pending"),
            models.Index(fields=["state"], condition=Q(ended_at__isnull=True), name="queuedrun_open"),
            models.Index(fields=["expires_at"], condition=Q(state="queued"), name="queuedrun_expiry"),
            models.Index(fields=["ended_at"], condition=Q(ended_at__isnull=False), name="queuedrun_ended"),
            models.Index(fields=["runner_deadline"], condition=Q(state="started"), name="queuedrun_started"),
            models.Index(
                fields=["agent_did", "turn_number"],
                condition=Q(ended_at__isnull=True, turn_number__isnull=False),
                name="queuedrun_turn",
            ),
        ]

    def __str__(self) -> str:
        return f"queued run {self.pk}"

    @property
    def run_id(self) -> uuid.UUID:
        """Id of the Run of the last attempt, which is known after its runner has died. Before the first, of no Run."""
        return derive_run_id(self.pk, self.attempt)

    @property
    def run_attempt(self) -> int:
        """Number of the last attempt as its Run states it, limited to the range of that column."""
        return min(self.attempt, MAX_RUN_ATTEMPT)


def derive_run_id(pk: uuid.UUID, attempt: int) -> uuid.UUID:
    """Return the id of the Run of an attempt."""
    return uuid.uuid5(pk, str(attempt))


class QueueAgent(models.Model):
    """Agent whose runs are queued, with the time of its last claim: the agent that was served longest ago is next."""

    agent_did = models.CharField(max_length=255, primary_key=True)
    served_at = models.DateTimeField()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return self.agent_did

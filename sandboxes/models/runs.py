"""Runs, one command in one sandbox each: columns, constraints and indexes. The verbs are in sandboxes.runs."""

import uuid
from datetime import timedelta

from django.db import models
from django.db.models import F, Q

from sandboxes.db.message_fields import MessageField
from sandboxes.models.sandboxes import Sandbox


class RunOutcome(models.TextChoices):
    """Result of a Run."""

    OPEN = "open", "running"
    OK = "ok", "ok"
    FAILED = "failed", "failed"  # exit code other than 0
    TIMED_OUT = "timed_out", "timed out"
    OOM = "oom", "out of memory"
    LOST = "lost", "lost"  # exit code unknown: the waiting worker died, or the sandbox was destroyed
    ERROR = "error", "provider error"  # the command may not have started


class StopReason(models.TextChoices):
    """Reason for which the control plane stopped, or was asked to stop, a command."""

    INTERRUPTED = "interrupted", "interrupted"  # a request to interrupt a queued run or an agent run
    OPERATOR = "operator", "operator"  # a stop of all work, the end of a lease or the destruction of a sandbox
    RESTART = "restart", "restart of the sandbox"
    RELEASED = "released", "lease released"
    CONDITION = "condition", "end of the environment"
    TTL = "ttl", "TTL of the lease"
    MAX_TTL = "max_ttl", "max TTL of the lease"
    BUDGET = "budget", "budget"
    POLICY = "policy", "policy of the agent run"


# A command that failed without an exit code was rejected before it began: it was not executed.
NEVER_STARTED = Q(outcome=RunOutcome.FAILED, exit_code=None)
RUN_KINDS = ("exec", "turn", "file", "process")
LARGE_OUTPUT_BYTES = 8 << 10  # of a stream; a larger output leaves the row for the object store (sandboxes.state.run_outputs)
HAS_LARGE_OUTPUT = Q(  # of an ended run, in its row
    Q(stdout_bytes__gt=LARGE_OUTPUT_BYTES) | Q(stderr_bytes__gt=LARGE_OUTPUT_BYTES),
    stdout__isnull=False,
    ended_at__isnull=False,
)


class Run(models.Model):
    """One command in one sandbox, with its deadline and result. A sweep closes a Run that is open past its deadline."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    sandbox = models.ForeignKey(Sandbox, on_delete=models.PROTECT, related_name="runs", db_index=False)
    holder = models.UUIDField(null=True, blank=True)
    agent_did = models.CharField(max_length=255, blank=True)
    incarnation = models.PositiveIntegerField(default=1)
    kind = models.CharField(max_length=16, choices=[(kind, kind) for kind in RUN_KINDS], default="exec")
    turn_number = models.BigIntegerField(null=True, blank=True)
    attempt = models.PositiveSmallIntegerField(default=1, db_default=1, help_text="Above 1: a repetition of a queued run.")
    argv = models.JSONField()
    cwd = models.CharField(max_length=4096, default="/workspace")
    claimed_by = models.CharField(max_length=64, blank=True, help_text="Control-plane instance that waits for the result.")
    claim = models.UUIDField(null=True, editable=False, help_text="Token of the process that waits for the result.")
    released = models.BooleanField(
        default=False, db_default=False, editable=False, help_text="The process that waited for the result is dead."
    )
    has_recorder = models.BooleanField(
        default=False, db_default=False, editable=False, help_text="A recorder reads the output and acknowledges the result."
    )
    retry_at = models.DateTimeField(
        null=True, editable=False, help_text="No sweep closes the run before: backoff of failed tries."
    )
    env_names = models.JSONField(default=list, help_text="Names only; values may be secret.")
    stdin_bytes = models.PositiveIntegerField(default=0)
    started_at = models.DateTimeField()
    deadline_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True)
    outcome = models.CharField(max_length=16, choices=RunOutcome.choices, default=RunOutcome.OPEN)
    exit_code = models.IntegerField(null=True, blank=True)
    timed_out = models.BooleanField(default=False)
    oom = models.BooleanField(default=False)
    truncated = models.BooleanField(default=False, help_text="The output exceeded the limit of an exec.")
    stdout = models.BinaryField(
        default=b"", null=True, help_text="First bytes, up to LEASEHOLD_RUN_OUTPUT_KEPT_BYTES. NULL: moved to the object store."
    )
    stderr = models.BinaryField(default=b"", null=True)
    stdout_bytes = models.PositiveBigIntegerField(default=0, help_text="Bytes received; only the first are stored.")
    stderr_bytes = models.PositiveBigIntegerField(default=0)
    note = MessageField(max_length=500, blank=True, help_text="Cause, if the exit code does not show it.")
    stop_reason = models.CharField(
        max_length=16, choices=StopReason.choices, blank=True, db_default="", default="", editable=False,
        help_text="Reason of a request to stop the command. The process that waits for the command kills it.",
    )  # fmt: skip
    error_code = models.CharField(
        max_length=64, blank=True, db_default="", default="", editable=False,
        help_text="Code of the error that ended the run, if its command has no exit code.",
    )  # fmt: skip
    metered = models.BooleanField(default=False, editable=False, help_text="Included in usage records.")
    is_first = False  # of the sandbox since its start; set by `open_run`, not stored

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
            # A Run leaves this index when it ends, so its closing UPDATE is not heap-only. Sweeps need the index.
            models.Index(fields=["deadline_at"], condition=Q(ended_at__isnull=True), name="run_open"),
            models.Index(fields=["sandbox", "id"], condition=Q(metered=False), name="run_unmetered"),
            # Console lists of few among many. The usual run, an exec that succeeds, is in neither index.
            models.Index(fields=["-started_at", "-id"], condition=~Q(outcome__in=["ok", "open"]), name="run_not_ok"),
            models.Index(fields=["kind", "-started_at", "-id"], condition=~Q(kind="exec"), name="run_not_exec"),
            models.Index(
                fields=["outcome", "-started_at", "-id"],
                condition=~Q(outcome__in=["ok", "open", "failed"]),
                name="run_rare_outcome",
            ),
            models.Index(fields=["stop_reason", "-started_at", "-id"], condition=~Q(stop_reason=""), name="run_stopped"),
            models.Index(fields=["ended_at"], condition=HAS_LARGE_OUTPUT, name="run_large_output"),
        ]

    def __str__(self) -> str:
        return f"run {self.pk}"

    @property
    def duration(self) -> timedelta | None:
        return self.ended_at - self.started_at if self.ended_at else None

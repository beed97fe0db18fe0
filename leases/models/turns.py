"""Tables of turns, shells and idempotent requests."""

import json
from typing import Any

from django.db import models
from django.db.models import Q

from leases.models.agents import AgentKey
from leases.models.leases import Lease
from sandboxes.models import Run


class TurnManager(models.Manager["Turn"]):
    """Manager of turns that reads the state only at its first use: lists would load up to 64 KiB for each turn."""

    def get_queryset(self) -> models.QuerySet["Turn"]:
        return super().get_queryset().defer("state")


class Turn(models.Model):
    """Turn of a lease. The process that inserts the row plays the turn; a repeated number returns the stored answer."""

    lease = models.ForeignKey(Lease, on_delete=models.PROTECT, related_name="turns", db_index=False)
    number = models.BigIntegerField()
    run = models.OneToOneField(Run, on_delete=models.PROTECT, null=True, blank=True, related_name="turn")
    started_at = models.DateTimeField()
    deadline_at = models.DateTimeField(help_text="Past this time a sweep settles the turn: its worker counts as dead.")
    ended_at = models.DateTimeField(null=True, blank=True)
    skipped = models.BooleanField(default=False)
    answer = models.TextField(blank=True, help_text="Action as JSON text.")
    state = models.TextField(
        blank=True, default="", db_default="", editable=False,
        help_text="Input as JSON text. Empty: longer than turns.MAX_STATE_BYTES, or past its retention.",
    )  # fmt: skip

    objects = TurnManager()

    class Meta:
        default_permissions = ("view",)
        ordering = ["-started_at", "-pk"]
        constraints = [models.UniqueConstraint(fields=["lease", "number"], name="turn_once")]
        indexes = [
            models.Index(fields=["started_at"], condition=~Q(state=""), name="turn_with_state"),
            models.Index(fields=["deadline_at"], condition=Q(ended_at__isnull=True), name="turn_open"),
        ]

    def __str__(self) -> str:
        return f"turn {self.number}"

    @property
    def action(self) -> dict[str, Any]:
        return json.loads(self.answer) if self.answer else {}


class Shell(models.Model):
    """Named working directory and environment of a lease, in which its commands are executed. Outlives the sandbox's sleep."""

    lease = models.ForeignKey(Lease, on_delete=models.CASCADE, related_name="shells", db_index=False)
    name = models.CharField(max_length=100)
    cwd = models.CharField(max_length=4096)
    env_names = models.JSONField(default=list, help_text="Names of the variables.")
    sealed_env = models.BinaryField(editable=False, help_text="Variables as JSON, encrypted by sandboxes.db.encryption.")
    created_at = models.DateTimeField()

    class Meta:
        default_permissions = ("view",)
        ordering = ["name"]
        constraints = [models.UniqueConstraint(fields=["lease", "name"], name="shell_name_once")]

    def __str__(self) -> str:
        return self.name


class IdempotentRequest(models.Model):
    """Stored response to a POST with an Idempotency-Key. A repeated request receives it."""

    key_holder = models.ForeignKey(AgentKey, on_delete=models.CASCADE, related_name="+", db_index=False)
    key = models.CharField(max_length=255)
    fingerprint = models.CharField(max_length=64, help_text="SHA-256 of method, path and body.")
    started_at = models.DateTimeField()
    deadline_at = models.DateTimeField(help_text="Past this time a request without a response counts as abandoned.")
    claimed_by = models.CharField(
        max_length=64, blank=True, default="", db_default="", help_text="Control-plane instance that executes the request."
    )
    expires_at = models.DateTimeField(db_index=True)
    run_id = models.UUIDField(null=True, unique=True, help_text="Run that the caller named. It belongs to one key holder.")
    status_code = models.PositiveSmallIntegerField(null=True)
    body = models.TextField(blank=True)

    class Meta:
        default_permissions = ()
        constraints = [models.UniqueConstraint(fields=["key_holder", "key"], name="idempotency_key_once")]

    def __str__(self) -> str:
        return self.key

"""Tables of environments and of the signing secrets of their game servers."""

import json
import uuid
from typing import Any

from django.db import models
from django.db.models import F, Q
from django.utils import timezone


class Environment(models.Model):
    """A game, campaign or task in which agents hold leases. Its key is the environment id of the leases.

    The row is inserted with the first lease, or before by an operator. A lease that is granted after the end opens the
    environment again."""

    id = models.CharField(max_length=200, primary_key=True, editable=False)
    type = models.ForeignKey(
        "leases.EnvironmentType", to_field="name", on_delete=models.PROTECT, related_name="environments", db_index=False
    )
    phase = models.CharField(max_length=64, blank=True, help_text='Part of the game, such as "combat".')
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    started_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)
    end_reason = models.CharField(max_length=80, blank=True, help_text="operator, unused or condition:<name>.")
    outcome_text = models.TextField(blank=True, verbose_name="outcome", help_text="Result as told at the end, as JSON text.")

    class Meta:
        default_permissions = ("view",)
        permissions = [("manage_environment", "Can create, start and end environments")]
        ordering = ["-created_at", "-pk"]
        constraints = [
            models.CheckConstraint(
                condition=Q(ended_at__isnull=True, end_reason="") | (Q(ended_at__isnull=False) & ~Q(end_reason="")),
                name="environment_ended_has_reason",
            ),
        ]
        indexes = [
            models.Index(fields=["-created_at", "-id"], name="environment_newest"),
            models.Index(fields=["type", "-created_at"], name="environment_type"),
            models.Index(fields=["created_at"], condition=Q(ended_at__isnull=True), name="environment_open"),
        ]

    def __str__(self) -> str:
        return self.id

    @property
    def outcome(self) -> Any:
        return json.loads(self.outcome_text) if self.outcome_text else None

    @property
    def status(self) -> str:
        """Return created, open or ended."""
        if self.ended_at:
            return "ended"
        return "open" if self.started_at else "created"


class EnvironmentSecret(models.Model):
    """Signing secret of the game server of one environment (Standard Webhooks). Several are valid during a rotation."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    environment = models.ForeignKey(Environment, on_delete=models.CASCADE, related_name="secrets")
    sealed = models.BinaryField(editable=False, help_text="Encrypted by sandboxes.db.encryption.")
    created_at = models.DateTimeField()
    created_by = models.CharField(max_length=255, blank=True)
    valid_until = models.DateTimeField(null=True, blank=True, help_text="Set by a rotation. Empty: no end.")

    class Meta:
        default_permissions = ()
        ordering = ["-created_at"]
        constraints = [
            models.CheckConstraint(
                condition=Q(valid_until__isnull=True) | Q(valid_until__gte=F("created_at")), name="environmentsecret_valid"
            ),
        ]

    def __str__(self) -> str:
        return f"secret of {self.environment_id}"

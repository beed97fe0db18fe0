"""Tables of environments, of their participants and outcomes, and of the signing secrets of their game servers."""

import json
import uuid
from typing import Any

from django.db import models
from django.db.models import F, OuterRef, Q, Subquery, Value
from django.db.models.functions import Coalesce
from django.utils import timezone

from leases.projects.models import DEFAULT_PROJECT_ID, Project
from sandboxes.db.message_fields import MessageField


class EnvironmentQuerySet(models.QuerySet["Environment"]):
    """Environments with their outcomes."""

    def with_outcome(self) -> "EnvironmentQuerySet":
        """Load the outcome in the same query."""
        newest = EnvironmentOutcome.objects.filter(environment=OuterRef("pk")).order_by("-ended_at").values("text")[:1]
        return self.annotate(outcome_text=Coalesce(Subquery(newest), Value(""), output_field=models.TextField()))


class Environment(models.Model):
    """A game, campaign or task in which agents hold leases. Its key is the environment id of the leases.

    The row is inserted with the first lease, or before by an operator. Every lease has the environment's type and an agent of
    its project, which is a participant unless the environment is open. The statement that grants a lease checks this
    (leases.environments.entry). An operator may open an ended environment again; the outcome of each end is kept."""

    id = models.CharField(max_length=200, primary_key=True, editable=False)
    type = models.ForeignKey(
        "leases.EnvironmentType", to_field="name", on_delete=models.PROTECT, related_name="environments", db_index=False
    )
    project = models.ForeignKey(
        Project, on_delete=models.PROTECT, default=DEFAULT_PROJECT_ID, db_default=Value(DEFAULT_PROJECT_ID), related_name="+",
        help_text="Project of the agents that may enter.",
    )  # fmt: skip
    open_to_project = models.BooleanField(
        default=False, db_default=False, help_text="Every agent of the project may enter, named or not."
    )
    created_by_agent = models.BooleanField(
        default=False, db_default=False, editable=False, help_text="Created by the first lease of an agent, not by an operator."
    )
    phase = models.CharField(max_length=64, blank=True, help_text='Part of the game, such as "combat".')
    created_at = models.DateTimeField(default=timezone.now, editable=False)  # noqa: TID251 - decides nothing
    started_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)
    end_reason = models.CharField(max_length=80, blank=True, help_text="operator, unused or condition:<name>.")

    objects = EnvironmentQuerySet.as_manager()

    outcome_text: str | None = None  # of the newest outcome, "" without one; None: not read yet

    class Meta:
        default_permissions = ("view",)
        permissions = [("manage_environment", "Can create, start and end environments, and add and remove participants")]
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
            models.Index(fields=["ended_at"], condition=Q(ended_at__isnull=False), name="environment_ended"),
        ]

    def __str__(self) -> str:
        return self.id

    @property
    def outcome(self) -> Any:
        """Outcome of the last end that had one, None without. Read at the first use unless `with_outcome` loaded it."""
        if self.outcome_text is None:
            newest = self.outcomes.first()
            self.outcome_text = newest.text if newest else ""
        return json.loads(self.outcome_text) if self.outcome_text else None

    @property
    def status(self) -> str:
        """Return created, open or ended."""
        if self.ended_at:
            return "ended"
        return "open" if self.started_at else "created"


class Participant(models.Model):
    """Agent that may hold leases in an environment. Its leases end with the row."""

    environment = models.ForeignKey(Environment, on_delete=models.CASCADE, related_name="participants", db_index=False)
    agent_did = models.CharField(max_length=255, verbose_name="agent")
    added_at = models.DateTimeField()
    added_by = MessageField(max_length=255, blank=True)

    class Meta:
        default_permissions = ()
        ordering = ["agent_did"]
        constraints = [models.UniqueConstraint(fields=["environment", "agent_did"], name="participant_once")]
        indexes = [models.Index(fields=["agent_did", "environment"], name="participant_agent")]

    def __str__(self) -> str:
        return f"{self.agent_did} in {self.environment_id}"


class EnvironmentOutcome(models.Model):
    """Result of one end of an environment, given by an operator or a game server. Never changed."""

    environment = models.ForeignKey(Environment, on_delete=models.CASCADE, related_name="outcomes", db_index=False)
    ended_at = models.DateTimeField(help_text="The end to which the outcome belongs.")
    recorded_at = models.DateTimeField()
    recorded_by = MessageField(max_length=255, blank=True)
    text = models.TextField(help_text="Any JSON value, as text.")

    class Meta:
        default_permissions = ()
        ordering = ["-ended_at"]
        constraints = [models.UniqueConstraint(fields=["environment", "ended_at"], name="outcome_once_an_end")]

    def __str__(self) -> str:
        return f"outcome of {self.environment_id}"


class EnvironmentSecret(models.Model):
    """Signing secret of the game server of one environment (Standard Webhooks). Several are valid during a rotation."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    environment = models.ForeignKey(Environment, on_delete=models.CASCADE, related_name="secrets")
    sealed = models.BinaryField(editable=False, help_text="Encrypted by sandboxes.db.encryption.")
    created_at = models.DateTimeField()
    created_by = MessageField(max_length=255, blank=True)
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

"""Sandboxes, their states and transitions: columns, constraints and indexes. The verbs are in sandboxes.lifecycle and
sandboxes.pool. No row is deleted by the control plane."""

import uuid
from datetime import timedelta

from django.db import models
from django.db.models import Case, Q, Value, When

from sandboxes.models.policies import SEALED_POLICY_NAME, Policy
from sandboxes.models.pools import Pool
from sandboxes.models.transition_reasons import TransitionReason


class SandboxState(models.TextChoices):
    """lifecycle.EDGES says which follows which."""

    WARMING = "warming"  # a place is taken, a process is being started
    WARM = "warm"  # ready, nothing unsaved in it
    RUNNING = "running"  # at least one Run is open
    WAITING = "waiting"  # ready, and holds what earlier Runs left
    EVICTING = "evicting"  # its state is being stored
    COLD = "cold"  # state stored, no process
    DESTROYING = "destroying"  # given up; the provider has not yet said that it is gone
    DESTROYED = "destroyed"  # confirmed gone


IN_FLIGHT_STATES = (SandboxState.WARMING, SandboxState.EVICTING, SandboxState.DESTROYING)
ALIVE_STATES = (SandboxState.WARM, SandboxState.RUNNING, SandboxState.WAITING)
GONE_STATES = (SandboxState.DESTROYING, SandboxState.DESTROYED)


class Sandbox(models.Model):
    """One place in a pool and what fills it. Its state is written by lifecycle alone."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    pool = models.ForeignKey(Pool, on_delete=models.PROTECT, related_name="sandboxes")
    agent_did = models.CharField(max_length=255, blank=True, db_index=True)
    environment_id = models.CharField(max_length=200, blank=True)
    holder = models.UUIDField(null=True, blank=True, help_text="The lease it is held for, which is also the fence.")
    state = models.CharField(max_length=16, choices=SandboxState.choices, default=SandboxState.WARMING)
    state_since = models.DateTimeField()
    incarnation = models.PositiveIntegerField(default=1, help_text="Counts the processes this row has had.")
    provider = models.CharField(max_length=32)
    isolated = models.BooleanField(default=False)
    measured = models.BooleanField(default=False, help_text="Its provider counts what CPU and memory it uses.")
    ref = models.CharField(max_length=255, blank=True, help_text="The provider's own name for the present incarnation.")
    image = models.CharField(max_length=255, blank=True)
    memory_mib = models.PositiveIntegerField()
    millicpus = models.PositiveIntegerField()
    pids = models.PositiveIntegerField()
    slot = models.PositiveIntegerField(
        null=True, blank=True, editable=False, help_text="Its place at the egress proxy: which socket is its way out."
    )
    llm_limit = models.DecimalField(
        max_digits=18, decimal_places=9, null=True, blank=True, help_text="USD that its holder's model calls may cost."
    )
    policy = models.ForeignKey(
        Policy, on_delete=models.PROTECT, null=True, blank=True, related_name="sandboxes", help_text="Empty: sealed."
    )
    open_runs = models.PositiveIntegerField(default=0)
    idle_after = models.DurationField(default=timedelta(minutes=30), help_text="It sleeps when unused for this long.")
    last_used_at = models.DateTimeField()
    idle_at = models.DateTimeField(null=True, blank=True, help_text="When it goes to sleep, if nothing uses it before.")
    prepared = models.BooleanField(default=False, help_text="The files of its holder are in it.")
    excludes = models.JSONField(default=list, blank=True, help_text="What its snapshots leave out.")
    source = models.CharField(
        max_length=8, blank=True, choices=[("local", "local"), ("cloud", "cloud"), ("fresh", "fresh")],
        help_text="Where the state of the present incarnation came from.",
    )  # fmt: skip
    workspace_bytes = models.PositiveBigIntegerField(null=True, blank=True)
    measured_at = models.DateTimeField(null=True, blank=True)
    lost_at = models.DateTimeField(null=True, blank=True, help_text="The provider has lost it, with what was not stored.")
    warm_hits = models.PositiveIntegerField(default=0, help_text="Runs that found it alive.")
    woken_local = models.PositiveIntegerField(default=0)
    woken_cloud = models.PositiveIntegerField(default=0)
    woken_fresh = models.PositiveIntegerField(default=0)
    slept = models.PositiveIntegerField(default=0, help_text="Times it was put to sleep, for whatever reason.")
    claim = models.UUIDField(null=True, blank=True, help_text="Whoever works on an in-flight state holds this token.")
    claimed_by = models.CharField(max_length=64, blank=True, help_text="The instance of the control plane that claimed it.")
    deadline_at = models.DateTimeField(
        null=True, blank=True, help_text="Until then an in-flight state is somebody's; after it a sweep takes the next step."
    )
    tries = models.PositiveIntegerField(default=0)
    last_error = models.TextField(blank=True)
    quarantined_at = models.DateTimeField(null=True, blank=True, help_text="Destroying failed too often; ask an operator.")
    created_at = models.DateTimeField()
    destroyed_at = models.DateTimeField(null=True, blank=True)
    metered = models.BooleanField(default=False, editable=False, help_text="All of its time is in usage records.")
    tier = models.GeneratedField(
        expression=Case(
            When(state="cold", then=Value(0)),
            When(state="warm", then=Value(1)),
            When(state="waiting", then=Value(2)),
            default=Value(None),
        ),
        output_field=models.SmallIntegerField(null=True),
        db_persist=True,
        help_text="Order in which places are taken back; empty: never.",
    )

    class Meta:
        verbose_name_plural = "sandboxes"
        default_permissions = ("view",)
        permissions = [("act_on_sandbox", "Can evict, wake and destroy sandboxes")]
        ordering = ["-created_at", "-pk"]
        constraints = [
            models.CheckConstraint(condition=Q(state__in=SandboxState.values), name="sandbox_state_known"),
            models.CheckConstraint(
                condition=Q(state="running", open_runs__gt=0) | (~Q(state="running") & Q(open_runs=0)),
                name="sandbox_running_iff_open_runs",
            ),
            models.CheckConstraint(
                condition=~Q(state__in=["warming", "evicting", "destroying"]) | Q(deadline_at__isnull=False),
                name="sandbox_in_flight_has_deadline",
            ),
            models.CheckConstraint(
                condition=Q(state="destroyed", destroyed_at__isnull=False)
                | (~Q(state="destroyed") & Q(destroyed_at__isnull=True)),
                name="sandbox_destroyed_has_time",
            ),
            models.UniqueConstraint(
                fields=["holder"],
                condition=Q(holder__isnull=False) & ~Q(state__in=["destroying", "destroyed"]),
                name="sandbox_one_live_per_holder",
            ),
            models.UniqueConstraint(
                fields=["slot"], condition=Q(slot__isnull=False) & ~Q(state="destroyed"), name="sandbox_one_live_per_slot"
            ),
        ]
        indexes = [
            models.Index(fields=["holder"], name="sandbox_holder"),
            models.Index(fields=["-created_at", "-id"], name="sandbox_newest"),
            # Conditions without a value: a planner that sees only parameters can still tell that they hold.
            models.Index(
                fields=["pool", "tier", "last_used_at"], condition=Q(tier__isnull=False), name="sandbox_eviction_order"
            ),
            models.Index(fields=["deadline_at"], condition=Q(deadline_at__isnull=False), name="sandbox_in_flight"),
            models.Index(fields=["idle_at"], condition=Q(idle_at__isnull=False), name="sandbox_idle"),
            models.Index(fields=["lost_at"], condition=Q(lost_at__isnull=False), name="sandbox_lost"),
            models.Index(fields=["claim"], condition=Q(claim__isnull=False), name="sandbox_claim"),
            models.Index(fields=["pool", "state"], condition=~Q(state="destroyed"), name="sandbox_live"),
            models.Index(fields=["id"], condition=Q(metered=False), name="sandbox_unmetered"),
        ]

    def __str__(self) -> str:
        return self.sandbox_id

    @property
    def sandbox_id(self) -> str:
        """The name people use: agent and environment. Before anyone holds it, the row's id."""
        return f"{self.agent_did}::{self.environment_id}" if self.agent_did else str(self.pk)

    @property
    def rules(self) -> Policy:
        """What it may do: its policy, and the seal if it has none."""
        return self.policy or Policy(name=SEALED_POLICY_NAME)

    @property
    def name(self) -> str:
        """The provider's name for this incarnation: two incarnations are never confused."""
        return f"leasehold-{self.pk.hex}-{self.incarnation}"


class Transition(models.Model):
    """A sandbox went from one state to another: what metering reads and operators follow."""

    sandbox = models.ForeignKey(Sandbox, on_delete=models.PROTECT, related_name="transitions")
    was = models.CharField(max_length=16, blank=True)
    to = models.CharField(max_length=16, choices=SandboxState.choices)
    at = models.DateTimeField()
    holder = models.UUIDField(null=True, blank=True)
    code = models.CharField(max_length=32, blank=True, choices=TransitionReason.choices)  # empty: older than the column
    reason = models.CharField(max_length=200)
    actor = models.CharField(max_length=255, blank=True, help_text="Agent, operator or sweep that brought it about.")

    class Meta:
        default_permissions = ("view",)
        ordering = ["-at", "-pk"]
        indexes = [
            models.Index(fields=["sandbox", "-at", "-id"], name="transition_sandbox"),
            models.Index(fields=["holder", "-at", "-id"], name="transition_holder"),
            models.Index(fields=["sandbox", "id"], name="transition_in_order"),
        ]

    def __str__(self) -> str:
        return f"{self.was or 'new'} → {self.to}"

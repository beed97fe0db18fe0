"""What exists, in which state, and what ran in it: columns, constraints and indexes. The verbs are in lifecycle, pool
and runs. No row here is ever deleted by the control plane."""

import uuid
from datetime import timedelta

from django.conf import settings
from django.core.validators import MinValueValidator
from django.db import models
from django.db.models import Case, F, Q, Value, When
from django.utils import timezone

from sandboxes.background import Ending, Process
from sandboxes.calls import LlmCall, LogPosition, ModelRate
from sandboxes.policies import SEALED, Policy
from sandboxes.readings import Reading
from sandboxes.signing import MintedToken, SigningKey
from sandboxes.stored import AgentData, Attachment, DataEvent, DataFile, DataObject, DataSize, Snapshot
from sandboxes.webhooks import Delivery, Event, Webhook

__all__ = [
    "ALIVE", "GONE", "IN_FLIGHT", "RUN_KINDS", "AgentData", "Attachment", "DataEvent", "DataFile", "DataObject",
    "DataSize", "Delivery", "Ending", "Event", "LlmCall", "LogPosition", "MintedToken", "ModelRate", "Outcome", "Policy",
    "Pool", "Process", "Quota", "Reading", "Run", "Sandbox", "SigningKey", "Snapshot", "State", "Sweep", "Transition",
    "Webhook",
]  # fmt: skip


class State(models.TextChoices):
    """lifecycle.EDGES says which follows which."""

    WARMING = "warming"  # a place is taken, a process is being started
    WARM = "warm"  # ready, nothing unsaved in it
    RUNNING = "running"  # at least one Run is open
    WAITING = "waiting"  # ready, and holds what earlier Runs left
    EVICTING = "evicting"  # its state is being stored
    COLD = "cold"  # state stored, no process
    DESTROYING = "destroying"  # given up; the provider has not yet said that it is gone
    DESTROYED = "destroyed"  # confirmed gone


IN_FLIGHT = (State.WARMING, State.EVICTING, State.DESTROYING)
ALIVE = (State.WARM, State.RUNNING, State.WAITING)
GONE = (State.DESTROYING, State.DESTROYED)


def default_capacity() -> int:
    return int(settings.MAX_SANDBOXES)


def default_memory_mib() -> int:
    return int(settings.SANDBOX_MEMORY_MIB)


def default_millicpus() -> int:
    return int(settings.SANDBOX_MILLICPUS)


def default_pids() -> int:
    return int(settings.SANDBOX_PIDS)


class Pool(models.Model):
    """Where sandboxes of one kind come from, and how many there may be."""

    name = models.SlugField(max_length=63, unique=True)
    owner = models.UUIDField(
        default=uuid.uuid4, unique=True, editable=False, help_text="Label by which this pool's sandboxes are listed."
    )
    provider = models.CharField(
        max_length=32,
        blank=True,
        choices=[("docker", "docker"), ("process", "process"), ("memory", "memory")],
        help_text="Empty: what SANDBOX_PROVIDER says.",
    )
    image = models.CharField(max_length=255, blank=True, help_text="Empty: what LEASEHOLD_SANDBOX_IMAGE says.")
    capacity = models.PositiveIntegerField(
        default=default_capacity,
        validators=[MinValueValidator(1)],
        help_text="Sandboxes that may exist at once, asleep ones and those being destroyed included.",
    )
    used = models.PositiveIntegerField(default=0, editable=False)
    draining = models.BooleanField(default=False, editable=False, help_text="Takes nothing new; what it has may end.")
    warm_target = models.PositiveIntegerField(
        default=0, help_text="Sandboxes kept ready that nobody holds yet; those being started count."
    )
    warm_failures = models.PositiveIntegerField(default=0, editable=False, help_text="Failed starts in a row.")
    warm_paused_until = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="After repeated failures nothing is warmed up until then."
    )
    warm_error = models.TextField(blank=True, editable=False)
    workspace_limit_mib = models.PositiveIntegerField(
        default=2048, validators=[MinValueValidator(1)], help_text="Above this size of /workspace an exec is refused."
    )
    memory_mib = models.PositiveIntegerField(default=default_memory_mib, validators=[MinValueValidator(16)])
    millicpus = models.PositiveIntegerField(default=default_millicpus, validators=[MinValueValidator(50)])
    pids = models.PositiveIntegerField(default=default_pids, validators=[MinValueValidator(16)])
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    # What its sandboxes that are gone have counted, and what was evicted; sandboxes.stats adds those that are not gone.
    warm_hits = models.PositiveBigIntegerField(default=0, editable=False)
    woken_local = models.PositiveBigIntegerField(default=0, editable=False)
    woken_cloud = models.PositiveBigIntegerField(default=0, editable=False)
    woken_fresh = models.PositiveBigIntegerField(default=0, editable=False)
    slept = models.PositiveBigIntegerField(default=0, editable=False)
    claimed_warm = models.PositiveBigIntegerField(default=0, editable=False)
    evicted_cold = models.PositiveBigIntegerField(default=0, editable=False)
    evicted_warm = models.PositiveBigIntegerField(default=0, editable=False)
    evicted_waiting = models.PositiveBigIntegerField(default=0, editable=False)

    class Meta:
        permissions = [("drain_pool", "Can drain and resume pools")]

    def __str__(self) -> str:
        return self.name


class Quota(models.Model):
    """What one agent may hold in one pool, and holds: the counter that makes its limit hard."""

    pool = models.ForeignKey(Pool, on_delete=models.CASCADE, related_name="quotas")
    agent_did = models.CharField(max_length=255, verbose_name="agent")
    most = models.PositiveIntegerField(null=True, blank=True, help_text="Sandboxes it may have here at once; empty: no limit.")
    guaranteed = models.PositiveIntegerField(
        default=0, help_text="While it has no more than these, no place of its is taken for somebody else."
    )
    used = models.PositiveIntegerField(default=0, editable=False)

    class Meta:
        ordering = ["agent_did"]
        constraints = [
            models.UniqueConstraint(fields=["pool", "agent_did"], name="quota_once"),
            models.CheckConstraint(
                condition=Q(most__isnull=True) | Q(most__gte=F("guaranteed")),
                name="quota_guarantee_within_most",
                violation_error_message="guaranteed is at most most.",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.agent_did} in {self.pool}"


class Sandbox(models.Model):
    """One place in a pool and what fills it. Its state is written by lifecycle alone."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    pool = models.ForeignKey(Pool, on_delete=models.PROTECT, related_name="sandboxes")
    agent_did = models.CharField(max_length=255, blank=True, db_index=True)
    environment_id = models.CharField(max_length=200, blank=True)
    holder = models.UUIDField(null=True, blank=True, help_text="The lease it is held for, which is also the fence.")
    state = models.CharField(max_length=16, choices=State.choices, default=State.WARMING)
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
            models.CheckConstraint(condition=Q(state__in=State.values), name="sandbox_state_known"),
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
        return self.policy or Policy(name=SEALED)

    @property
    def name(self) -> str:
        """The provider's name for this incarnation: two incarnations are never confused."""
        return f"leasehold-{self.pk.hex}-{self.incarnation}"


class Transition(models.Model):
    """A sandbox went from one state to another: what metering reads and operators follow."""

    sandbox = models.ForeignKey(Sandbox, on_delete=models.PROTECT, related_name="transitions")
    was = models.CharField(max_length=16, blank=True)
    to = models.CharField(max_length=16, choices=State.choices)
    at = models.DateTimeField()
    holder = models.UUIDField(null=True, blank=True)
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


class Outcome(models.TextChoices):
    OPEN = "open", "running"
    OK = "ok", "ok"
    FAILED = "failed", "failed"  # the command ended with another code than 0
    TIMED_OUT = "timed_out", "timed out"
    OOM = "oom", "out of memory"
    LOST = "lost", "lost"  # whoever waited for it died, or its sandbox was destroyed under it: the exit is unknown
    ERROR = "error", "provider error"  # it may never have started


RUN_KINDS = ("exec", "turn", "file", "process")


class Run(models.Model):
    """One command in one sandbox and how it ended. Open until ended_at; never open past its deadline for long."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    sandbox = models.ForeignKey(Sandbox, on_delete=models.PROTECT, related_name="runs")
    holder = models.UUIDField(null=True, blank=True)
    agent_did = models.CharField(max_length=255, blank=True)
    incarnation = models.PositiveIntegerField(default=1)
    kind = models.CharField(max_length=16, choices=[(kind, kind) for kind in RUN_KINDS], default="exec")
    turn_number = models.BigIntegerField(null=True, blank=True)
    argv = models.JSONField()
    cwd = models.CharField(max_length=4096, default="/workspace")
    claimed_by = models.CharField(max_length=64, blank=True, help_text="The instance of the control plane that waits for it.")
    env_names = models.JSONField(default=list, help_text="Names only: values may be secret.")
    stdin_bytes = models.PositiveIntegerField(default=0)
    started_at = models.DateTimeField()
    deadline_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True)
    outcome = models.CharField(max_length=16, choices=Outcome.choices, default=Outcome.OPEN)
    exit_code = models.IntegerField(null=True, blank=True)
    timed_out = models.BooleanField(default=False)
    oom = models.BooleanField(default=False)
    truncated = models.BooleanField(default=False, help_text="Output was longer than the limit of an exec.")
    stdout = models.BinaryField(default=b"", help_text="The first bytes, up to LEASEHOLD_RUN_OUTPUT_KEPT_BYTES.")
    stderr = models.BinaryField(default=b"")
    stdout_bytes = models.PositiveBigIntegerField(default=0, help_text="Bytes received, of which the first are kept.")
    stderr_bytes = models.PositiveBigIntegerField(default=0)
    note = models.CharField(max_length=500, blank=True, help_text="Why it was closed, when the command itself cannot say.")
    metered = models.BooleanField(default=False, editable=False, help_text="It is in usage records.")

    class Meta:
        default_permissions = ("view",)
        ordering = ["-started_at", "-pk"]
        constraints = [
            models.CheckConstraint(condition=Q(outcome__in=Outcome.values), name="run_outcome_known"),
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
            models.Index(fields=["deadline_at"], condition=Q(ended_at__isnull=True), name="run_open"),
            models.Index(fields=["sandbox", "id"], condition=Q(metered=False), name="run_unmetered"),
        ]

    def __str__(self) -> str:
        return f"run {self.pk}"

    @property
    def duration(self) -> timedelta | None:
        return self.ended_at - self.started_at if self.ended_at else None


class Sweep(models.Model):
    """When a scheduled pass last ran and what it did: health is read off these rows, the worker's heartbeat included."""

    name = models.CharField(max_length=32, unique=True)
    every = models.DurationField(default=timedelta(minutes=1), help_text="How often it should succeed.")
    started_at = models.DateTimeField(null=True, blank=True)
    succeeded_at = models.DateTimeField(null=True, blank=True)
    took = models.DurationField(null=True, blank=True)
    counts = models.JSONField(default=dict)
    last_error = models.TextField(blank=True)

    class Meta:
        default_permissions = ("view",)
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

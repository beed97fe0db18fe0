"""Sandboxes, their states and transitions: columns, constraints and indexes. The verbs are in sandboxes.lifecycle and
sandboxes.pool.allocation. No row is deleted by the control plane."""

import uuid
from datetime import timedelta

from django.db import models
from django.db.models import Case, Q, Value, When

from sandboxes.db.message_fields import LongMessageField, MessageField
from sandboxes.models.hosts import Host
from sandboxes.models.policies import SEALED_POLICY_NAME, Policy
from sandboxes.models.pools import Pool
from sandboxes.models.transition_reasons import RUN_REASONS, TransitionReason
from sandboxes.providers.base import Network
from sandboxes.providers.registry import MAX_RUNTIME_CHARS


class SandboxState(models.TextChoices):
    """States of a sandbox. lifecycle.EDGES lists the allowed transitions."""

    WARMING = "warming"  # place taken, process starting
    WARM = "warm"  # ready, nothing unsaved
    RUNNING = "running"  # at least one Run is open
    WAITING = "waiting"  # ready, with unsaved changes of earlier Runs
    SUSPENDED = "suspended"  # like waiting, with frozen processes; without a claim once the provider has confirmed it
    EVICTING = "evicting"  # state being stored
    COLD = "cold"  # state stored, no process
    DESTROYING = "destroying"  # destroy requested, not yet confirmed by the provider
    DESTROYED = "destroyed"  # confirmed by the provider


class FinalPersist(models.TextChoices):
    """Part of the unsaved state that is stored before a sandbox is destroyed."""

    ALL = "all"
    DATA = "data", "/data only"  # one-shot runs return their workspace to the caller
    NONE = "none"  # an operator has discarded it, or the sandbox has withheld it in too many tries


AWAKE_STATES = (SandboxState.WARM, SandboxState.RUNNING, SandboxState.WAITING)
ALIVE_STATES = (*AWAKE_STATES, SandboxState.SUSPENDED)
# With a deadline, a worker owns a sandbox in one of these states. Only `suspended` may have none: no work is in progress then.
IN_FLIGHT_STATES = (SandboxState.WARMING, SandboxState.SUSPENDED, SandboxState.EVICTING, SandboxState.DESTROYING)
GONE_STATES = (SandboxState.DESTROYING, SandboxState.DESTROYED)


class Sandbox(models.Model):
    """One place in a pool and the container or process that fills it. Only sandboxes.lifecycle writes `state`."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    pool = models.ForeignKey(Pool, on_delete=models.PROTECT, related_name="sandboxes")
    agent_did = models.CharField(max_length=255, blank=True, db_index=True)
    environment_id = models.CharField(max_length=200, blank=True)
    holder = models.UUIDField(null=True, blank=True, help_text="Id of the lease that holds this sandbox, and its fence.")
    state = models.CharField(max_length=16, choices=SandboxState.choices, default=SandboxState.WARMING)
    state_since = models.DateTimeField()
    incarnation = models.PositiveIntegerField(default=1, help_text="Number of process starts of this row.")
    provider = models.CharField(max_length=32)
    host = models.ForeignKey(
        Host, on_delete=models.PROTECT, null=True, blank=True, related_name="sandboxes",
        help_text="Host of the current incarnation; of a cold sandbox, of the last one.",
    )  # fmt: skip
    isolated = models.BooleanField(default=False)
    network = models.CharField(
        max_length=16, choices=[(one.value, one.value) for one in Network],
        default=Network.OPEN.value, db_default=Network.OPEN.value,
        help_text="Destinations that the current incarnation reaches.",
    )  # fmt: skip
    measured = models.BooleanField(default=False, help_text="The provider reports CPU and memory use.")
    ref = models.CharField(max_length=255, blank=True, help_text="Provider's name of the current incarnation.")
    image = models.CharField(max_length=255, blank=True)
    memory_mib = models.PositiveIntegerField()
    millicpus = models.PositiveIntegerField()
    disk_mib = models.PositiveIntegerField(null=True, blank=True, help_text="Disk as requested, MiB. Empty: the vendor's.")
    gpus = models.PositiveSmallIntegerField(default=0, db_default=0)
    gpu_type = models.CharField(max_length=32, blank=True, default="", db_default="", help_text="Empty: any type, or no GPU.")
    sized = models.BooleanField(
        default=False, db_default=False, editable=False, help_text="Memory, CPU or disk was requested for this sandbox."
    )
    pids = models.PositiveIntegerField()
    runtime = models.CharField(
        max_length=MAX_RUNTIME_CHARS, blank=True, default="", db_default="",
        help_text="OCI runtime or RuntimeClass of the current incarnation. Empty: the engine's default.",
    )  # fmt: skip
    pod_uid = models.CharField(
        max_length=64, blank=True, default="", db_default="", editable=False,
        help_text="Identity of the current incarnation's Pod: another Pod of the same name is not this sandbox.",
    )  # fmt: skip
    pod_end_cause = models.CharField(
        max_length=32, blank=True, default="", db_default="", editable=False,
        help_text="FailureCause of this Pod's end, as a watch has seen it. Empty: not known.",
    )  # fmt: skip
    pod_end_message = LongMessageField(blank=True, default="", db_default="", editable=False)
    pending_since = models.DateTimeField(
        null=True,
        blank=True,
        editable=False,
        help_text="Since then the engine has no room for the sandbox.",
    )
    slot = models.PositiveIntegerField(null=True, blank=True, editable=False, help_text="Socket slot at the egress proxy.")
    slot_since = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="Start or wake that took the slot. Empty: creation of the sandbox."
    )
    llm_limit = models.DecimalField(
        max_digits=18, decimal_places=9, null=True, blank=True, help_text="Spend limit of the lease's model calls, USD."
    )
    llm_token_limit = models.BigIntegerField(
        null=True, blank=True, help_text="Token limit of the lease's model calls. Empty: no limit."
    )
    llm_enabled = models.BooleanField(
        default=True, db_default=True, editable=False, help_text="Its model calls are answered, within policy and limits."
    )
    llm_blocked_at = models.DateTimeField(
        null=True, blank=True, editable=False,
        help_text="Time from which model calls are refused: end of the grace period of an exhausted budget.",
    )  # fmt: skip
    policy = models.ForeignKey(
        Policy, on_delete=models.PROTECT, null=True, blank=True, related_name="sandboxes", help_text="Empty: sealed."
    )
    open_runs = models.PositiveIntegerField(default=0)
    idle_after = models.DurationField(default=timedelta(minutes=30), help_text="Idle time after which the sandbox is evicted.")
    suspend_after = models.DurationField(
        null=True, blank=True, help_text="Time in waiting after which the sandbox is suspended. Empty: never."
    )
    frozen = models.BooleanField(
        default=False,
        db_default=False,
        editable=False,
        help_text="Its processes may be frozen: they are resumed before the next use.",
    )
    held_until = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="Latest end of the lease that holds this sandbox, renewals included."
    )
    auto_stop = models.DurationField(
        null=True, blank=True,
        help_text="Idle time after which the vendor is to stop the sandbox. Zero: never. Empty: the provider's setting.",
    )  # fmt: skip
    auto_delete = models.DurationField(
        null=True, blank=True,
        help_text="Time after a stop at which the vendor is to delete the sandbox. Zero: never. Empty: the provider's setting.",
    )  # fmt: skip
    vendor_auto_stop = models.DurationField(
        null=True, blank=True, editable=False, help_text="Interval that is set at the vendor. Zero: never. Empty: not known."
    )
    vendor_auto_delete = models.DurationField(
        null=True, blank=True, editable=False, help_text="Interval that is set at the vendor. Zero: never. Empty: not known."
    )
    intervals_claimed_until = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="A worker is setting the vendor's intervals until then."
    )
    lifetime_ends_at = models.DateTimeField(
        null=True, blank=True, help_text="Time at which the vendor ends this incarnation. Empty: no such limit."
    )
    last_used_at = models.DateTimeField()
    idle_at = models.DateTimeField(null=True, blank=True, help_text="Time of eviction if the sandbox stays idle.")
    prepared = models.BooleanField(default=False, help_text="The lease's initial files are written.")
    excludes = models.JSONField(default=list, blank=True, help_text="Paths and patterns excluded from snapshots.")
    source = models.CharField(
        max_length=8, blank=True, choices=[("local", "local"), ("cloud", "cloud"), ("vendor", "vendor"), ("fresh", "fresh")],
        help_text="Source of the current incarnation's state.",
    )  # fmt: skip
    workspace_bytes = models.PositiveBigIntegerField(null=True, blank=True)
    measured_at = models.DateTimeField(null=True, blank=True)
    measure_seconds = models.FloatField(default=0, db_default=0, editable=False, help_text="Duration of the last measurement.")
    lost_at = models.DateTimeField(
        null=True, blank=True, help_text="Time at which the provider reported the sandbox missing. Unsaved changes are lost."
    )
    warm_hits = models.PositiveIntegerField(default=0, help_text="Runs without a wake.")
    woken_local = models.PositiveIntegerField(default=0)
    woken_cloud = models.PositiveIntegerField(default=0)
    woken_vendor = models.PositiveIntegerField(default=0, db_default=0)
    woken_fresh = models.PositiveIntegerField(default=0)
    slept = models.PositiveIntegerField(default=0, help_text="Number of evictions.")
    claim = models.UUIDField(null=True, blank=True, help_text="Token of the worker that owns the in-flight state.")
    claimed_by = models.CharField(max_length=64, blank=True, help_text="Control-plane instance that holds the claim.")
    deadline_at = models.DateTimeField(null=True, blank=True, help_text="Deadline of the claim. A sweep continues after it.")
    tries = models.PositiveIntegerField(default=0, help_text="Failed destroy attempts in a row.")
    persisted = models.BooleanField(
        default=False,
        db_default=False,
        editable=False,
        help_text="The state of this incarnation is stored, and no run has begun since.",
    )
    persist_failures = models.PositiveIntegerField(
        default=0, db_default=0, help_text="Failed attempts in a row to store the state. A run resets the count."
    )
    unreadable_tries = models.PositiveIntegerField(
        default=0,
        db_default=0,
        editable=False,
        help_text="Failed attempts in a row to read the state, with the sandbox as the cause.",
    )
    final_persist = models.CharField(
        max_length=8, choices=FinalPersist.choices, default=FinalPersist.ALL, db_default=FinalPersist.ALL, editable=False,
        help_text="Unsaved state that is stored before the sandbox is destroyed.",
    )  # fmt: skip
    last_error = LongMessageField(blank=True)
    quarantined_at = models.DateTimeField(
        null=True, blank=True, help_text="Time of quarantine. Destroy failed too often; an operator has to act."
    )
    created_at = models.DateTimeField()
    destroyed_at = models.DateTimeField(null=True, blank=True)
    metered = models.BooleanField(default=False, editable=False, help_text="All its time is in usage records.")
    tier = models.GeneratedField(
        expression=Case(
            When(state="cold", then=Value(0)),
            When(state="warm", then=Value(1)),
            When(state__in=["waiting", "suspended"], then=Value(2)),
            default=Value(None),
        ),
        output_field=models.SmallIntegerField(null=True),
        db_persist=True,
        help_text="Eviction order. Empty: never evicted.",
    )

    class Meta:
        verbose_name_plural = "sandboxes"
        default_permissions = ("view",)
        permissions = [
            ("act_on_sandbox", "Can evict, wake and destroy sandboxes"),
            ("open_terminal", "Can open terminals in sandboxes"),
        ]
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
            models.CheckConstraint(condition=~Q(state="suspended") | Q(frozen=True), name="sandbox_suspended_is_frozen"),
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
        # The state, or a column that follows from it, is part of six indexes: no change of the state is a heap-only update.
        indexes = [
            models.Index(fields=["holder"], name="sandbox_holder"),
            # Also for prefix searches: PostgreSQL cannot use an index in the order of a language for LIKE.
            models.Index(fields=["environment_id"], opclasses=["varchar_pattern_ops"], name="sandbox_environment_prefix"),
            models.Index(fields=["-created_at", "-id"], name="sandbox_newest"),
            # Conditions without a literal: the planner can prove them for a prepared statement whose values are parameters.
            models.Index(
                fields=["pool", "tier", "last_used_at"], condition=Q(tier__isnull=False), name="sandbox_eviction_order"
            ),
            models.Index(fields=["deadline_at"], condition=Q(deadline_at__isnull=False), name="sandbox_in_flight"),
            models.Index(fields=["agent_did"], condition=Q(open_runs__gt=0), name="sandbox_agent_running"),
            models.Index(fields=["idle_at"], condition=Q(idle_at__isnull=False), name="sandbox_idle"),
            models.Index(fields=["lifetime_ends_at"], condition=Q(lifetime_ends_at__isnull=False), name="sandbox_lifetime"),
            models.Index(fields=["lost_at"], condition=Q(lost_at__isnull=False), name="sandbox_lost"),
            models.Index(fields=["llm_blocked_at"], condition=Q(llm_blocked_at__isnull=False), name="sandbox_llm_blocked"),
            models.Index(fields=["claim"], condition=Q(claim__isnull=False), name="sandbox_claim"),
            models.Index(fields=["pool", "state"], condition=~Q(state="destroyed"), name="sandbox_live"),
            models.Index(fields=["id"], condition=Q(metered=False), name="sandbox_unmetered"),
        ]

    def __str__(self) -> str:
        return self.sandbox_id

    @property
    def sandbox_id(self) -> str:
        """`<agent did>::<environment>`, or the row id while no lease holds the sandbox."""
        return f"{self.agent_did}::{self.environment_id}" if self.agent_did else str(self.pk)

    @property
    def rules(self) -> Policy:
        """Effective policy: the sandbox's own, or the built-in sealed policy."""
        return self.policy or Policy(name=SEALED_POLICY_NAME)

    @property
    def name(self) -> str:
        """Provider-side name, unique for each incarnation: every provider's ref is the name."""
        return self.ref


class Transition(models.Model):
    """One state change of a sandbox. Metering and the timeline read these rows."""

    sandbox = models.ForeignKey(Sandbox, on_delete=models.PROTECT, related_name="transitions", db_index=False)
    was = models.CharField(max_length=16, blank=True)
    to = models.CharField(max_length=16, choices=SandboxState.choices)
    at = models.DateTimeField()
    holder = models.UUIDField(null=True, blank=True)
    code = models.CharField(max_length=32, choices=TransitionReason.choices)
    reason = MessageField(max_length=200)
    actor = MessageField(max_length=255, blank=True, help_text="Agent, operator or sweep that caused the transition.")

    class Meta:
        default_permissions = ("view",)
        ordering = ["-at", "-pk"]
        indexes = [
            models.Index(fields=["sandbox", "-at", "-id"], name="transition_sandbox"),
            models.Index(fields=["holder", "-at", "-id"], name="transition_holder"),
            models.Index(fields=["sandbox", "id"], name="transition_in_order"),
            # Most rows are those of runs. Without them a count over the last minutes reads few entries.
            models.Index(fields=["at"], name="transition_not_of_runs", condition=~Q(code__in=RUN_REASONS)),
        ]

    def __str__(self) -> str:
        return f"{self.was or 'new'} → {self.to}"

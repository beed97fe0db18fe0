"""Hosts: engines that run sandboxes. The verbs are in sandboxes.hosts."""

from django.db import models
from django.db.models import Value

from sandboxes.db.message_fields import LongMessageField


class Host(models.Model):
    """One engine, as seen by the control plane on its machine.

    The primary key is derived from the provider's name and the engine's id (sandboxes.hosts.registry), so that a process knows
    its hosts without a query."""

    id = models.UUIDField(primary_key=True, editable=False)
    provider = models.CharField(max_length=32, editable=False)
    engine_id = models.CharField(max_length=200, editable=False, help_text="Identity that the engine states.")
    name = models.CharField(max_length=100, unique=True, help_text="Name for operators. Initially the host name.")
    queue = models.CharField(
        max_length=100, blank=True, editable=False, help_text="Task queue of the worker that reaches this engine."
    )
    version = models.CharField(max_length=32, blank=True, editable=False, help_text="Leasehold version of that worker.")
    memory_mib = models.PositiveIntegerField(
        null=True, blank=True, editable=False, help_text="Memory of the engine's machine, MiB. Empty: not known."
    )
    created_at = models.DateTimeField(editable=False)
    heartbeat_at = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="Time at which a worker last reached the engine."
    )
    clock_offset = models.DurationField(
        null=True, blank=True, editable=False, help_text="Clock of the worker's machine minus the database's, at the heartbeat."
    )
    lost_at = models.DateTimeField(
        null=True, blank=True, editable=False,
        help_text="Time at which an operator declared the host lost. Empty again once it has returned and is cleaned up.",
    )  # fmt: skip

    # Check that a sandbox reaches the gateway alone, of a provider that has to prove it: sandboxes.sweeps.seal_checks.
    sealed = models.BooleanField(
        null=True, blank=True, editable=False, help_text="Sandboxes reach the gateway alone. Empty: not checked."
    )
    seal_checked_at = models.DateTimeField(null=True, blank=True, editable=False)
    seal_report = LongMessageField(
        blank=True, default="", db_default="", editable=False, help_text="Destinations tried, with the outcomes."
    )

    # Limits of the engine on all sandboxes, as last read: sandboxes.hosts.engine_quotas.
    quotas = models.JSONField(default=list, db_default=Value([], models.JSONField()), blank=True, editable=False)
    quotas_read_at = models.DateTimeField(null=True, blank=True, editable=False)
    quotas_error = LongMessageField(
        blank=True,
        default="",
        db_default="",
        editable=False,
        help_text="Error of the last attempt. Empty: it read the values.",
    )

    # Images of pools that the engine does not have, as last asked: sandboxes.hosts.images.
    missing_images = models.JSONField(
        null=True, blank=True, editable=False, help_text="Missing image of each pool, by the pool's name. Empty: not asked yet."
    )

    watched_until = models.DateTimeField(
        null=True, blank=True, editable=False,
        help_text="Until then one process watches for the ends of sandboxes: sandboxes.sweeps.end_watch.",
    )  # fmt: skip

    # Circuit breaker of starts, see sandboxes.pool.start_breaker.
    start_failures = models.PositiveIntegerField(
        default=0, db_default=0, editable=False, help_text="Consecutive starts for which the provider was unavailable."
    )
    start_pauses = models.PositiveIntegerField(default=0, db_default=0, editable=False, help_text="Consecutive pauses.")
    starts_paused_until = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="Starts are refused until then."
    )
    start_probing = models.BooleanField(
        default=False, db_default=False, editable=False, help_text="One start has been let through to test the provider."
    )
    start_error = LongMessageField(blank=True, default="", db_default="", editable=False)
    start_error_code = models.CharField(max_length=64, blank=True, default="", db_default="", editable=False)

    class Meta:
        default_permissions = ("view", "change")
        permissions = [("declare_host_lost", "Can declare hosts lost")]
        ordering = ["name"]
        constraints = [models.UniqueConstraint(fields=["provider", "engine_id"], name="host_once_per_engine")]

    def __str__(self) -> str:
        return self.name

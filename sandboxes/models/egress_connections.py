"""Connections of sandboxes to domains of their policy's allow list. The verbs are in sandboxes.egress.allow_list."""

from django.db import models
from django.db.models import Q

from sandboxes.db.message_fields import MessageField


class EgressConnection(models.Model):
    """One connection, or one refused attempt.

    The row is inserted before the domain name is resolved, and closed when the connection ends. Bytes are those between the
    sandbox and the upstream, including TLS."""

    class Outcome(models.TextChoices):
        OPEN = "open", "open"
        OK = "ok", "ok"  # either side closed the connection
        FAILED = "failed", "failed"  # the upstream could not be reached, or the connection broke
        CUT = "cut", "cut off"  # ended by a limit, by the end of the lease or with the proxy
        REFUSED = "refused", "refused"  # nothing was forwarded
        LOST = "lost", "lost"  # the proxy died during the connection

    connection_id = models.CharField(max_length=64, unique=True)
    sandbox = models.ForeignKey("sandboxes.Sandbox", on_delete=models.PROTECT, related_name="egress_connections")
    holder = models.UUIDField()
    agent_did = models.CharField(max_length=255, blank=True)
    environment_id = models.CharField(max_length=200, blank=True)
    run = models.ForeignKey(
        "sandboxes.Run", on_delete=models.PROTECT, null=True, blank=True, related_name="egress_connections",
        help_text="Open run at the start of the connection, if it was exactly one.",
    )  # fmt: skip
    domain = models.CharField(max_length=253, help_text="Name that the sandbox requested.")
    port = models.PositiveIntegerField()
    address = models.GenericIPAddressField(null=True, blank=True, help_text="Address to which the proxy connected.")
    started_at = models.DateTimeField()
    deadline_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True)
    outcome = models.CharField(max_length=8, choices=Outcome.choices, default=Outcome.OPEN)
    code = MessageField(max_length=64, blank=True, help_text="Reason of a refusal, a failure or an interruption.")
    sent_bytes = models.PositiveBigIntegerField(default=0, help_text="From the sandbox.")
    received_bytes = models.PositiveBigIntegerField(default=0, help_text="To the sandbox.")

    class Meta:
        verbose_name = "egress connection"
        default_permissions = ("view",)
        ordering = ["-started_at", "-pk"]
        constraints = [
            models.CheckConstraint(
                condition=Q(outcome="open", ended_at__isnull=True) | (~Q(outcome="open") & Q(ended_at__isnull=False)),
                name="egressconnection_open_iff_not_ended",
            ),
        ]
        indexes = [
            models.Index(fields=["-started_at", "-id"], name="egressconnection_newest"),
            models.Index(fields=["holder", "-started_at", "-id"], name="egressconnection_holder"),
            # Also for prefix searches: PostgreSQL cannot use an index in the order of a language for LIKE.
            models.Index(fields=["agent_did"], opclasses=["varchar_pattern_ops"], name="egressconn_agent_prefix"),
            models.Index(fields=["environment_id"], opclasses=["varchar_pattern_ops"], name="egressconn_environment_prefix"),
            models.Index(fields=["domain"], opclasses=["varchar_pattern_ops"], name="egressconn_domain_prefix"),
            models.Index(fields=["deadline_at"], condition=Q(ended_at__isnull=True), name="egressconnection_open"),
        ]

    def __str__(self) -> str:
        return f"{self.domain}:{self.port}"

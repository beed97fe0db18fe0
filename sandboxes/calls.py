"""Calls that left a sandbox for a model: what usage and cost are derived from. The verbs are in egress/."""

from decimal import Decimal

from django.db import models
from django.db.models import Q


class LlmCall(models.Model):
    """One request of a sandbox to its model. The row is written before anything is forwarded, and closed with what came
    back, so a call whose forwarder died stays visible as one whose price is not known."""

    class Outcome(models.TextChoices):
        OPEN = "open", "running"
        OK = "ok", "ok"
        FAILED = "failed", "failed"  # the upstream answered with an error, or not at all
        CUT = "cut", "cut off"  # its answer was not taken to the end: what is known of its cost is a lower bound
        REFUSED = "refused", "refused"  # it never left
        LOST = "lost", "lost"  # whoever forwarded it died

    class Priced(models.TextChoices):
        NO = "", "unpriced"
        UPSTREAM = "upstream", "by the upstream"  # a header of its answer
        RECORD = "record", "by the upstream's records"  # its own accounting, joined by the call's id
        RATE = "rate", "by rate"

    class Kind(models.TextChoices):
        LLM = "llm", "model"
        RELAY = "relay", "relay"

    call_id = models.CharField(max_length=64, unique=True)
    sandbox = models.ForeignKey("sandboxes.Sandbox", on_delete=models.PROTECT, null=True, blank=True, related_name="calls")
    holder = models.UUIDField(null=True, blank=True)
    agent_did = models.CharField(max_length=255, blank=True)
    environment_id = models.CharField(max_length=200, blank=True)
    run = models.ForeignKey("sandboxes.Run", on_delete=models.PROTECT, null=True, blank=True, related_name="calls")
    kind = models.CharField(max_length=8, choices=Kind.choices, default=Kind.LLM)
    path = models.CharField(max_length=200, blank=True)
    model = models.CharField(max_length=200, blank=True, help_text="As the upstream names it; else as it was asked for.")
    streamed = models.BooleanField(default=False)
    started_at = models.DateTimeField()
    deadline_at = models.DateTimeField()
    first_byte_at = models.DateTimeField(null=True, blank=True, help_text="When the upstream's answer began.")
    ended_at = models.DateTimeField(null=True, blank=True)
    outcome = models.CharField(max_length=8, choices=Outcome.choices, default=Outcome.OPEN)
    status = models.PositiveSmallIntegerField(null=True, blank=True, help_text="What the sandbox was answered.")
    code = models.CharField(max_length=64, blank=True, help_text="Why it was refused or failed.")
    sent_bytes = models.PositiveBigIntegerField(default=0)
    received_bytes = models.PositiveBigIntegerField(default=0)
    logged_at = models.DateTimeField(null=True, blank=True, help_text="When the proxy's own log was found to have it.")
    recorded_at = models.DateTimeField(null=True, blank=True, help_text="When the upstream's record of it was found.")
    input_tokens = models.PositiveBigIntegerField(null=True, blank=True)
    cached_tokens = models.PositiveBigIntegerField(null=True, blank=True)
    output_tokens = models.PositiveBigIntegerField(null=True, blank=True)
    cost = models.DecimalField(max_digits=18, decimal_places=9, null=True, blank=True, help_text="USD.")
    priced = models.CharField(max_length=8, choices=Priced.choices, default=Priced.NO, blank=True)

    class Meta:
        verbose_name = "model call"
        default_permissions = ("view",)
        ordering = ["-started_at", "-pk"]
        constraints = [
            models.CheckConstraint(
                condition=Q(outcome="open", ended_at__isnull=True) | (~Q(outcome="open") & Q(ended_at__isnull=False)),
                name="llmcall_open_iff_not_ended",
            ),
            models.CheckConstraint(condition=Q(cost__isnull=True) | Q(cost__gte=Decimal(0)), name="llmcall_cost_positive"),
        ]
        indexes = [
            models.Index(fields=["holder", "-started_at", "-id"], name="llmcall_holder"),
            models.Index(fields=["agent_did", "-started_at"], name="llmcall_agent"),
            models.Index(fields=["deadline_at"], condition=Q(ended_at__isnull=True), name="llmcall_open"),
        ]

    def __str__(self) -> str:
        return self.call_id

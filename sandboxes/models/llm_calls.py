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
    counted = models.BooleanField(default=False, editable=False, help_text="Its usage record is up to date with it.")
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
            models.Index(fields=["-started_at", "-id"], name="llmcall_newest"),
            models.Index(
                fields=["-started_at", "-id"],
                name="llmcall_not_ok",
                condition=Q(outcome__in=["failed", "cut", "refused", "lost"]),
            ),
            models.Index(fields=["code", "-started_at", "-id"], condition=~Q(code=""), name="llmcall_code"),
            models.Index(
                fields=["-started_at", "-id"],
                name="llmcall_to_price",
                condition=Q(kind="llm", cost__isnull=True, outcome__in=["ok", "failed", "cut", "lost"]),
            ),
            models.Index(fields=["holder", "-started_at", "-id"], name="llmcall_holder"),
            models.Index(fields=["agent_did", "-started_at"], name="llmcall_agent"),
            models.Index(fields=["deadline_at"], condition=Q(ended_at__isnull=True), name="llmcall_open"),
            models.Index(fields=["model"], condition=Q(cost__isnull=True, ended_at__isnull=False), name="llmcall_unpriced"),
            models.Index(fields=["ended_at"], condition=Q(recorded_at__isnull=True, outcome="ok"), name="llmcall_unrecorded"),
            models.Index(fields=["id"], condition=Q(counted=False), name="llmcall_uncounted"),
        ]

    def __str__(self) -> str:
        return self.call_id


class LogPosition(models.Model):
    """How far a log of others has been read. It moves in the transaction that applies what was read, so each line counts
    once, whoever reads it and wherever that one is stopped."""

    name = models.CharField(max_length=500, unique=True, help_text="Host and path: each host has logs of its own.")
    inode = models.CharField(max_length=48, help_text="Device and inode of the file that is being read.")
    head = models.CharField(
        max_length=64, blank=True, help_text="Digest of its first bytes: a file's name may come to mean another."
    )
    offset = models.PositiveBigIntegerField(default=0, help_text="Bytes of it that have been applied.")
    moved_at = models.DateTimeField()

    class Meta:
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.name}:{self.offset}"


class ModelRate(models.Model):
    """What a model's tokens cost from a moment on, for calls that nobody else puts a price on. A call keeps the price that it
    was given, whatever becomes of the rate."""

    pattern = models.CharField(
        max_length=200, help_text='Name of the model as calls show it, or of several: "gpt-4o-mini", "claude-*", "*".'
    )
    input_usd = models.DecimalField("input", max_digits=12, decimal_places=6, help_text="USD per million tokens.")
    cached_usd = models.DecimalField(
        "cached input", max_digits=12, decimal_places=6, null=True, blank=True,
        help_text="USD per million tokens read from the provider's cache. Empty: the same as input.",
    )  # fmt: skip
    output_usd = models.DecimalField("output", max_digits=12, decimal_places=6, help_text="USD per million tokens.")
    valid_from = models.DateTimeField(help_text="Calls that started before are not priced by it.")

    class Meta:
        ordering = ["pattern", "-valid_from"]
        constraints = [
            models.UniqueConstraint(fields=["pattern", "valid_from"], name="modelrate_once"),
            models.CheckConstraint(
                condition=Q(input_usd__gte=0, output_usd__gte=0) & (Q(cached_usd__isnull=True) | Q(cached_usd__gte=0)),
                name="modelrate_positive",
                violation_error_message="A rate is not below 0.",
            ),
        ]

    def __str__(self) -> str:
        return self.pattern

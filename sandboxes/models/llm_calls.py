"""Model and relay calls of sandboxes, and log positions. The verbs are in sandboxes.egress."""

from decimal import Decimal

from django.db import models
from django.db.models import Q

from sandboxes.db.message_fields import MessageField
from sandboxes.db.prefix_index import PrefixIndex


class TokenKind(models.TextChoices):
    """Kinds of quantities that vendors price separately. The kinds of one call are disjoint: each token has one kind."""

    INPUT = "input", "input"  # text, neither read from nor written to a cache
    CACHE_READ = "cache_read", "cached input"
    CACHE_WRITE_5M = "cache_write_5m", "cache write, 5 minutes"
    CACHE_WRITE_1H = "cache_write_1h", "cache write, 1 hour"
    AUDIO_INPUT = "audio_input", "audio input"
    IMAGE_INPUT = "image_input", "image input"
    OUTPUT = "output", "output"  # text, without reasoning
    REASONING = "reasoning", "reasoning"
    AUDIO_OUTPUT = "audio_output", "audio output"
    IMAGE_OUTPUT = "image_output", "image output"
    WEB_SEARCH = "web_search", "web search"  # requests, not tokens


class LlmCall(models.Model):
    """One call of a sandbox to a model or relay.

    The row is inserted before the call is forwarded, and closed with the response. A call whose proxy died is therefore stored
    too, without a price."""

    class Outcome(models.TextChoices):
        OPEN = "open", "running"
        OK = "ok", "ok"
        FAILED = "failed", "failed"  # error or no response from the upstream
        CUT = "cut", "cut off"  # response not read to its end: the known cost is a lower bound
        REFUSED = "refused", "refused"  # rejected by the proxy, never forwarded
        LOST = "lost", "lost"  # the proxy died during the call

    class Priced(models.TextChoices):
        NO = "", "unpriced"
        UPSTREAM = "upstream", "by the upstream"  # header of the response
        RECORD = "record", "by the upstream's records"  # the upstream's accounting, joined by call id
        RATE = "rate", "by rate"
        FREE = "free", "free of charge"  # the upstream charges nothing: refused requests, errors, token counts
        ESTIMATE = "estimate", "estimated"  # usage is unknown, and the price is calculated from an estimate

    class Kind(models.TextChoices):
        LLM = "llm", "model"
        RELAY = "relay", "relay"

    call_id = models.CharField(max_length=64, unique=True)
    sandbox = models.ForeignKey("sandboxes.Sandbox", on_delete=models.PROTECT, null=True, blank=True, related_name="calls")
    holder = models.UUIDField(null=True, blank=True)
    agent_did = models.CharField(max_length=255, blank=True)
    environment_id = models.CharField(max_length=200, blank=True)
    run = models.ForeignKey("sandboxes.Run", on_delete=models.SET_NULL, null=True, blank=True, related_name="calls")
    kind = models.CharField(max_length=8, choices=Kind.choices, default=Kind.LLM)
    path = MessageField(max_length=200, blank=True)
    model = models.CharField(max_length=200, blank=True, help_text="Name in the upstream's response, otherwise in the request.")
    requested_model = models.CharField(max_length=200, blank=True, default="", db_default="", help_text="Name in the request.")
    streamed = models.BooleanField(default=False)
    server = models.CharField(
        max_length=100, blank=True, default="", db_default="", help_text="Egress server process that forwards the call."
    )
    started_at = models.DateTimeField()
    deadline_at = models.DateTimeField()
    first_byte_at = models.DateTimeField(null=True, blank=True, help_text="Start of the upstream's response.")
    ended_at = models.DateTimeField(null=True, blank=True)
    outcome = models.CharField(max_length=8, choices=Outcome.choices, default=Outcome.OPEN)
    status = models.PositiveSmallIntegerField(null=True, blank=True, help_text="HTTP status sent to the sandbox.")
    code = MessageField(max_length=64, blank=True, help_text="Error code of a refused or failed call.")
    sent_bytes = models.PositiveBigIntegerField(default=0)
    received_bytes = models.PositiveBigIntegerField(default=0)
    logged_at = models.DateTimeField(
        null=True, blank=True, help_text="Time at which the proxy's access log confirmed the call."
    )
    recorded_attempts = models.JSONField(
        null=True,
        blank=True,
        editable=False,
        help_text="Cost in USD of each attempt of which the upstream has written a record.",
    )
    recorded_at = models.DateTimeField(null=True, blank=True, help_text="Time at which the upstream's record was joined.")
    input_tokens = models.PositiveBigIntegerField(null=True, blank=True)
    cached_tokens = models.PositiveBigIntegerField(null=True, blank=True)
    output_tokens = models.PositiveBigIntegerField(null=True, blank=True)
    usage = models.JSONField(null=True, blank=True, help_text="Usage as the upstream reported it.")
    token_counts = models.JSONField(null=True, blank=True, help_text="Tokens by kind, derived from the reported usage.")
    service_tier = models.CharField(max_length=32, blank=True, default="", db_default="", help_text="Tier of the upstream.")
    reserved = models.DecimalField(
        max_digits=18, decimal_places=9, null=True, blank=True,
        help_text="Estimated USD of the call, reserved until the call is settled. Empty for models without a rate.",
    )  # fmt: skip
    cost = models.DecimalField(max_digits=18, decimal_places=9, null=True, blank=True, help_text="USD.")
    metered_cost = models.DecimalField(
        max_digits=18, decimal_places=9, null=True, blank=True, editable=False,
        help_text="Part of the cost that is included in a usage record.",
    )  # fmt: skip
    reserved_tokens = models.BigIntegerField(
        null=True, blank=True, help_text="Estimated tokens of the call, reserved until the call is settled."
    )
    tokens = models.BigIntegerField(
        null=True, blank=True, help_text="Input and output. The part that the upstream did not report is an estimate."
    )
    metered_tokens = models.BigIntegerField(
        null=True, blank=True, editable=False, help_text="Part of the tokens that is included in a usage record."
    )
    counted = models.BooleanField(default=False, editable=False, help_text="Included in usage records.")
    priced = models.CharField(max_length=8, choices=Priced.choices, default=Priced.NO, blank=True)
    rate_ids = models.JSONField(null=True, blank=True, help_text="Ids of the model rates that the price was calculated from.")

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
            # Also for prefix searches: PostgreSQL cannot use an index in the order of a language for LIKE.
            models.Index(
                fields=["agent_did", "-started_at"],
                opclasses=["varchar_pattern_ops", "timestamptz_ops"],
                name="llmcall_agent_prefix",
            ),
            models.Index(fields=["environment_id"], opclasses=["varchar_pattern_ops"], name="llmcall_environment_prefix"),
            PrefixIndex(fields=["model"], name="llmcall_model_prefix"),
            models.Index(fields=["deadline_at"], condition=Q(ended_at__isnull=True), name="llmcall_open"),
            models.Index(fields=["model"], condition=Q(cost__isnull=True, ended_at__isnull=False), name="llmcall_unpriced"),
            models.Index(fields=["ended_at"], condition=Q(recorded_at__isnull=True, outcome="ok"), name="llmcall_unrecorded"),
            models.Index(fields=["id"], condition=Q(counted=False), name="llmcall_uncounted"),
            models.Index(fields=["holder"], condition=Q(counted=False), name="llmcall_holder_uncounted"),
            models.Index(fields=["server"], condition=Q(ended_at__isnull=True), name="llmcall_server_open"),
        ]

    def __str__(self) -> str:
        return self.call_id


class LogPosition(models.Model):
    """Read position in an append-only log file.

    The position advances in the transaction that applies the lines, so each line is applied exactly once, with any number of
    readers and after crashes."""

    name = models.CharField(max_length=500, unique=True, help_text="Host and path of the log file.")
    inode = models.CharField(max_length=48, help_text="Device and inode of the file.")
    head = models.CharField(max_length=64, blank=True, help_text="Digest of the first bytes, to detect a replaced file.")
    offset = models.PositiveBigIntegerField(default=0, help_text="Bytes applied.")
    moved_at = models.DateTimeField()

    class Meta:
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.name}:{self.offset}"

"""Totals of model calls by model: tokens and cost."""

from uuid import UUID

from django.db import models
from django.db.models import Exists, F, Q, Value
from django.db.models.functions import Coalesce

from billing.models.accounts import Account
from billing.models.period_totals import COSTS_WATERMARK, TOTALS_WATERMARK
from billing.models.usage import Watermark


class ModelTotal(models.Model):
    """Sums of the model calls to one model in one period: of one lease and day, or of the periods of PeriodTotal.

    Derived with the period totals (billing.model_totals). The costs of a lease and day add up to its cost record. The amounts
    are whole numbers, so that sums of totals are exact. A table of its own, because the version before writes cost records and
    period totals without a model."""

    class Period(models.TextChoices):
        LEASE_DAY = "lday", "day of one lease"
        DAY = "day", "day of all agents"
        AGENT_DAY = "aday", "day of one agent"
        AGENT_MONTH = "amonth", "month of one agent"

    period = models.CharField(max_length=8, choices=Period.choices)
    day = models.DateField(help_text="First day of the period.")
    account = models.ForeignKey(Account, on_delete=models.PROTECT, related_name="+", db_index=False)
    provider = models.CharField(max_length=32, blank=True)
    model = models.CharField(max_length=200, blank=True)
    agent_did = models.CharField(max_length=255, blank=True, verbose_name="agent", help_text="Empty: all agents, or none.")
    environment_id = models.CharField(max_length=200, blank=True, help_text="Only of the day of one lease.")
    holder = models.UUIDField(null=True, blank=True, help_text="Lease id, only of the day of one lease.")
    records = models.PositiveBigIntegerField(help_text="Number of usage records in the total.")
    calls = models.BigIntegerField()
    unpriced = models.BigIntegerField(help_text="Number of model calls with unknown cost.")
    usd = models.BigIntegerField("USD", help_text="In billionths.")
    estimated_usd = models.BigIntegerField("estimated, USD", help_text="Estimated part of the cost, in billionths.")
    input_tokens = models.BigIntegerField(help_text="Includes tokens read from and written to the cache.")
    cached_tokens = models.BigIntegerField(help_text="Part of the input that was read from the cache.")
    cache_written_tokens = models.BigIntegerField(help_text="Part of the input that was written to the cache.")
    output_tokens = models.BigIntegerField()
    estimated_tokens = models.BigIntegerField(
        null=True, help_text="Estimated tokens, beside those that the upstreams reported. Empty: written by a version before."
    )

    class Meta:
        default_permissions = ()
        constraints = [
            models.UniqueConstraint(
                "period", "day", "account", "provider", "model", "agent_did", "environment_id",
                Coalesce("holder", Value(UUID(int=0), models.UUIDField())),
                name="modeltotal_once",
            ),
            models.CheckConstraint(
                condition=Q(
                    records__gt=0, calls__gte=0, unpriced__gte=0, usd__gte=0, estimated_usd__gte=0,
                    estimated_usd__lte=F("usd"), input_tokens__gte=0, cached_tokens__gte=0, cache_written_tokens__gte=0,
                    output_tokens__gte=0,
                ),
                name="modeltotal_positive",
            ),
        ]  # fmt: skip
        indexes = [
            models.Index(fields=["agent_did", "period", "day"], name="modeltotal_agent"),
            models.Index(fields=["holder", "day"], condition=Q(period="lday"), name="modeltotal_holder"),
            models.Index(fields=["environment_id"], condition=Q(period="lday"), name="modeltotal_environment"),
            models.Index(fields=["id"], condition=Q(estimated_tokens__isnull=True), name="modeltotal_outdated"),
        ]

    @classmethod
    def are_derived(cls) -> bool:
        """Return whether the totals are those of all cost records. Not after an upgrade, or a pass of the version before."""
        marks = Watermark.objects.filter(name__in=(COSTS_WATERMARK, TOTALS_WATERMARK))
        outdated = Exists(cls.objects.filter(estimated_tokens__isnull=True))
        found = {name: (at, is_outdated) for name, at, is_outdated in marks.values_list("name", "at", outdated)}
        costs = found.get(COSTS_WATERMARK)
        return costs is None or (found.get(TOTALS_WATERMARK) == costs and not costs[1])

    @classmethod
    def are_outdated(cls) -> bool:
        """Return whether a version before wrote some of the totals, without the estimated tokens. The next pass derives all."""
        return cls.objects.filter(estimated_tokens__isnull=True).exists()

    def __str__(self) -> str:
        return f"{self.model or 'calls without a model'}, {self.get_period_display()} {self.day}"

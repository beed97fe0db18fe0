"""Totals of cost records and of sandbox time by day and by month."""

from django.db import models
from django.db.models import F, Q

from billing.models.accounts import Account
from billing.models.rates import BillableItem
from billing.models.usage import Watermark

COSTS_WATERMARK = "costs"
TOTALS_WATERMARK = "totals-3"  # a version with further amounts takes another name: its first pass derives all totals anew


class PeriodTotal(models.Model):
    """Sums of the cost records of one account, provider and item, or of billable sandbox time, in one period.

    Derived by the pass that writes the records, in the same transaction (billing.period_totals). The amounts are whole numbers,
    so that sums of totals are exact."""

    class Period(models.TextChoices):
        DAY = "day", "day of all agents"
        AGENT_DAY = "aday", "day of one agent"
        AGENT_MONTH = "amonth", "month of one agent"

    period = models.CharField(max_length=8, choices=Period.choices)
    day = models.DateField(help_text="First day of the period.")
    account = models.ForeignKey(Account, on_delete=models.PROTECT, related_name="+", db_index=False)
    provider = models.CharField(max_length=32, blank=True)
    item = models.CharField(max_length=8, choices=BillableItem.choices, blank=True, help_text="Empty: sandbox time.")
    agent_did = models.CharField(max_length=255, blank=True, verbose_name="agent", help_text="Empty: all agents, or none.")
    records = models.PositiveBigIntegerField(help_text="Number of records in the total.")
    quantity = models.BigIntegerField(help_text="In billionths of the unit.")
    free = models.BigIntegerField(help_text="In billionths of the unit.")
    usd = models.BigIntegerField("USD", help_text="In billionths.")
    unpriced = models.BigIntegerField(default=0, db_default=0, help_text="Number of model calls with unknown cost.")
    estimated_usd = models.BigIntegerField(
        "estimated, USD", default=0, db_default=0, help_text="Estimated part of the cost, in billionths."
    )
    micros = models.BigIntegerField("sandbox time", help_text="In microseconds.")

    class Meta:
        default_permissions = ()
        constraints = [
            models.UniqueConstraint(
                fields=["period", "day", "account", "provider", "item", "agent_did"], name="periodtotal_once"
            ),
            models.CheckConstraint(
                condition=Q(records__gt=0, quantity__gte=0, free__gte=0, free__lte=F("quantity"), usd__gte=0, micros__gte=0),
                name="periodtotal_positive",
            ),
        ]
        indexes = [models.Index(fields=["agent_did", "period", "day"], name="periodtotal_agent")]

    @classmethod
    def are_valid(cls) -> bool:
        """Return whether the totals are those of all records."""
        marks = dict(Watermark.objects.filter(name__in=(COSTS_WATERMARK, TOTALS_WATERMARK)).values_list("name", "at"))
        return TOTALS_WATERMARK in marks and marks[TOTALS_WATERMARK] == marks.get(COSTS_WATERMARK)

    def __str__(self) -> str:
        return f"{self.item or 'time'} of the {self.get_period_display()} {self.day}"

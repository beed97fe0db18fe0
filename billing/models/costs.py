"""Cost records: usage of one lease, item and day multiplied by one rate."""

from decimal import Decimal
from uuid import UUID

from django.db import models
from django.db.models import F, Q, Value
from django.db.models.functions import Coalesce

from billing.models.accounts import Account
from billing.models.rates import BillableItem, Rate


class CostRecord(models.Model):
    """Quantity and cost of one lease's use of one item on one day, by one rate.

    Derived only from usage, rates and memberships: deleted and derived again, it is the same to the last digit."""

    account = models.ForeignKey(Account, on_delete=models.PROTECT, related_name="costs", db_index=False)
    day = models.DateField()
    provider = models.CharField(max_length=32, blank=True)
    item = models.CharField(max_length=8, choices=BillableItem.choices)
    agent_did = models.CharField(max_length=255, blank=True, verbose_name="agent")
    holder = models.UUIDField(null=True, blank=True, help_text="Lease id. Empty for sandboxes without a lease and for plans.")
    environment_id = models.CharField(max_length=200, blank=True)
    rate = models.ForeignKey(
        Rate, on_delete=models.PROTECT, null=True, blank=True, related_name="costs", help_text="Empty for model calls."
    )
    whole = models.CharField(max_length=40, help_text="Quantity as a whole number of base units, such as microseconds x MiB.")
    quantity = models.DecimalField(max_digits=18, decimal_places=9, help_text="In units of the item.")
    free = models.DecimalField(
        max_digits=18, decimal_places=9, default=Decimal(0), help_text="Part of the quantity within the allowance."
    )
    usd = models.DecimalField("USD", max_digits=18, decimal_places=9)
    unpriced = models.PositiveBigIntegerField(default=0, db_default=0, help_text="Number of model calls with unknown cost.")
    estimated_usd = models.DecimalField(
        "estimated, USD", max_digits=18, decimal_places=9, default=Decimal(0), db_default=Decimal(0),
        help_text="Estimated part of the cost.",
    )  # fmt: skip

    class Meta:
        default_permissions = ("view",)
        ordering = ["-day", "account", "provider", "item", "-pk"]
        constraints = [
            models.UniqueConstraint(
                "day", "account", "provider", "item", "agent_did", "environment_id",
                Coalesce("holder", Value(UUID(int=0), models.UUIDField())),
                Coalesce("rate", Value(0), output_field=models.BigIntegerField()),
                name="cost_once",
            ),
            models.CheckConstraint(
                condition=Q(quantity__gte=0, usd__gte=0, free__gte=0, free__lte=F("quantity")), name="cost_positive"
            ),
            models.CheckConstraint(
                condition=Q(item="llm", rate__isnull=True) | (~Q(item="llm") & Q(rate__isnull=False)), name="cost_has_its_rate"
            ),
        ]  # fmt: skip
        indexes = [
            models.Index(fields=["account", "day"], name="cost_account"),
            models.Index(fields=["holder", "day"], name="cost_holder"),
            # Also for prefix searches: PostgreSQL cannot use an index in the order of a language for LIKE.
            models.Index(fields=["agent_did", "day"], opclasses=["varchar_pattern_ops", "date_ops"], name="cost_agent_prefix"),
            models.Index(fields=["environment_id"], opclasses=["varchar_pattern_ops"], name="cost_environment_prefix"),
        ]

    def __str__(self) -> str:
        return f"{self.item} on {self.day}"

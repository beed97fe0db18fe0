"""Dated prices of tokens, by model and kind. The verbs are in sandboxes.egress.model_pricing and sandboxes.egress.prices."""

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator
from django.db import models, transaction
from django.db.models import Exists, OuterRef, Q
from django.utils import timezone

from sandboxes.db import database_time
from sandboxes.db.message_fields import MessageField
from sandboxes.models.llm_calls import TokenKind

INSERT_BATCH_SIZE = 500
MILLION = 1_000_000
KEY_COLUMNS = ("pattern", "kind", "tokens_from", "tier", "valid_from")
IS_WILDCARD = Q(pattern__contains="*") | Q(pattern__contains="?") | Q(pattern__contains="[")


class TokenRate(models.Model):
    """Price of a million units of one kind for the models that match a pattern, from `valid_from` on.

    A rate that has begun never changes, because priced calls refer to it. A new price is a new row with a later start. A wrong
    price is corrected by a new row with the same start, which supersedes the earlier one. A rate may begin in the past: calls
    that have a price keep it until they are priced again (sandboxes.egress.repricing), and calls without one are priced."""

    pattern = models.CharField(max_length=200, help_text='Model name or pattern: "gpt-4o-mini", "claude-*", "*".')
    is_pattern = models.GeneratedField(
        expression=models.Case(models.When(IS_WILDCARD, then=models.Value(True)), default=models.Value(False)),
        output_field=models.BooleanField(), db_persist=True, editable=False,
    )  # fmt: skip
    kind = models.CharField(max_length=16, choices=TokenKind.choices)
    tokens_from = models.PositiveBigIntegerField(
        default=0, help_text="Applies to calls with at least as many input tokens of all kinds. 0: to all calls."
    )
    tier = models.CharField(
        max_length=32,
        blank=True,
        default="",
        help_text='Service tier, such as "priority" or "flex". Empty: all tiers without a rate of their own.',
    )
    usd_per_million = models.DecimalField(
        "USD per million", max_digits=15, decimal_places=9, validators=[MinValueValidator(Decimal(0))],
        help_text="USD per million tokens, or per million web searches.",
    )  # fmt: skip
    valid_from = models.DateTimeField(help_text="Start of validity, by the start time of the call.")
    source = MessageField(max_length=300, blank=True, help_text="Page or file that states the price.")
    note = MessageField(max_length=300, blank=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)  # noqa: TID251 - shown only

    class Meta:
        verbose_name = "model rate"
        default_permissions = ("add", "change", "view")
        ordering = ["pattern", "kind", "tier", "tokens_from", "-valid_from"]
        constraints = [
            models.CheckConstraint(
                condition=Q(usd_per_million__gte=0),
                name="tokenrate_positive",
                violation_error_message="A rate may not be negative.",
            ),
        ]
        indexes = [
            models.Index(fields=["valid_from"], condition=Q(is_pattern=True), name="tokenrate_patterns"),
            models.Index(fields=["pattern", "kind", "tokens_from", "tier", "valid_from"], name="tokenrate_key"),
        ]

    def __str__(self) -> str:
        parts = [self.pattern, self.get_kind_display(), f"tier {self.tier}" if self.tier else ""]
        return ", ".join(filter(None, [*parts, f"from {self.tokens_from:,} input tokens" if self.tokens_from else ""]))

    @property
    def stated_usd(self) -> Decimal:
        """USD per unit in which vendors state the price, `unit_name`."""
        return self.usd_per_million * get_unit(self.kind)[0] / MILLION

    @property
    def unit_name(self) -> str:
        return get_unit(self.kind)[1]

    @property
    def key(self) -> tuple[Any, ...]:
        """Columns of which the newest row counts."""
        return tuple(getattr(self, name) for name in KEY_COLUMNS)

    def clean(self) -> None:
        """Refuse to change a rate that has begun: priced calls refer to it."""
        stored = TokenRate.objects.filter(pk=self.pk).first() if self.pk else None
        if stored and stored.valid_from <= database_time.now():
            raise ValidationError("This rate has begun and cannot change. Add a rate that begins later.")

    def save(self, *args: Any, **options: Any) -> None:
        """Save the rate. Raise ValidationError if it is invalid or its stored row has begun."""
        self.full_clean()
        super().save(*args, **options)

    def delete(self, *args: Any, **options: Any) -> tuple[int, dict[str, int]]:
        """Delete a rate that has not begun. Raise ValidationError if the stored row has begun."""
        with transaction.atomic():
            stored = TokenRate.objects.select_for_update().filter(pk=self.pk).first()
            if stored and stored.valid_from <= database_time.now():
                raise ValidationError("This rate has begun and cannot be deleted.")
            return super().delete(*args, **options)


def get_unit(kind: str) -> tuple[int, str]:
    """Return the number of tokens or requests to which vendors state the price of a kind, and its name."""
    return (1000, "1,000 searches") if kind == TokenKind.WEB_SEARCH else (MILLION, "million tokens")


def find_superseded(rates: "models.QuerySet[TokenRate] | None" = None) -> "models.QuerySet[TokenRate]":
    """Return the rates that a newer row with the same key replaces."""
    newer = TokenRate.objects.filter(pk__gt=OuterRef("pk"), **{name: OuterRef(name) for name in KEY_COLUMNS})
    return (TokenRate.objects.all() if rates is None else rates).filter(Exists(newer))


def save_rates(rates: Sequence[TokenRate]) -> None:
    """Save new rates, all or none. Raise ValidationError for the first one that is invalid or exists with its price.

    A rate with the key of an existing one and another price supersedes it."""
    check_rates(rates)
    with transaction.atomic():
        TokenRate.objects.bulk_create(rates, batch_size=INSERT_BATCH_SIZE)


def check_rates(rates: Sequence[TokenRate]) -> None:
    """Raise ValidationError for the first of the new rates that is invalid or exists with its price."""
    for rate in rates:
        rate.clean_fields()
    if len({rate.key for rate in rates}) < len(rates):
        raise ValidationError("Two of these rates are for the same model, kind, tier and start.")
    present = find_present(rates)
    for rate in rates:
        if (found := present.get(rate.key)) and found.usd_per_million == rate.usd_per_million:
            raise ValidationError({"valid_from": f"A rate with this start and price exists: {rate}."})


def find_present(rates: Sequence[TokenRate]) -> dict[tuple[Any, ...], TokenRate]:
    """Return the stored rates with the keys of `rates`, by key: those that `rates` supersede, or repeat."""
    keys = {rate.key for rate in rates}
    starts = {rate.valid_from for rate in rates}
    return {row.key: row for row in TokenRate.objects.filter(valid_from__in=starts).order_by("pk") if row.key in keys}

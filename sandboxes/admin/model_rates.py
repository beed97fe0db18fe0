"""Operators' page on what models' tokens cost, for calls that nobody else prices."""

from datetime import timedelta
from typing import Any

from django.contrib import admin
from django.db.models import Q
from django.http import HttpRequest
from django.utils import timezone
from django.utils.safestring import SafeString
from unfold.decorators import display

from sandboxes.admin.base import Fact, Page, Slice
from sandboxes.admin.formatting import age, ago, badge, rows, stamp, usd
from sandboxes.egress import model_pricing
from sandboxes.models import ModelRate

MOST = 1000  # unpriced calls that are counted


@admin.register(ModelRate)
class ModelRateAdmin(Page):
    list_display = ["pattern", "input", "cached", "output", "since", "condition"]
    search_fields = ["pattern__startswith"]
    search_help_text = "Model, or its beginning"
    ordering = ["pattern", "-valid_from"]
    slices = {
        "all": Slice("All", "No rate yet: calls cost what the upstream says, and are unpriced where it says nothing."),
        "later": Slice("Later", "Every rate is valid already.", lambda now: Q(valid_from__gt=now)),
    }
    fields = ["pattern", "input_usd", "cached_usd", "output_usd", "valid_from"]

    @display(description="Input, USD a million")
    def input(self, row: ModelRate) -> str:
        return usd(row.input_usd)

    @display(description="Cached input")
    def cached(self, row: ModelRate) -> str:
        return usd(row.cached_usd) if row.cached_usd is not None else "as input"

    @display(description="Output")
    def output(self, row: ModelRate) -> str:
        return usd(row.output_usd)

    @display(description="Valid from")
    def since(self, row: ModelRate) -> SafeString | str:
        left = row.valid_from - timezone.now()
        return stamp(row.valid_from, f"in {age(left)}") if left > timedelta(0) else ago(row.valid_from)

    @display(description="State")
    def condition(self, row: ModelRate) -> SafeString:
        return badge("ok", "valid") if row.valid_from <= timezone.now() else badge("waiting", "later")

    def page(self, request: HttpRequest, row: ModelRate) -> dict[str, Any]:
        waiting = model_pricing.priceable([row], now=timezone.now())[:MOST].count()
        return {
            "facts": [
                Fact("State", self.condition(row), note=stamp(row.valid_from)),
                Fact(
                    "Calls it will price",
                    f"{waiting:,}" if waiting < MOST else f"{MOST:,} or more",
                    note="that ended without a price; a sweep prices them each minute",
                    href=rows("sandboxes_llmcall", slice="unpriced"),
                ),
            ]
        }

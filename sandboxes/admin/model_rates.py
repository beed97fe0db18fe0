"""Console pages of model rates: token prices for calls that the upstream does not price."""

from datetime import timedelta
from typing import Any

from django.contrib import admin
from django.db.models import Q
from django.http import HttpRequest
from django.utils.safestring import SafeString
from unfold.decorators import display

from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.formatting import (
    SummaryField,
    build_changelist_url,
    format_age,
    format_usd,
    render_badge,
    render_time_ago,
    render_timestamp,
)
from sandboxes.admin.base.model_admin import ConsoleModelAdmin
from sandboxes.db import database_time
from sandboxes.egress import model_pricing
from sandboxes.models import ModelRate

MAX_UNPRICED_CALLS_COUNTED = 1000


@admin.register(ModelRate)
class ModelRateAdmin(ConsoleModelAdmin):
    list_display = ["pattern", "input", "cached", "output", "since", "condition"]
    search_fields = ["pattern__startswith"]
    search_help_text = "Model (prefix)"
    ordering = ["pattern", "-valid_from"]
    list_tabs = {
        "all": ListTab("All", "No model rates yet. Without one, a call is unpriced unless the upstream reports its cost."),
        "later": ListTab("Scheduled", "No scheduled rates: every rate is in force.", lambda now: Q(valid_from__gt=now)),
    }
    fields = ["pattern", "input_usd", "cached_usd", "output_usd", "valid_from"]

    @display(description="Input, USD per million")
    def input(self, row: ModelRate) -> str:
        return format_usd(row.input_usd)

    @display(description="Cached input")
    def cached(self, row: ModelRate) -> str:
        return format_usd(row.cached_usd) if row.cached_usd is not None else "as input"

    @display(description="Output")
    def output(self, row: ModelRate) -> str:
        return format_usd(row.output_usd)

    @display(description="Valid from")
    def since(self, row: ModelRate) -> SafeString | str:
        left = row.valid_from - database_time.now()
        return (
            render_timestamp(row.valid_from, f"in {format_age(left)}")
            if left > timedelta(0)
            else render_time_ago(row.valid_from)
        )

    @display(description="State")
    def condition(self, row: ModelRate) -> SafeString:
        return render_badge("ok", "in force") if row.valid_from <= database_time.now() else render_badge("waiting", "scheduled")

    def get_page_context(self, request: HttpRequest, row: ModelRate) -> dict[str, Any]:
        waiting = model_pricing.find_priceable([row], now=database_time.now())[:MAX_UNPRICED_CALLS_COUNTED].count()
        return {
            "facts": [
                SummaryField("State", self.condition(row), note=render_timestamp(row.valid_from)),
                SummaryField(
                    "Unpriced calls",
                    f"{waiting:,}" if waiting < MAX_UNPRICED_CALLS_COUNTED else f"{MAX_UNPRICED_CALLS_COUNTED:,} or more",
                    note="matching this rate; priced by the next sweep",
                    href=build_changelist_url("sandboxes_llmcall", slice="unpriced"),
                ),
            ]
        }

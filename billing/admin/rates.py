"""Console pages of rates: prices per unit and provider."""

from datetime import UTC, datetime, timedelta
from typing import Any

from django import forms
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db.models import Exists, OuterRef, Q
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.decorators import display

from billing.dates import start_of_day
from billing.instance_types import INSTANCE_SIZES
from billing.metering import STORE_PROVIDER
from billing.models import BillableItem, Rate
from billing.pricing import format_decimal
from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.formatting import (
    SummaryField,
    build_changelist_url,
    format_age,
    format_usd,
    render_badge,
    render_timestamp,
    render_two_lines,
)
from sandboxes.admin.base.model_admin import ConsoleModelAdmin
from sandboxes.admin.base.scheduled_rates import build_delete_action
from sandboxes.db import database_time
from sandboxes.formatting import suggest_match
from sandboxes.providers.registry import PROVIDERS
from sandboxes.providers.remote.configuration import is_configured

# Rates of other providers, and of vendors without an account here, serve estimates only.
AVAILABLE_PROVIDERS = [name for name in PROVIDERS if is_configured(name)]
AVAILABLE_PROVIDERS_FILTER = Q(provider__in=[*AVAILABLE_PROVIDERS, STORE_PROVIDER])
ITEM_LABELS = {
    BillableItem.TIME: "sandbox time", BillableItem.MEMORY: "memory", BillableItem.CPU: "CPU", BillableItem.DISK: "disk",
    BillableItem.GPU: "GPUs",
    BillableItem.SUSPENSION: "suspended memory", BillableItem.STORAGE: "storage", BillableItem.REQUEST: "requests (runs)",
    BillableItem.PLAN: "plan", BillableItem.LLM: "model calls",
}  # fmt: skip
ESTIMATE_PROVIDERS = ["cloudflare", "daytona", "modal", "runloop", "langsmith", "kubernetes"]  # shipped rates, for estimates
UNIT_LABELS = {
    BillableItem.TIME: "sandbox-hour", BillableItem.MEMORY: "GiB-hour", BillableItem.CPU: "vCPU-minute",
    BillableItem.DISK: "GB-hour", BillableItem.GPU: "GPU-hour",
    BillableItem.SUSPENSION: "GiB-hour", BillableItem.STORAGE: "GB-month",
    BillableItem.REQUEST: "request", BillableItem.PLAN: "month", BillableItem.LLM: "call",
}  # fmt: skip


class RateForm(forms.ModelForm):
    """Rate of a known provider and instance type: a rate under any other name would price nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "provider" in self.fields:  # absent on read-only pages
            self.fields["provider"].help_text = (
                f"One of {', '.join([*AVAILABLE_PROVIDERS, STORE_PROVIDER])} ({STORE_PROVIDER}: agents' stored data), "
                f"or for estimates {', '.join(ESTIMATE_PROVIDERS)}."
            )
            self.fields[
                "instance_type"
            ].help_text = "Size that the provider sells, such as basic of cloudflare, or type of a GPU. Leave empty for all."

    def clean_provider(self) -> str:
        provider: str = self.cleaned_data["provider"]
        known = [*PROVIDERS, STORE_PROVIDER, *ESTIMATE_PROVIDERS]
        if provider not in known:
            raise ValidationError(f"There is no such provider.{suggest_match(provider, known)}")
        return provider

    def clean_instance_type(self) -> str:
        name, provider = self.cleaned_data["instance_type"].strip(), self.cleaned_data.get("provider")
        if self.data.get("item") == BillableItem.GPU:
            return name
        sizes = INSTANCE_SIZES.get(provider or "", {})
        if name and provider and name not in sizes:
            reason = "has no such instance type" if sizes else "sells no instance types. Leave this empty"
            raise ValidationError(f"{provider} {reason}.{suggest_match(name, sizes)}")
        return name


def _exists_newer_rate(**conditions: Any) -> Exists:
    """Match rates that have a later rate for the same provider, instance type and item."""
    same = {name: OuterRef(name) for name in ("provider", "instance_type", "item")}
    return Exists(Rate.objects.filter(**same, valid_from__gt=OuterRef("valid_from"), **conditions))


def build_in_force_filter(now: datetime) -> Q:
    return Q(valid_from__lte=now) & ~Q(_exists_newer_rate(valid_from__lte=now))


DELETE_RATE_ACTION = build_delete_action(Rate, dependent="cost", refusal_reason="already in force; its costs depend on it")


@admin.register(Rate)
class RateAdmin(ConsoleModelAdmin):
    form = RateForm
    list_display = ["item_label", "price", "free", "since", "condition"]
    search_fields = ["provider__startswith"]
    search_help_text = "Provider (prefix)"
    ordering = ["provider", "item", "instance_type", "-valid_from"]
    list_tabs = {
        "now": ListTab(
            "In force",
            "No rates in force: usage is recorded but costs nothing. Add a rate for your provider.",
            lambda now: build_in_force_filter(now) & AVAILABLE_PROVIDERS_FILTER,
        ),
        "own": ListTab(
            "Price not set",
            "No missing prices: every provider has a rate of its own.",
            lambda now: Q(own=True) & ~Q(_exists_newer_rate()),
        ),
        "later": ListTab("Scheduled", "No scheduled rates: every rate is in force.", lambda now: Q(valid_from__gt=now)),
        "other": ListTab(
            "Other providers",
            "No rates of other providers. These are providers that a pool cannot use, kept for estimates.",
            lambda now: build_in_force_filter(now) & ~AVAILABLE_PROVIDERS_FILTER,
        ),
        "all": ListTab("All", "No rates yet. Add one to price usage."),
    }
    fields = ["provider", "item", "instance_type", "usd", "allowance", "by_use", "valid_from", "source"]
    labels = {"usd": "USD per unit", "allowance": "Monthly allowance (units)", "by_use": "Charge measured use"}
    row_actions = {"withdraw": DELETE_RATE_ACTION}

    def has_change_permission(self, request: HttpRequest, obj: Rate | None = None) -> bool:
        """A rate in force is read-only, because costs depend on it. Add a new rate to change a price."""
        in_force = obj is not None and obj.valid_from <= database_time.now()
        return not in_force and bool(super().has_change_permission(request, obj))

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, Any]:
        tomorrow = database_time.now().astimezone(UTC).date() + timedelta(days=1)
        return {"valid_from": start_of_day(tomorrow), **super().get_changeform_initial_data(request)}

    @display(description="Provider and item")
    def item_label(self, row: Rate) -> SafeString:
        return render_two_lines(f"{row.provider} {row.instance_type}".strip(), ITEM_LABELS[BillableItem(row.item)])

    @display(description="Price")
    def price(self, row: Rate) -> str:
        return f"{format_usd(row.usd)} {format_unit(row)}"

    @display(description="Monthly allowance")
    def free(self, row: Rate) -> str:
        return format_decimal(row.allowance) if row.allowance else "–"

    @display(description="Valid from")
    def since(self, row: Rate) -> SafeString:
        left = row.valid_from - database_time.now()
        return render_timestamp(
            row.valid_from, f"in {format_age(left)}" if left > timedelta(0) else f"{row.valid_from:%Y-%m-%d}"
        )

    @display(description="State")
    def condition(self, row: Rate) -> SafeString:
        if row.valid_from > database_time.now():
            return render_badge("waiting", "scheduled")
        return render_badge("skipped", "price not set") if row.own else render_badge("ok", "in force")

    def get_page_context(self, request: HttpRequest, row: Rate) -> dict[str, Any]:
        in_force = row.valid_from <= database_time.now()
        add = reverse(
            "admin:billing_rate_add", query={"provider": row.provider, "item": row.item, "instance_type": row.instance_type}
        )
        another = format_html('<a class="lh-link" href="{}">Add a new rate</a>', add)
        return {
            "facts": [
                SummaryField(
                    "State", self.condition(row), note=another if in_force and self.has_add_permission(request) else ""
                ),
                SummaryField("Price", f"{format_usd(row.usd)} {format_unit(row)}", note=_describe_measure(row)),
                SummaryField("Valid from", self.since(row), note=render_timestamp(row.valid_from)),
                SummaryField(
                    "Costs",
                    "cost records with this rate",
                    href=build_changelist_url("billing_costrecord", slice="all", rate__id__exact=row.pk),
                ),
            ]
        }


def format_unit(row: Rate) -> str:
    """Name the unit of a rate's price, such as "USD per sandbox-hour"."""
    return f"USD per {UNIT_LABELS[BillableItem(row.item)]}"


def _describe_measure(row: Rate) -> str:
    return "measured use where available, else the allocated amount" if row.by_use else ""

"""Operators' page on what a unit costs at each provider."""

from datetime import UTC, datetime, timedelta
from typing import Any

from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db import IntegrityError
from django.db.models import Exists, OuterRef, Q
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.decorators import action, display
from unfold.enums import ActionVariant

from billing.dates import start_of_day
from billing.models import BillableItem, Rate
from billing.pricing import format_decimal
from sandboxes.admin.base import AdminAction, ConsoleModelAdmin, ListTab, ReasonForm, SummaryField
from sandboxes.admin.formatting import (
    build_changelist_url,
    format_age,
    format_usd,
    render_badge,
    render_timestamp,
    render_two_lines,
)


def _exists_newer_rate(**more: Any) -> Exists:
    """A later rate for the same."""
    same = {name: OuterRef(name) for name in ("provider", "instance_type", "item")}
    return Exists(Rate.objects.filter(**same, valid_from__gt=OuterRef("valid_from"), **more))


def build_in_force_filter(now: datetime) -> Q:
    return Q(valid_from__lte=now) & ~Q(_exists_newer_rate(valid_from__lte=now))


def _delete_rate(rate: Rate, actor: str, why: str, now: datetime) -> bool:
    """The row that is asked about keeps its number, for the log."""
    try:
        get_object_or_404(Rate, pk=rate.pk).delete()
    except (ValidationError, IntegrityError):  # it has begun meanwhile, or something was priced by it
        return False
    return True


DELETE_RATE_ACTION = AdminAction(
    title="Delete rate",
    warning="It has not begun, so nothing was priced by it. What it would have replaced stays in force.",
    done="deleted",
    refusal_reason="it has begun, and what it priced stays",
    legal=lambda rate: rate.valid_from > timezone.now(),
    verb=_delete_rate,
)


@admin.register(Rate)
class RateAdmin(ConsoleModelAdmin):
    list_display = ["what", "price", "free", "since", "condition"]
    search_fields = ["provider__startswith"]
    search_help_text = "Provider, or its beginning"
    ordering = ["provider", "item", "instance_type", "-valid_from"]
    slices = {
        "now": ListTab("In force", "No rate is in force: nothing costs anything.", build_in_force_filter),
        "own": ListTab(
            "Set your own",
            "Every provider's price is known.",
            lambda now: Q(own=True) & ~Q(_exists_newer_rate()),
        ),
        "later": ListTab("Later", "Every rate has begun.", lambda now: Q(valid_from__gt=now)),
        "all": ListTab("All", "No rate yet."),
    }
    fields = ["provider", "item", "instance_type", "usd", "allowance", "by_use", "valid_from", "source"]
    labels = {"usd": "USD for one unit", "allowance": "Free in a month"}
    acts = {"withdraw": DELETE_RATE_ACTION}
    actions_detail = ["withdraw"]

    def has_change_permission(self, request: HttpRequest, obj: Rate | None = None) -> bool:
        """One that has begun is read: what it priced stays. A new price is a new rate."""
        begun = obj is not None and obj.valid_from <= timezone.now()
        return not begun and bool(super().has_change_permission(request, obj))

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, Any]:
        tomorrow = timezone.now().astimezone(UTC).date() + timedelta(days=1)
        return {"valid_from": start_of_day(tomorrow), **super().get_changeform_initial_data(request)}

    @display(description="What")
    def what(self, row: Rate) -> SafeString:
        return render_two_lines(f"{row.provider} {row.instance_type}".strip(), BillableItem(row.item).label)

    @display(description="USD for one unit")
    def price(self, row: Rate) -> str:
        return format_usd(row.usd)

    @display(description="Free in a month")
    def free(self, row: Rate) -> str:
        return format_decimal(row.allowance) if row.allowance else "–"

    @display(description="Valid from")
    def since(self, row: Rate) -> SafeString:
        left = row.valid_from - timezone.now()
        return render_timestamp(
            row.valid_from, f"in {format_age(left)}" if left > timedelta(0) else f"{row.valid_from:%Y-%m-%d}"
        )

    @display(description="State")
    def condition(self, row: Rate) -> SafeString:
        if row.valid_from > timezone.now():
            return render_badge("waiting", "later")
        return render_badge("skipped", "set your own") if row.own else render_badge("ok", "begun")

    def page(self, request: HttpRequest, row: Rate) -> dict[str, Any]:
        begun = row.valid_from <= timezone.now()
        add = reverse(
            "admin:billing_rate_add", query={"provider": row.provider, "item": row.item, "instance_type": row.instance_type}
        )
        another = format_html('<a class="lh-link" href="{}">Add a new price</a>', add)
        return {
            "facts": [
                SummaryField("State", self.condition(row), note=another if begun and self.has_add_permission(request) else ""),
                SummaryField("USD for one unit", format_usd(row.usd), note=_describe_unit(row)),
                SummaryField("Valid from", self.since(row), note=render_timestamp(row.valid_from)),
                SummaryField(
                    "Priced by it",
                    "cost records",
                    href=build_changelist_url("billing_costrecord", slice="all", rate__id__exact=row.pk),
                ),
            ]
        }

    def has_withdraw_permission(self, request: HttpRequest, object_id: str | None = None) -> bool:
        """Whoever may change one that has not begun may as well take it back."""
        return request.user.has_perm("billing.change_rate")

    def after(self, act: AdminAction, row: Rate, form: ReasonForm) -> str:
        """The page of one that is gone is not there."""
        return (
            super().after(act, row, form) if Rate.objects.filter(pk=row.pk).exists() else build_changelist_url("billing_rate")
        )

    @action(
        description="Delete…",
        permissions=["withdraw"],
        icon="delete",
        variant=ActionVariant.DANGER,
        dialog=DELETE_RATE_ACTION.dialog,
    )
    def withdraw(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, DELETE_RATE_ACTION, form)


def _describe_unit(row: Rate) -> str:
    by_use = ", as used where that is measured" if row.by_use else ""
    return f"unit: {BillableItem(row.item).label}{by_use}"

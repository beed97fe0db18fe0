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

from billing.dates import midnight
from billing.models import Priced, Rate
from billing.pricing import plain
from sandboxes.admin.base import Act, Fact, Page, Reason, Slice
from sandboxes.admin.formatting import age, badge, rows, stamp, two, usd


def _newer(**more: Any) -> Exists:
    """A later rate for the same."""
    same = {name: OuterRef(name) for name in ("provider", "instance_type", "item")}
    return Exists(Rate.objects.filter(**same, valid_from__gt=OuterRef("valid_from"), **more))


def in_force(now: datetime) -> Q:
    return Q(valid_from__lte=now) & ~Q(_newer(valid_from__lte=now))


def _delete(rate: Rate, actor: str, why: str, now: datetime) -> bool:
    """The row that is asked about keeps its number, for the log."""
    try:
        get_object_or_404(Rate, pk=rate.pk).delete()
    except (ValidationError, IntegrityError):  # it has begun meanwhile, or something was priced by it
        return False
    return True


DELETE = Act(
    title="Delete rate",
    warning="It has not begun, so nothing was priced by it. What it would have replaced stays in force.",
    done="deleted",
    illegal="it has begun, and what it priced stays",
    legal=lambda rate: rate.valid_from > timezone.now(),
    verb=_delete,
)


@admin.register(Rate)
class RateAdmin(Page):
    list_display = ["what", "price", "free", "since", "condition"]
    search_fields = ["provider__startswith"]
    search_help_text = "Provider, or its beginning"
    ordering = ["provider", "item", "instance_type", "-valid_from"]
    slices = {
        "now": Slice("In force", "No rate is in force: nothing costs anything.", in_force),
        "own": Slice(
            "Set your own",
            "Every provider's price is known.",
            lambda now: Q(own=True) & ~Q(_newer()),
        ),
        "later": Slice("Later", "Every rate has begun.", lambda now: Q(valid_from__gt=now)),
        "all": Slice("All", "No rate yet."),
    }
    fields = ["provider", "item", "instance_type", "usd", "allowance", "by_use", "valid_from", "source"]
    labels = {"usd": "USD for one unit", "allowance": "Free in a month"}
    acts = {"withdraw": DELETE}
    actions_detail = ["withdraw"]

    def has_change_permission(self, request: HttpRequest, obj: Rate | None = None) -> bool:
        """One that has begun is read: what it priced stays. A new price is a new rate."""
        begun = obj is not None and obj.valid_from <= timezone.now()
        return not begun and bool(super().has_change_permission(request, obj))

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, Any]:
        tomorrow = timezone.now().astimezone(UTC).date() + timedelta(days=1)
        return {"valid_from": midnight(tomorrow), **super().get_changeform_initial_data(request)}

    @display(description="What")
    def what(self, row: Rate) -> SafeString:
        return two(f"{row.provider} {row.instance_type}".strip(), Priced(row.item).label)

    @display(description="USD for one unit")
    def price(self, row: Rate) -> str:
        return usd(row.usd)

    @display(description="Free in a month")
    def free(self, row: Rate) -> str:
        return plain(row.allowance) if row.allowance else "–"

    @display(description="Valid from")
    def since(self, row: Rate) -> SafeString:
        left = row.valid_from - timezone.now()
        return stamp(row.valid_from, f"in {age(left)}" if left > timedelta(0) else f"{row.valid_from:%Y-%m-%d}")

    @display(description="State")
    def condition(self, row: Rate) -> SafeString:
        if row.valid_from > timezone.now():
            return badge("waiting", "later")
        return badge("skipped", "set your own") if row.own else badge("ok", "begun")

    def page(self, request: HttpRequest, row: Rate) -> dict[str, Any]:
        begun = row.valid_from <= timezone.now()
        add = reverse(
            "admin:billing_rate_add", query={"provider": row.provider, "item": row.item, "instance_type": row.instance_type}
        )
        another = format_html('<a class="lh-link" href="{}">Add a new price</a>', add)
        return {
            "facts": [
                Fact("State", self.condition(row), note=another if begun and self.has_add_permission(request) else ""),
                Fact("USD for one unit", usd(row.usd), note=_unit(row)),
                Fact("Valid from", self.since(row), note=stamp(row.valid_from)),
                Fact("Priced by it", "cost records", href=rows("billing_costrecord", slice="all", rate__id__exact=row.pk)),
            ]
        }

    def has_withdraw_permission(self, request: HttpRequest, object_id: str | None = None) -> bool:
        """Whoever may change one that has not begun may as well take it back."""
        return request.user.has_perm("billing.change_rate")

    def after(self, act: Act, row: Rate, form: Reason) -> str:
        """The page of one that is gone is not there."""
        return super().after(act, row, form) if Rate.objects.filter(pk=row.pk).exists() else rows("billing_rate")

    @action(
        description="Delete…", permissions=["withdraw"], icon="delete", variant=ActionVariant.DANGER, dialog=DELETE.dialog
    )  # fmt: skip
    def withdraw(self, request: HttpRequest, form: Reason, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, DELETE, form)


def _unit(row: Rate) -> str:
    by_use = ", as used where that is measured" if row.by_use else ""
    return f"unit: {Priced(row.item).label}{by_use}"

"""Operators' pages on whose account an agent's usage is, and from which day on."""

from dataclasses import replace
from datetime import date, timedelta
from typing import Any

from django import forms
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db.models import OuterRef, Q, QuerySet, Subquery
from django.http import HttpRequest
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.contrib.filters.admin import RelatedDropdownFilter
from unfold.decorators import display

from billing.admin.formatting import cost_so_far
from billing.dates import BEGINNING, day_of
from billing.models import HOUSE, Account, Membership
from sandboxes.admin.base import Fact, Held, Page, Slice, all_fields
from sandboxes.admin.formatting import badge, link, rows, two


def today() -> date:
    return day_of(timezone.now())


def began(row: Membership) -> str:
    return "the beginning" if row.since <= BEGINNING else str(row.since)


def spans(found: QuerySet[Membership]) -> QuerySet[Membership]:
    """With when each ends, and whose the agent is then: what `end` says."""
    then = Membership.objects.filter(agent_did=OuterRef("agent_did"), since__gt=OuterRef("since")).order_by("since")
    return found.annotate(
        then_since=Subquery(then.values("since")[:1]), then_account=Subquery(then.values("account__name")[:1])
    )  # fmt: skip


def end(row: Any) -> tuple[date, str] | None:
    """Its last day, and the account after it."""
    return (row.then_since - timedelta(days=1), row.then_account) if row.then_since else None


def in_words(row: Membership) -> str:
    """From when to when, such as "from 2026-11-01 to 2026-11-14, then lab"."""
    last = end(row)
    return f"from {began(row)} to {last[0]}, then {last[1]}" if last else f"from {began(row)} on"


def of_account(account: Account, most: int) -> list[tuple[Membership, str]]:
    """Its members, now and to come, in words. Nobody says who is in the house: all others are."""
    to_come = Q(pk__in=Membership.objects.on(today()).values("pk")) | Q(since__gt=today())
    found = spans(Membership.objects.filter(to_come, account=account)).order_by("agent_did", "since")[:most]
    return [(row, in_words(row)) for row in found]


def account_of(did: str) -> Fact:
    """Whose account an agent's usage is today."""
    row = Membership.objects.on(today()).filter(agent_did=did).select_related("account").first()
    if row is None:
        return Fact("Account", HOUSE, note="it is a member of no other")
    return Fact("Account", link("billing_membership", row.pk, row.account), note=f"from {began(row)} on")


class MembershipForm(forms.ModelForm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "account" in self.fields:  # it is not where somebody only reads
            self.fields["account"].help_text = f"To leave an account is to move to the {HOUSE}."
        if "since" in self.fields and self.instance.pk:
            self.fields["since"].required, self.fields["since"].help_text = True, "The first day, UTC, in no closed month."

    def clean(self) -> dict[str, Any] | None:
        """A new one says something new. One that is there may be changed to what was so before: then it is taken back."""
        said = super().clean()
        if said and not self.errors and self.instance.pk is None:
            was = Membership.objects.on(said["since"] or today()).filter(agent_did=said["agent_did"]).first()
            if said["account"].name == (was.account.name if was else HOUSE):
                raise ValidationError({"account": f"It belongs to {said['account']} then already."})
        return said


@admin.register(Membership)
class MembershipAdmin(Held, Page):
    form = MembershipForm
    list_display = ["agent_did", "of", "span", "condition"]
    list_filter = [("account", RelatedDropdownFilter)]
    list_select_related = ["account"]
    search_fields = ["agent_did__startswith", "account__name__startswith"]
    search_help_text = "Agent or account, or its beginning"
    ordering = ["agent_did", "-since"]
    slices = {
        "now": Slice(
            "Now",
            "Every agent's usage is the house's: none is a member of another account.",
            lambda now: Q(pk__in=Membership.objects.on(day_of(now)).values("pk")),
        ),
        "later": Slice("Later", "No agent is about to move.", lambda now: Q(since__gt=day_of(now))),
        "before": Slice(
            "Before",
            "No agent has moved yet.",
            lambda now: Q(since__lte=day_of(now)) & ~Q(pk__in=Membership.objects.on(day_of(now)).values("pk")),
        ),
        "all": Slice("All", "No agent is, or was, a member of an account."),
    }
    fields = ["agent_did", "account", "since"]
    labels = {"since": "From"}
    change_form_outer_after_template = "admin/billing/membership/history.html"

    def get_fieldsets(self, request: HttpRequest, obj: Membership | None = None) -> Any:
        if obj and not self.has_change_permission(request, obj):
            return all_fields(*self.fields)
        return super().get_fieldsets(request, obj)

    def get_readonly_fields(self, request: HttpRequest, obj: Membership | None = None) -> list[str]:
        return ["agent_did"] if obj else []

    def has_change_permission(self, request: HttpRequest, obj: Membership | None = None) -> bool:
        """One that began in what is closed is read. A move is a new one."""
        return bool(super().has_change_permission(request, obj)) and not (obj is not None and obj.fixed)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Membership]:
        return spans(super().get_queryset(request))

    @display(description="Account")
    def of(self, row: Membership) -> SafeString:
        return link("billing_account", row.account_id, row.account)

    @display(description="From")
    def span(self, row: Membership) -> SafeString | str:
        last = end(row)
        return two(began(row), f"to {last[0]}, then {last[1]}") if last else began(row)

    @display(description="State")
    def condition(self, row: Membership) -> SafeString:
        return _state(row)

    def page(self, request: HttpRequest, row: Membership) -> dict[str, Any]:
        history = [*spans(Membership.objects.filter(agent_did=row.agent_did)).select_related("account").order_by("-since")]
        fixed, row = row.fixed, next(each for each in history if each.pk == row.pk)  # a form that is refused has changed it
        last = end(row)
        href = reverse("admin:billing_membership_add", query={"agent_did": row.agent_did})
        move = format_html('<a class="lh-link" href="{}">Move it</a>', href)
        return {
            "facts": [
                self.agent(row.agent_did),
                Fact(
                    "Account", link("billing_account", row.account_id, row.account), note="pays for what it uses in that time"
                ),
                Fact("From", began(row), note="closed, and stays so" if fixed else ""),
                Fact("To", last[0] if last else "no end", note=f"then {last[1]}" if last else ""),
                Fact("State", _state(row), note=move if self.has_add_permission(request) else ""),
                replace(cost_so_far(agent_did=row.agent_did, account__id__exact=row.account_id), note=f"in {row.account}"),
            ],
            "history": [(each, in_words(each), _state(each)) for each in history],
            "first": history[-1].since > BEGINNING,
            "all_of_it": rows("billing_membership", slice="all", agent_did=row.agent_did),
        }


def _state(row: Membership) -> SafeString:
    if row.since > today():
        return badge("waiting", "later")
    last = end(row)
    return badge("over") if last and last[0] < today() else badge("ok", "now")


__all__ = ["MembershipAdmin", "MembershipForm", "account_of", "of_account"]

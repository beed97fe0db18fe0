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

from billing.admin.formatting import build_total_cost_field
from billing.dates import EPOCH_DATE, to_utc_date
from billing.models import HOUSE_ACCOUNT_NAME, Account, Membership
from sandboxes.admin.base import ConsoleModelAdmin, HolderDisplayMixin, ListTab, SummaryField, build_all_fields_fieldset
from sandboxes.admin.formatting import build_changelist_url, render_admin_link, render_badge, render_two_lines


def get_today() -> date:
    return to_utc_date(timezone.now())


def format_start(row: Membership) -> str:
    return "the beginning" if row.since <= EPOCH_DATE else str(row.since)


def annotate_end(found: QuerySet[Membership]) -> QuerySet[Membership]:
    """With when each ends, and whose the agent is then: what `end` says."""
    then = Membership.objects.filter(agent_did=OuterRef("agent_did"), since__gt=OuterRef("since")).order_by("since")
    return found.annotate(
        then_since=Subquery(then.values("since")[:1]), then_account=Subquery(then.values("account__name")[:1])
    )  # fmt: skip


def get_end(row: Any) -> tuple[date, str] | None:
    """Its last day, and the account after it."""
    return (row.then_since - timedelta(days=1), row.then_account) if row.then_since else None


def describe_period(row: Membership) -> str:
    """From when to when, such as "from 2026-11-01 to 2026-11-14, then lab"."""
    last = get_end(row)
    return f"from {format_start(row)} to {last[0]}, then {last[1]}" if last else f"from {format_start(row)} on"


def list_members(account: Account, most: int) -> list[tuple[Membership, str]]:
    """Its members, now and to come, in words. Nobody says who is in the house: all others are."""
    to_come = Q(pk__in=Membership.objects.on(get_today()).values("pk")) | Q(since__gt=get_today())
    found = annotate_end(Membership.objects.filter(to_come, account=account)).order_by("agent_did", "since")[:most]
    return [(row, describe_period(row)) for row in found]


def build_account_field(did: str) -> SummaryField:
    """Whose account an agent's usage is today."""
    row = Membership.objects.on(get_today()).filter(agent_did=did).select_related("account").first()
    if row is None:
        return SummaryField("Account", HOUSE_ACCOUNT_NAME, note="it is a member of no other")
    return SummaryField(
        "Account", render_admin_link("billing_membership", row.pk, row.account), note=f"from {format_start(row)} on"
    )


class MembershipForm(forms.ModelForm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "account" in self.fields:  # it is not where somebody only reads
            self.fields["account"].help_text = f"To leave an account is to move to the {HOUSE_ACCOUNT_NAME}."
        if "since" in self.fields and self.instance.pk:
            self.fields["since"].required, self.fields["since"].help_text = True, "The first day, UTC, in no closed month."

    def clean(self) -> dict[str, Any] | None:
        """A new one says something new. One that is there may be changed to what was so before: then it is taken back."""
        said = super().clean()
        if said and not self.errors and self.instance.pk is None:
            was = Membership.objects.on(said["since"] or get_today()).filter(agent_did=said["agent_did"]).first()
            if said["account"].name == (was.account.name if was else HOUSE_ACCOUNT_NAME):
                raise ValidationError({"account": f"It belongs to {said['account']} then already."})
        return said


@admin.register(Membership)
class MembershipAdmin(HolderDisplayMixin, ConsoleModelAdmin):
    form = MembershipForm
    list_display = ["agent_did", "of", "span", "condition"]
    list_filter = [("account", RelatedDropdownFilter)]
    list_select_related = ["account"]
    search_fields = ["agent_did__startswith", "account__name__startswith"]
    search_help_text = "Agent or account, or its beginning"
    ordering = ["agent_did", "-since"]
    slices = {
        "now": ListTab(
            "Now",
            "Every agent's usage is the house's: none is a member of another account.",
            lambda now: Q(pk__in=Membership.objects.on(to_utc_date(now)).values("pk")),
        ),
        "later": ListTab("Later", "No agent is about to move.", lambda now: Q(since__gt=to_utc_date(now))),
        "before": ListTab(
            "Before",
            "No agent has moved yet.",
            lambda now: Q(since__lte=to_utc_date(now)) & ~Q(pk__in=Membership.objects.on(to_utc_date(now)).values("pk")),
        ),
        "all": ListTab("All", "No agent is, or was, a member of an account."),
    }
    fields = ["agent_did", "account", "since"]
    labels = {"since": "From"}
    change_form_outer_after_template = "admin/billing/membership/history.html"

    def get_fieldsets(self, request: HttpRequest, obj: Membership | None = None) -> Any:
        if obj and not self.has_change_permission(request, obj):
            return build_all_fields_fieldset(*self.fields)
        return super().get_fieldsets(request, obj)

    def get_readonly_fields(self, request: HttpRequest, obj: Membership | None = None) -> list[str]:
        return ["agent_did"] if obj else []

    def has_change_permission(self, request: HttpRequest, obj: Membership | None = None) -> bool:
        """One that began in what is closed is read. A move is a new one."""
        return bool(super().has_change_permission(request, obj)) and not (obj is not None and obj.fixed)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Membership]:
        return annotate_end(super().get_queryset(request))

    @display(description="Account")
    def of(self, row: Membership) -> SafeString:
        return render_admin_link("billing_account", row.account_id, row.account)

    @display(description="From")
    def span(self, row: Membership) -> SafeString | str:
        last = get_end(row)
        return render_two_lines(format_start(row), f"to {last[0]}, then {last[1]}") if last else format_start(row)

    @display(description="State")
    def condition(self, row: Membership) -> SafeString:
        return _render_membership_state(row)

    def page(self, request: HttpRequest, row: Membership) -> dict[str, Any]:
        history = [
            *annotate_end(Membership.objects.filter(agent_did=row.agent_did)).select_related("account").order_by("-since")
        ]
        fixed, row = row.fixed, next(each for each in history if each.pk == row.pk)  # a form that is refused has changed it
        last = get_end(row)
        href = reverse("admin:billing_membership_add", query={"agent_did": row.agent_did})
        move = format_html('<a class="lh-link" href="{}">Move it</a>', href)
        return {
            "facts": [
                self.agent(row.agent_did),
                SummaryField(
                    "Account",
                    render_admin_link("billing_account", row.account_id, row.account),
                    note="pays for what it uses in that time",
                ),
                SummaryField("From", format_start(row), note="closed, and stays so" if fixed else ""),
                SummaryField("To", last[0] if last else "no end", note=f"then {last[1]}" if last else ""),
                SummaryField("State", _render_membership_state(row), note=move if self.has_add_permission(request) else ""),
                replace(
                    build_total_cost_field(agent_did=row.agent_did, account__id__exact=row.account_id), note=f"in {row.account}"
                ),
            ],
            "history": [(each, describe_period(each), _render_membership_state(each)) for each in history],
            "first": history[-1].since > EPOCH_DATE,
            "all_memberships_url": build_changelist_url("billing_membership", slice="all", agent_did=row.agent_did),
        }


def _render_membership_state(row: Membership) -> SafeString:
    if row.since > get_today():
        return render_badge("waiting", "later")
    last = get_end(row)
    return render_badge("over") if last and last[0] < get_today() else render_badge("ok", "now")


__all__ = ["MembershipAdmin", "MembershipForm", "build_account_field", "list_members"]

"""Console pages of memberships: the account that pays for an agent, by date."""

from dataclasses import replace
from datetime import date, timedelta
from typing import Any

from django import forms
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db.models import OuterRef, Q, QuerySet, Subquery
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.contrib.filters.admin import RelatedDropdownFilter
from unfold.decorators import display

from billing.admin.formatting import build_total_cost_field
from billing.dates import EPOCH_DATE, to_utc_date
from billing.models import HOUSE_ACCOUNT_NAME, Account, Membership
from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.formatting import (
    SummaryField,
    build_changelist_url,
    render_admin_link,
    render_badge,
    render_two_lines,
)
from sandboxes.admin.base.model_admin import ConsoleModelAdmin, build_all_fields_fieldset
from sandboxes.admin.base.registry import build_agent_field, get_reference
from sandboxes.db import database_time


def get_today() -> date:
    return to_utc_date(database_time.now())


def format_start(row: Membership) -> str:
    return "the beginning" if row.since <= EPOCH_DATE else str(row.since)


def annotate_end(memberships: QuerySet[Membership]) -> QuerySet[Membership]:
    """Annotate memberships with the start and the account of the agent's next membership, as read by `get_end`."""
    following = Membership.objects.filter(agent_did=OuterRef("agent_did"), since__gt=OuterRef("since")).order_by("since")
    return memberships.annotate(
        next_since=Subquery(following.values("since")[:1]), next_account=Subquery(following.values("account__name")[:1])
    )  # fmt: skip


def get_end(row: Any) -> tuple[date, str] | None:
    """Return the last day of a membership and the account that follows, or None if it has no end."""
    return (row.next_since - timedelta(days=1), row.next_account) if row.next_since else None


def describe_period(row: Membership) -> str:
    """Format the period of a membership, such as "from 2026-11-01 to 2026-11-14, then lab"."""
    last = get_end(row)
    return f"from {format_start(row)} to {last[0]}, then {last[1]}" if last else f"since {format_start(row)}"


def list_members(account: Account, limit: int) -> list[tuple[Membership, str]]:
    """List present and scheduled memberships of an account with their periods.

    Agents that were never moved belong to the house account without a membership."""
    present_or_scheduled = Q(pk__in=Membership.objects.on(get_today()).values("pk")) | Q(since__gt=get_today())
    memberships = annotate_end(Membership.objects.filter(present_or_scheduled, account=account)).order_by("agent_did", "since")[
        :limit
    ]
    return [(row, describe_period(row)) for row in memberships]


def build_account_field(did: str) -> SummaryField:
    """Build the account that pays for an agent today."""
    row = Membership.objects.on(get_today()).filter(agent_did=did).select_related("account").first()
    if row is None:
        return SummaryField("Account", HOUSE_ACCOUNT_NAME, note="default account")
    return SummaryField(
        "Account", render_admin_link("billing_membership", row.pk, row.account), note=f"since {format_start(row)}"
    )


class MembershipForm(forms.ModelForm):
    """Membership of an agent in an account from a day on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "account" in self.fields:  # absent on read-only pages
            self.fields["account"].help_text = f"To remove an agent from an account, move it to {HOUSE_ACCOUNT_NAME}."
        if "since" in self.fields and self.instance.pk:
            self.fields["since"].required, self.fields["since"].help_text = (
                True,
                "First day (UTC). Must not be in a closed month.",
            )

    def clean_agent_did(self) -> str:
        return get_reference("agent").clean(self.cleaned_data["agent_did"])

    def clean(self) -> dict[str, Any] | None:
        """Reject a new membership that changes nothing. An existing one may be changed so, which revokes the move."""
        cleaned = super().clean()
        if cleaned and not self.errors and self.instance.pk is None and Membership(**cleaned).changes_nothing():
            raise ValidationError({"account": f"The agent already belongs to {cleaned['account']} on that day."})
        return cleaned


@admin.register(Membership)
class MembershipAdmin(ConsoleModelAdmin):
    form = MembershipForm
    list_display = ["agent_did", "of", "span", "condition"]
    list_filter = [("account", RelatedDropdownFilter)]
    list_select_related = ["account"]
    search_fields = ["agent_did__startswith", "account__name__startswith"]
    search_help_text = "Agent or account (prefix)"
    ordering = ["agent_did", "-since"]
    list_tabs = {
        "now": ListTab(
            "Current",
            "No current memberships: all usage belongs to the house account. Add a membership to assign an agent.",
            lambda now: Q(pk__in=Membership.objects.on(to_utc_date(now)).values("pk")),
        ),
        "later": ListTab("Scheduled", "No scheduled moves.", lambda now: Q(since__gt=to_utc_date(now))),
        "before": ListTab(
            "Past",
            "No past memberships.",
            lambda now: Q(since__lte=to_utc_date(now)) & ~Q(pk__in=Membership.objects.on(to_utc_date(now)).values("pk")),
        ),
        "all": ListTab("All", "No memberships yet. Add one to assign an agent's usage to an account."),
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
        """A membership that began in a closed month is read-only. Add a new one to move the agent."""
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

    def get_page_context(self, request: HttpRequest, row: Membership) -> dict[str, Any]:
        history = [
            *annotate_end(Membership.objects.filter(agent_did=row.agent_did)).select_related("account").order_by("-since")
        ]
        fixed, row = (
            row.fixed,
            next(each for each in history if each.pk == row.pk),
        )  # a rejected form has changed the attributes of `row`
        last = get_end(row)
        href = reverse("admin:billing_membership_add", query={"agent_did": row.agent_did})
        move = format_html('<a class="lh-link" href="{}">Move agent</a>', href)
        return {
            "facts": [
                build_agent_field(row.agent_did),
                SummaryField(
                    "Account",
                    render_admin_link("billing_account", row.account_id, row.account),
                    note="pays for the agent in this period",
                ),
                SummaryField("From", format_start(row), note="in a closed month, read-only" if fixed else ""),
                SummaryField("To", last[0] if last else "open", note=f"then {last[1]}" if last else ""),
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
        return render_badge("waiting", "scheduled")
    last = get_end(row)
    return render_badge("over", "past") if last and last[0] < get_today() else render_badge("ok", "current")

"""Console pages of credits."""

from datetime import datetime
from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils.safestring import SafeString
from unfold.contrib.filters.admin import ChoicesRadioFilter, RelatedDropdownFilter
from unfold.decorators import display

from billing import statements
from billing.admin.formatting import format_cents
from billing.models import Credit
from sandboxes.admin.base.actions import AdminAction
from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.formatting import (
    SummaryField,
    render_admin_link,
    render_badge,
    render_time_ago,
    render_timestamp,
    render_two_lines,
)
from sandboxes.admin.base.model_admin import ReadOnlyModelAdmin, build_all_fields_fieldset


def _reverse_credit(credit: Credit, actor: str, reason: str, now: datetime) -> bool:
    return statements.reverse_credit(credit.pk, now=now, actor=actor, reason=reason)


REVERSE_CREDIT_ACTION = AdminAction(
    title="Reverse credit",
    warning="Removes the unused part of the credit. The part applied to statements is not affected.",
    done="reversed",
    refusal_reason="no unused part remains",
    legal=lambda credit: (
        credit.kind == Credit.Kind.GRANT and statements.get_remaining_credits(credit.account).get(credit.pk, 0) > 0
    ),
    verb=_reverse_credit,
    icon="undo",
    permissions=("billing.add_credit",),
)


@admin.register(Credit)
class CreditAdmin(ReadOnlyModelAdmin):
    list_display = ["entry", "amount", "reason", "actor", "booked"]
    list_filter = [("account", RelatedDropdownFilter), ("kind", ChoicesRadioFilter)]
    list_select_related = ["account"]
    search_fields = ["account__name__startswith"]
    search_help_text = "Account (prefix)"
    ordering = ["-at", "-pk"]
    list_tabs = {"all": ListTab("All", "No credits yet. Grant credit on an account's page.")}
    fieldsets = build_all_fields_fieldset("account", "kind", "usd", "at", "reason", "actor", "reversed")
    row_actions = {"take_back": REVERSE_CREDIT_ACTION}

    @display(description="Account")
    def entry(self, row: Credit) -> SafeString:
        return render_two_lines(row.account, "grant" if row.kind == Credit.Kind.GRANT else "reversal")

    @display(description="USD")
    def amount(self, row: Credit) -> str:
        return format_cents(row.usd)

    @display(description="Booked")
    def booked(self, row: Credit) -> SafeString | str:
        return render_time_ago(row.at)

    def get_page_context(self, request: HttpRequest, row: Credit) -> dict[str, Any]:
        remaining = statements.get_remaining_credits(row.account).get(row.pk)
        reversal = Credit.objects.filter(reversed=row).first()
        kind = render_badge("ok", "grant") if row.kind == Credit.Kind.GRANT else render_badge("skipped", "reversal")
        return {
            "facts": [
                SummaryField("Account", render_admin_link("billing_account", row.account_id, row.account)),
                SummaryField("Amount, USD", format_cents(row.usd), note=kind),
                *(
                    [SummaryField("Remaining", f"{format_cents(remaining)} USD", note="oldest credits are used first")]
                    if remaining is not None
                    else []
                ),
                *(
                    [
                        SummaryField(
                            "Reversed",
                            render_admin_link("billing_credit", reversal.pk, render_time_ago(reversal.at)),
                            note=reversal.reason,
                        )
                    ]
                    if reversal
                    else []
                ),
                *(
                    [SummaryField("Reverses", render_admin_link("billing_credit", row.reversed_id, row.reversed))]
                    if row.reversed_id
                    else []
                ),
                SummaryField("Booked", render_time_ago(row.at), note=render_timestamp(row.at)),
                SummaryField("By", row.actor, note=row.reason),
            ]
        }

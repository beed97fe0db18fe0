"""Console pages of quotas."""

from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import F, Q
from django.http import HttpRequest
from django.urls import reverse
from django.utils.safestring import SafeString
from unfold.decorators import display

from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.formatting import (
    SummaryField,
    build_changelist_url,
    render_admin_link,
    render_meter,
    render_two_lines,
)
from sandboxes.admin.base.model_admin import ConsoleModelAdmin
from sandboxes.admin.base.registry import build_agent_field, get_reference
from sandboxes.models import Quota


class QuotaForm(forms.ModelForm):
    """Limit and guarantee of one agent in one pool."""

    def clean_agent_did(self) -> str:
        return get_reference("agent").clean(self.cleaned_data["agent_did"])

    def clean(self) -> dict[str, Any] | None:
        cleaned = super().clean() or {}
        most, guaranteed = cleaned.get("most"), cleaned.get("guaranteed")
        if most is not None and guaranteed is not None and guaranteed > most:
            self.add_error("guaranteed", f"The guarantee cannot exceed the limit of {most:,}.")
        return cleaned


@admin.register(Quota)
class QuotaAdmin(ConsoleModelAdmin):
    form = QuotaForm
    list_display = ["agent_did", "pool", "filled", "limit", "guaranteed_places"]
    list_filter = ["pool"]
    list_select_related = ["pool"]
    search_fields = ["agent_did__startswith"]
    search_help_text = "Agent (prefix)"
    ordering = ["pool_id", "agent_did"]
    list_tabs = {
        "all": ListTab(
            "All", "No quotas yet. One appears when an agent first uses a pool. Add one to set a limit or a guarantee."
        ),
        "set": ListTab(
            "Limited or guaranteed",
            "No limits or guarantees. Add a quota to set one.",
            lambda now: Q(most__isnull=False) | Q(guaranteed__gt=0),
        ),
        "full": ListTab("At the limit", "No agent is at its limit.", lambda now: Q(used__gte=F("most"))),
    }
    fields = ["pool", "agent_did", "most", "guaranteed"]
    labels = {"most": "Limit", "guaranteed": "Guaranteed"}

    def get_readonly_fields(self, request: HttpRequest, obj: Quota | None = None) -> list[str]:
        return ["pool", "agent_did"] if obj else []

    @display(description="Used")
    def filled(self, row: Quota) -> SafeString | str:
        return render_quota_usage(row)

    @display(description="Limit")
    def limit(self, row: Quota) -> str:
        return "no limit" if row.most is None else f"{row.most:,}"

    @display(description="Guaranteed")
    def guaranteed_places(self, row: Quota) -> str:
        return f"{row.guaranteed:,}" if row.guaranteed else "–"

    def get_page_context(self, request: HttpRequest, row: Quota) -> dict[str, Any]:
        spare = max(row.guaranteed - row.used, 0)
        return {
            "facts": [
                build_agent_field(row.agent_did),
                SummaryField("Pool", render_admin_link("sandboxes_pool", row.pool_id, row.pool)),
                SummaryField(
                    "Used",
                    f"{row.used:,}",
                    note="no limit" if row.most is None else f"of {row.most:,}",
                    href=build_changelist_url(
                        "sandboxes_sandbox", slice="live", agent_did=row.agent_did, pool__id__exact=row.pool_id
                    ),
                    alarm=row.most is not None and row.used >= row.most,
                ),
                SummaryField(
                    "Guaranteed",
                    f"{row.guaranteed:,}",
                    note="places that are not reclaimed for other agents" if row.guaranteed else "no guarantee",
                ),
                *([SummaryField("Unused guarantee", f"{spare:,}")] if spare else []),
            ]
        }  # fmt: skip


def render_quota_usage(quota: Quota) -> SafeString | str:
    """Render the used places, with a meter if there is a limit."""
    if quota.most is None:
        return f"{quota.used:,}"
    return render_two_lines(render_meter(quota.used, quota.most), f"{quota.used:,} of {quota.most:,}")


def build_quota_row(quota: Quota, subject: Any) -> tuple[SafeString, SafeString | str, str]:
    """Build a row of the quota table on a pool's or an agent's page."""
    return (
        render_admin_link("sandboxes_quota", quota.pk, subject),
        render_quota_usage(quota) if quota.most is not None else f"{quota.used:,}, no limit",
        f"{quota.guaranteed:,}" if quota.guaranteed else "–",
    )


def build_add_quota_url(request: HttpRequest, **initial: Any) -> str:
    """Build the URL of the add form with known values filled in. Empty without the permission to add."""
    if not request.user.has_perm("sandboxes.add_quota"):
        return ""
    return reverse("admin:sandboxes_quota_add", query=initial)

"""Console pages of agents."""

from typing import Any

from django.contrib import admin
from django.db.models import Count
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.decorators import display

from billing.admin.formatting import build_total_cost_field
from billing.admin.members import build_account_field
from leases.admin import budgets, spending
from leases.admin.api_keys import render_key_state
from leases.admin.stop_actions import STOP_AGENT_ACTION, STOP_INSTALLATION_ACTION
from leases.models import Agent, AgentKey, Lease, LeaseStatus
from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.formatting import SummaryField, build_changelist_url, render_admin_link, render_time_ago
from sandboxes.admin.base.model_admin import ConsoleModelAdmin
from sandboxes.admin.identity import build_signing_key_field
from sandboxes.admin.quotas import build_add_quota_url, build_quota_row
from sandboxes.db import database_time
from sandboxes.formatting import format_bytes, pluralize
from sandboxes.models import AgentData, Quota, Sandbox, SandboxState


@admin.register(Agent)
class AgentAdmin(ConsoleModelAdmin):
    list_display = ["did", "name", "project", "active", "created"]
    list_filter = ["project"]
    list_select_related = ["project"]
    search_fields = ["did__startswith", "name__startswith"]
    search_help_text = "DID or name (prefix)"
    ordering = ["did"]
    list_tabs = {"all": ListTab("All", "No agents yet. An agent appears with its first lease, or add one.")}
    fields = ["did", "name", "project"]
    change_form_outer_after_template = "admin/leases/agent/keys.html"
    row_actions = {"stop": STOP_AGENT_ACTION}
    bulk_actions = {"stop_all": STOP_AGENT_ACTION}
    list_actions = {"stop_installation": STOP_INSTALLATION_ACTION}

    def get_readonly_fields(self, request: HttpRequest, obj: Agent | None = None) -> list[str]:
        return ["did", "project"] if obj else []

    def annotate_rows(self, rows: list[Agent]) -> None:
        active = Lease.objects.filter(agent_did__in=[row.did for row in rows], status=LeaseStatus.ACTIVE)
        counts = dict(active.order_by().values_list("agent_did").annotate(Count("pk")))
        for row in rows:
            row.active_leases = counts.get(row.did, 0)  # type: ignore[attr-defined]

    @display(description="Active leases")
    def active(self, row: Agent) -> SafeString:
        href = build_changelist_url("leases_lease", slice="active", agent_did=row.did)
        return format_html('<a class="lh-link" href="{}">{}</a>', href, row.active_leases)  # type: ignore[attr-defined]

    @display(description="First seen")
    def created(self, row: Agent) -> SafeString | str:
        return render_time_ago(row.created_at)

    def get_page_context(self, request: HttpRequest, row: Agent) -> dict[str, Any]:
        leases = Lease.objects.filter(agent_did=row.did)
        active, latest = leases.filter(status=LeaseStatus.ACTIVE).count(), leases.order_by("-leased_at").first()
        live = Sandbox.objects.filter(agent_did=row.did).exclude(state=SandboxState.DESTROYED).count()
        now = database_time.now()
        return {
            "notices": budgets.build_agent_notices(request, row.did, now),
            "facts": [
                SummaryField(
                    "Active leases", active, href=build_changelist_url("leases_lease", slice="active", agent_did=row.did)
                ),
                SummaryField(
                    "Total leases",
                    leases.count(),
                    href=build_changelist_url("leases_lease", slice="history", agent_did=row.did),
                ),
                SummaryField(
                    "Live sandboxes", live, href=build_changelist_url("sandboxes_sandbox", slice="live", agent_did=row.did)
                ),
                SummaryField("Runs", "view runs", href=build_changelist_url("sandboxes_run", slice="all", agent_did=row.did)),
                *spending.build_agent_spending_fields(row.did),
                build_account_field(row.did),
                build_total_cost_field(agent_did=row.did),
                self.build_data_field(row),
                build_signing_key_field(request, row.did),
                SummaryField("Last used", render_time_ago(latest.last_activity_at) if latest else "never"),
                SummaryField("First seen", render_time_ago(row.created_at)),
            ],
            "keys": [
                (key, render_key_state(key, now))
                for key in AgentKey.objects.filter(dids__icontains=row.did)
                if row.did in key.dids
            ],
            "may_view_keys": request.user.has_perm("leases.view_agentkey"),
            **self.build_quota_context(request, row),
        }

    def build_data_field(self, row: Agent) -> SummaryField:
        """Build the size of the agent's /data, which persists across sandboxes."""
        data = AgentData.objects.filter(agent_did=row.did).first()
        if data is None:
            return SummaryField("Data", "none yet", note="files in /data persist across sandboxes")
        note = format_html("{}, changed {}", pluralize(data.files, "file", "files"), render_time_ago(data.changed_at))
        return SummaryField("Data", render_admin_link("sandboxes_agentdata", data.pk, format_bytes(data.size_bytes)), note=note)

    def build_quota_context(self, request: HttpRequest, row: Agent) -> dict[str, Any]:
        may_view = request.user.has_perm("sandboxes.view_quota")
        quotas = Quota.objects.filter(agent_did=row.did).select_related("pool").order_by("-used", "pool__name")
        return {
            "quotas": [build_quota_row(quota, quota.pool) for quota in quotas] if may_view else [],
            "quota_subject_label": "Pool",
            "new_quota": build_add_quota_url(request, agent_did=row.did),
            "may_view_quotas": may_view,
        }

"""Console pages of connections to the domains of allow lists."""

from typing import Any

from django.contrib import admin
from django.db.models import F, Q
from django.http import HttpRequest
from django.utils.safestring import SafeString
from unfold.contrib.filters.admin import ChoicesRadioFilter
from unfold.decorators import display

from sandboxes.admin.base.changelist import ListTab, parse_uuid
from sandboxes.admin.base.formatting import (
    SummaryField,
    build_changelist_url,
    format_duration,
    render_admin_link,
    render_badge,
    render_time_ago,
    render_timestamp,
    render_two_lines,
)
from sandboxes.admin.base.model_admin import ReadOnlyModelAdmin, build_all_fields_fieldset
from sandboxes.admin.base.registry import build_agent_field, build_holder_field
from sandboxes.admin.llm_calls import ErrorCodeFilter, StartedWithinFilter, TextLookupFilter
from sandboxes.formatting import format_bytes
from sandboxes.models import EgressConnection

Outcome = EgressConnection.Outcome
FAILED_OUTCOMES = [Outcome.FAILED, Outcome.CUT, Outcome.LOST]


class DomainFilter(TextLookupFilter):
    title, parameter_name, lookup = "domain", "name", "domain"


@admin.register(EgressConnection)
class EgressConnectionAdmin(ReadOnlyModelAdmin):
    list_display = ["domain_label", "result", "transferred", "agent_label", "start_time", "lasted"]
    list_filter = [("outcome", ChoicesRadioFilter), DomainFilter, ErrorCodeFilter, StartedWithinFilter]
    list_select_related = ["sandbox"]
    search_fields = ["agent_did__startswith", "environment_id__startswith", "domain__startswith"]
    search_help_text = "Domain, agent or environment (prefix), or a complete id"
    ordering = ["-started_at", "-pk"]
    list_tabs = {
        "all": ListTab("All", "No connections yet. A sandbox connects to the domains of its policy's allow list."),
        "open": ListTab("Open", "No open connections.", lambda now: Q(ended_at__isnull=True)),
        "failed": ListTab("Failed", "No failed connections.", lambda now: Q(outcome__in=FAILED_OUTCOMES)),
        "refused": ListTab("Refused", "No refused connections.", lambda now: Q(outcome=Outcome.REFUSED)),
    }
    fieldsets = build_all_fields_fieldset(
        "connection_id", "sandbox", "holder", "agent_did", "environment_id", "run", "domain", "port", "address", "started_at",
        "deadline_at", "ended_at", "outcome", "code", "sent_bytes", "received_bytes",
    )  # fmt: skip

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        """Search all id columns for a complete id: ids of connections, leases and sandboxes have the same form."""
        if pk := parse_uuid(search_term.strip()):
            return queryset.filter(Q(connection_id=pk.hex) | Q(holder=pk) | Q(sandbox=pk)), False
        return super().get_search_results(request, queryset, search_term)

    @display(description="Domain")
    def domain_label(self, row: EgressConnection) -> SafeString:
        return render_two_lines(str(row), row.address or "")

    @display(description="Result")
    def result(self, row: EgressConnection) -> SafeString:
        return render_two_lines(render_connection_outcome(row), row.code)

    @display(description="Sent / received")
    def transferred(self, row: EgressConnection) -> str:
        return f"{format_bytes(row.sent_bytes)} / {format_bytes(row.received_bytes)}"

    @display(description="Agent and environment")
    def agent_label(self, row: EgressConnection) -> SafeString:
        return render_two_lines(row.agent_did or "–", row.environment_id)

    @display(description="Started", ordering=F("started_at"))
    def start_time(self, row: EgressConnection) -> SafeString | str:
        return render_time_ago(row.started_at)

    @display(description="Duration")
    def lasted(self, row: EgressConnection) -> str:
        return format_duration(row.ended_at - row.started_at) if row.ended_at and row.outcome != Outcome.REFUSED else "–"

    def get_page_context(self, request: HttpRequest, row: EgressConnection) -> dict[str, Any]:
        return {
            "facts": [
                SummaryField("Result", render_connection_outcome(row), note=row.code),
                SummaryField("Domain", str(row), note=row.address or "not connected"),
                SummaryField("Started", render_time_ago(row.started_at), note=render_timestamp(row.started_at)),
                SummaryField("Duration", self.lasted(row)),
                SummaryField("Sent / received", self.transferred(row), note="by the sandbox"),
                SummaryField("Sandbox", render_admin_link("sandboxes_sandbox", row.sandbox_id, row.sandbox)),
                *([SummaryField("Run", render_admin_link("sandboxes_run", row.run_id, "run"))] if row.run_id else []),
                build_agent_field(row.agent_did),
                build_holder_field(row.holder),
            ]
        }


def render_connection_outcome(row: EgressConnection) -> SafeString:
    return render_badge(str(row.outcome), row.get_outcome_display())


def build_connections_url(**filters: Any) -> str:
    """Build the URL of the list of connections, narrowed by filters such as `holder`."""
    return build_changelist_url("sandboxes_egressconnection", slice="all", **filters)

"""Console pages of agents' AT Protocol accounts and records."""

import json
from typing import Any

from django.contrib import admin
from django.db.models import Q
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.contrib.filters.admin import ChoicesRadioFilter
from unfold.decorators import display

from leases.atproto import records
from leases.atproto.models import AtprotoAccount, AtprotoRecord, RecordStatus
from sandboxes.admin.base.actions import AdminAction
from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.formatting import (
    SummaryField,
    build_changelist_url,
    format_time_until,
    render_badge,
    render_time_ago,
    render_timestamp,
    render_two_lines,
    truncate_text,
)
from sandboxes.admin.base.model_admin import ReadOnlyModelAdmin, build_all_fields_fieldset
from sandboxes.admin.base.registry import build_agent_field, build_holder_field
from sandboxes.admin.llm_calls import TextLookupFilter

STATUS_BADGES = {RecordStatus.PENDING: "waiting", RecordStatus.CREATED: "ok", RecordStatus.FAILED: "failed"}

REPEAT_ACTION = AdminAction(
    title="Repeat",
    warning="The request is repeated for up to 24 hours. A record that exists stays as it is.",
    done="to be repeated",
    refusal_reason="not failed",
    legal=lambda row: row.status == RecordStatus.FAILED,
    verb=lambda row, actor, reason, now: records.retry(row, now=now, actor=actor),
    icon="replay",
    permissions=("leases.manage_atprotorecord",),
)


class EnvironmentFilter(TextLookupFilter):
    title, parameter_name, lookup = "environment", "environment", "lease__environment_id"


@admin.register(AtprotoRecord)
class AtprotoRecordAdmin(ReadOnlyModelAdmin):
    list_display = ["record_label", "state", "agent_label", "attempt_count", "stored"]
    list_filter = [("status", ChoicesRadioFilter), EnvironmentFilter]
    list_select_related = ["lease"]
    search_fields = ["agent_did__startswith", "record_key__startswith"]
    search_help_text = "Agent or record key (prefix)"
    ordering = ["-created_at", "-pk"]
    list_tabs = {
        "all": ListTab("All", "No records yet. Environment types with a turn collection create one for each action."),
        "pending": ListTab("Pending", "No pending records.", lambda now: Q(status=RecordStatus.PENDING)),
        "failed": ListTab("Failed", "No failed records.", lambda now: Q(status=RecordStatus.FAILED)),
    }
    fieldsets = build_all_fields_fieldset(
        "id", "lease", "turn_number", "agent_did", "collection", "record_key", "status", "uri", "cid", "created_at", "ended_at",
        "attempts", "next_attempt_at", "give_up_at", "error",
    )  # fmt: skip
    change_form_outer_before_template = "admin/leases/atprotorecord/value.html"
    row_actions = {"repeat": REPEAT_ACTION}
    bulk_actions = {"repeat_all": REPEAT_ACTION}

    @display(description="Record")
    def record_label(self, row: AtprotoRecord) -> SafeString:
        return render_two_lines(row.collection, row.record_key)

    @display(description="State")
    def state(self, row: AtprotoRecord) -> SafeString:
        return render_two_lines(render_record_status(row), truncate_text(row.error) if row.error else "")

    @display(description="Agent and environment")
    def agent_label(self, row: AtprotoRecord) -> SafeString:
        return render_two_lines(row.agent_did, row.lease.environment_id)

    @display(description="Attempts")
    def attempt_count(self, row: AtprotoRecord) -> str:
        return f"{row.attempts:,}"

    @display(description="Stored")
    def stored(self, row: AtprotoRecord) -> SafeString | str:
        return render_time_ago(row.created_at)

    def get_page_context(self, request: HttpRequest, row: AtprotoRecord) -> dict[str, Any]:
        next_attempt = format_time_until(row.next_attempt_at, "due", "due now") if row.next_attempt_at else ""
        return {
            "facts": [
                SummaryField("State", render_record_status(row), note=row.error or next_attempt, alarm=bool(row.error)),
                SummaryField("URI", row.uri or "–", note=row.cid),
                SummaryField("Attempts", f"{row.attempts:,}"),
                SummaryField("Turn", "–" if row.turn_number is None else f"{row.turn_number:,}"),
                SummaryField("Stored", render_time_ago(row.created_at), note=render_timestamp(row.created_at)),
                build_agent_field(row.agent_did),
                build_holder_field(row.lease_id),
            ],
            "value": json.dumps(row.value, indent=2, ensure_ascii=False),
        }


@admin.register(AtprotoAccount)
class AtprotoAccountAdmin(ReadOnlyModelAdmin):
    list_display = ["agent_did", "service_url", "authentication", "changed"]
    list_filter = [("authentication", ChoicesRadioFilter)]
    search_fields = ["agent_did__startswith"]
    search_help_text = "Agent (prefix)"
    ordering = ["agent_did"]
    list_tabs = {"all": ListTab("All", "No AT Protocol accounts yet. `manage.py atproto set` adds the account of an agent.")}
    fieldsets = build_all_fields_fieldset(
        "agent_did", "service_url", "service_did", "authentication", "changed_at", "changed_by"
    )

    @display(description="Changed")
    def changed(self, row: AtprotoAccount) -> SafeString | str:
        return render_time_ago(row.changed_at)

    def get_page_context(self, request: HttpRequest, row: AtprotoAccount) -> dict[str, Any]:
        url = build_changelist_url("leases_atprotorecord", slice="all", q=row.agent_did)
        return {
            "facts": [
                SummaryField("Server", row.service_url, note=row.service_did),
                SummaryField("Authentication", row.get_authentication_display()),
                SummaryField("Changed", render_time_ago(row.changed_at), note=row.changed_by),
                SummaryField("Records", format_html('<a href="{}">of this agent</a>', url)),
                build_agent_field(row.agent_did),
            ]
        }


def render_record_status(row: AtprotoRecord) -> SafeString:
    return render_badge(STATUS_BADGES[RecordStatus(row.status)], row.status)

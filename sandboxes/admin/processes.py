"""Console pages of background processes."""

from typing import Any

from django.contrib import admin
from django.db.models import Q
from django.http import HttpRequest
from django.utils.safestring import SafeString
from unfold.decorators import display

from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.formatting import (
    SummaryField,
    build_sandbox_field,
    format_command,
    format_duration,
    render_badge,
    render_time_ago,
    render_timestamp,
    render_two_lines,
    truncate_text,
)
from sandboxes.admin.base.model_admin import ReadOnlyModelAdmin, build_all_fields_fieldset
from sandboxes.admin.base.owner_search import OwnerSearch
from sandboxes.admin.base.registry import build_agent_field, build_holder_field
from sandboxes.db import database_time
from sandboxes.formatting import format_path
from sandboxes.models import Process, ProcessStatus

STATE_BADGES = {
    ProcessStatus.EXITED: "ok",
    ProcessStatus.KILLED: "cold",
    ProcessStatus.GONE: "cold",
    ProcessStatus.FAILED: "error",
}


@admin.register(Process)
class ProcessAdmin(ReadOnlyModelAdmin):
    list_display = ["line", "condition", "lasted", "restart_count", "started", "agent_label"]
    list_filter = ["state", "restart"]
    list_select_related = ["sandbox"]
    search_fields = ["sandbox__agent_did__startswith", "sandbox__environment_id__startswith"]
    owner_search = OwnerSearch("sandbox", began="started_at", ended="destroyed_at")
    search_help_text = "Agent or environment (prefix), or a complete id"
    ordering = ["-started_at", "-pk"]
    list_tabs = {
        "running": ListTab(
            "Running",
            "No running processes. Clients start background processes through the API.",
            lambda now: Q(ended_at__isnull=True),
        ),
        "all": ListTab("All", "No processes yet. Clients start background processes through the API."),
    }
    fieldsets = build_all_fields_fieldset(
        "id", "sandbox", "holder", "agent_did", "incarnation", "name", "argv", "cwd", "env_names", "keep_awake", "is_terminal",
        "started_at", "starts_by", "state", "ended_at", "exit_code", "note", "restart", "max_restarts",
        "restart_window_seconds", "restart_after_wake", "restarts", "restarted_at", "restart_at", "window_started_at",
        "window_restarts", "wake_pending", "kill_requested_at", "start_confirmed", "has_stdin",
    )  # fmt: skip

    @display(description="Command")
    def line(self, row: Process) -> SafeString:
        return render_two_lines(truncate_text(format_command(row.argv)), format_path(row.name))

    @display(description="State")
    def condition(self, row: Process) -> SafeString:
        return render_process_state(row)

    @display(description="Duration")
    def lasted(self, row: Process) -> str:
        return format_process_duration(row)

    @display(description="Restarts")
    def restart_count(self, row: Process) -> SafeString | str:
        if row.restart_at is None:
            return str(row.restarts or "")
        return render_two_lines(
            str(row.restarts or ""), "next restart due" if row.restart_at <= database_time.now() else "waiting"
        )

    @display(description="Started")
    def started(self, row: Process) -> SafeString | str:
        return render_time_ago(row.started_at)

    @display(description="Agent and environment")
    def agent_label(self, row: Process) -> SafeString:
        return render_two_lines(row.agent_did, row.sandbox.environment_id)

    def get_page_context(self, request: HttpRequest, row: Process) -> dict[str, Any]:
        return {
            "facts": [
                SummaryField("State", render_process_state(row), note=row.note),
                SummaryField(
                    "Duration" if row.ended_at else "Running for",
                    format_process_duration(row),
                    note="until the end was detected" if row.ended_at else "",
                ),
                SummaryField("Keeps awake", "yes" if row.keep_awake else "no", note="prevents suspension of its sandbox"),
                SummaryField("Started", render_time_ago(row.started_at), note=render_timestamp(row.started_at)),
                build_sandbox_field(row),
                build_holder_field(row.holder),
                build_agent_field(row.agent_did),
                SummaryField("Command", truncate_text(format_command(row.argv)), note=format_path(row.name)),
                SummaryField(
                    "Working directory", format_path(row.cwd), note=", ".join(row.env_names) or "no environment variables"
                ),
            ]
        }


def render_process_state(row: Process) -> SafeString:
    text = f"exit {row.exit_code}" if row.state == ProcessStatus.EXITED else row.state
    failed = row.state == ProcessStatus.EXITED and row.exit_code != 0
    return render_badge("failed" if failed else STATE_BADGES.get(ProcessStatus(row.state), row.state), text)


def format_process_duration(row: Process) -> str:
    return format_duration((row.ended_at or database_time.now()) - row.started_at)

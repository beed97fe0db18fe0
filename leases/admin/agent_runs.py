"""Console pages of agent runs and queued runs."""

import json
from dataclasses import replace
from typing import Any

from django.contrib import admin
from django.db.models import Q
from django.http import HttpRequest
from django.utils.safestring import SafeString
from unfold.decorators import display

from leases.admin.stop_actions import STOP_INSTALLATION_ACTION
from leases.agent_runs import interruption
from leases.agent_runs.clis.registry import CLIS
from leases.agent_runs.models import AgentRun, AgentRunState
from leases.agent_runs.results import load_result
from leases.queue import queue
from leases.queue.models import QueuedRun, QueuedRunState
from sandboxes.admin.base.actions import AdminAction
from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.formatting import (
    SummaryField,
    format_command,
    format_duration,
    render_admin_link,
    render_badge,
    render_time_ago,
    render_timestamp,
    render_two_lines,
    truncate_text,
)
from sandboxes.admin.base.model_admin import ReadOnlyModelAdmin, build_all_fields_fieldset
from sandboxes.admin.base.owner_search import OwnerSearch
from sandboxes.admin.base.registry import build_agent_field
from sandboxes.db import database_time
from sandboxes.models import Run
from sandboxes.storage.base import StoreError
from sandboxes.stores import lease_stores

MAX_MESSAGES = 50  # newest, on the page of an agent run
MAX_MESSAGE_CHARS = 4000
MAX_EVENTS_READ = 200  # of the chat history of its lease
REFRESH_SECONDS = 5  # of the page of a run in progress
STATE_BADGES = {
    AgentRunState.COMPLETED: "ok",
    AgentRunState.INTERRUPTED: "cold",
    QueuedRunState.QUEUED: "waiting",
    QueuedRunState.STARTED: "running",
    QueuedRunState.EXPIRED: "cold",
}


@admin.register(AgentRun)
class AgentRunAdmin(ReadOnlyModelAdmin):
    list_display = ["line", "state_badge", "turns", "lasted", "started", "agent_label"]
    list_filter = ["state", "cli"]
    list_select_related = ["lease"]
    search_fields = ["lease__agent_did__startswith", "lease__environment_id__startswith"]
    owner_search = OwnerSearch("lease", began="started_at", ended="ended_at")
    search_help_text = "Agent or environment (prefix), or a complete id"
    ordering = ["-started_at", "-pk"]
    list_tabs = {
        "running": ListTab(
            "Running", "No agent CLI is running. Clients start them through the API.", lambda now: Q(ended_at=None)
        ),
        "violations": ListTab("Violations", "No run violated its policy.", lambda now: ~Q(violation="")),
        "all": ListTab("All", "No agent runs yet. Clients start agent CLIs through the API."),
    }
    fieldsets = build_all_fields_fieldset(
        "id", "lease", "cli", "model", "requested_session", "session_id", "policy", "state", "started_at", "ended_at",
        "interrupted_at", "violation", "message_count", "malformed_count", "lost_bytes", "turn_count", "result", "is_error",
        "reported_cost", "note",
    )  # fmt: skip
    change_form_outer_before_template = "admin/leases/agentrun/messages.html"
    list_actions = {"stop_installation": STOP_INSTALLATION_ACTION}

    @display(description="Agent CLI")
    def line(self, row: AgentRun) -> SafeString:
        return render_two_lines(row.cli, truncate_text(row.violation or row.result) or row.model)

    @display(description="State")
    def state_badge(self, row: AgentRun) -> SafeString:
        return render_state(row.state)

    @display(description="Turns")
    def turns(self, row: AgentRun) -> str:
        return str(row.turn_count)

    @display(description="Duration")
    def lasted(self, row: AgentRun) -> str:
        return format_duration((row.ended_at or database_time.now()) - row.started_at)

    @display(description="Started")
    def started(self, row: AgentRun) -> SafeString | str:
        return render_time_ago(row.started_at)

    @display(description="Agent and environment")
    def agent_label(self, row: AgentRun) -> SafeString:
        return render_two_lines(row.lease.agent_did, row.lease.environment_id)

    def get_page_context(self, request: HttpRequest, row: AgentRun) -> dict[str, Any]:
        result = load_result(row.pk, now=database_time.now())
        ending = "" if result.run is None or result.run.exit_code is None else f"exit code {result.run.exit_code}"
        messages, error = load_messages(row)
        return {
            "facts": [
                SummaryField("State", render_state(row.state), note=row.violation or row.note),
                SummaryField("Agent CLI", row.cli, note=row.model),
                SummaryField("Turns", row.turn_count, note=f"{row.message_count} messages"),
                SummaryField("Cost", f"${result.cost:.4f}", note="model calls of the lease"),
                SummaryField("Duration" if row.ended_at else "Running for", self.lasted(row)),
                SummaryField("Started", render_time_ago(row.started_at), note=render_timestamp(row.started_at)),
                SummaryField("Lease", render_admin_link("leases_lease", row.lease_id, row.lease.environment_id)),
                build_agent_field(row.lease.agent_did),
                SummaryField(
                    "Run",
                    render_admin_link("sandboxes_run", row.pk, row.pk),
                    note=ending,
                ),
                SummaryField("Session", row.session_id or "none", note="resumed" if row.resumed else ""),
            ],
            "transcript": messages,
            "transcript_error": error,
            "refresh_seconds": None if row.ended_at else REFRESH_SECONDS,
        }


@admin.register(QueuedRun)
class QueuedRunAdmin(ReadOnlyModelAdmin):
    list_display = ["line", "state_badge", "attempts", "waited", "queued", "agent_label"]
    list_filter = ["state"]
    list_select_related = ["lease"]
    search_fields = ["agent_did__startswith"]
    search_help_text = "Agent (prefix), or a complete id"
    ordering = ["-queued_at", "-pk"]
    list_tabs = {
        "open": ListTab(
            "Pending and started",
            "No pending runs. Clients add runs with “queued” through the API.",
            lambda now: Q(ended_at__isnull=True),
        ),
        "failed": ListTab("Failed", "No failed runs.", lambda now: Q(state__in=["failed", "expired"])),
        "all": ListTab("All", "No queued runs yet. Clients add runs with “queued” through the API."),
    }
    fieldsets = build_all_fields_fieldset(
        "id", "agent_did", "lease", "pool", "request", "actor", "priority", "state", "repeatable", "attempt", "max_attempts",
        "queued_at", "available_at", "expires_at", "started_at", "ended_at", "interrupted_at", "runner", "runner_deadline",
        "exit_code", "error",
    )  # fmt: skip

    @display(description="Command")
    def line(self, row: QueuedRun) -> SafeString:
        return render_two_lines(describe_command(row), (row.error or {}).get("message", ""))

    @display(description="State")
    def state_badge(self, row: QueuedRun) -> SafeString:
        return render_state(row.state)

    @display(description="Attempts")
    def attempts(self, row: QueuedRun) -> str:
        return f"{row.attempt} of {row.max_attempts}" if row.repeatable else str(row.attempt)

    @display(description="Time in queue")
    def waited(self, row: QueuedRun) -> str:
        return format_duration((row.started_at or row.ended_at or database_time.now()) - row.queued_at)

    @display(description="Queued")
    def queued(self, row: QueuedRun) -> SafeString | str:
        return render_time_ago(row.queued_at)

    @display(description="Agent and environment")
    def agent_label(self, row: QueuedRun) -> SafeString:
        return render_two_lines(row.agent_did, row.lease.environment_id if row.lease else "new sandbox")

    def get_page_context(self, request: HttpRequest, row: QueuedRun) -> dict[str, Any]:
        lease = render_admin_link("leases_lease", row.lease_id, row.lease.environment_id) if row.lease else "none"
        has_run = row.attempt and Run.objects.filter(pk=row.run_id).exists()
        return {
            "facts": [
                SummaryField("State", render_state(row.state), note=(row.error or {}).get("message", "")),
                SummaryField("Command", describe_command(row)),
                SummaryField("Attempts", self.attempts(row), note="repeatable" if row.repeatable else "not repeatable"),
                SummaryField("Priority", row.priority, note="among the runs of the agent"),
                SummaryField("Time in queue", self.waited(row)),
                SummaryField("Queued", render_time_ago(row.queued_at), note=render_timestamp(row.queued_at)),
                SummaryField("Expires", render_timestamp(row.expires_at), note="end of the pending timeout"),
                SummaryField("Lease", lease, note="" if row.lease else "the run gets a sandbox of its own"),
                build_agent_field(row.agent_did),
                SummaryField("Run", render_admin_link("sandboxes_run", row.run_id, row.run_id) if has_run else "none"),
            ]
        }


def load_messages(row: AgentRun) -> tuple[list[dict[str, str]], str]:
    """Return the newest messages of an agent run, oldest first, and an error message if the store does not respond."""
    try:
        events, _ = lease_stores.open_stores(row.lease.agent_did, row.lease_id).chat.page(limit=MAX_EVENTS_READ)
    except StoreError as error:
        return [], str(error)
    own = [event for event in events if event.document.get("agent_run") == str(row.pk)][:MAX_MESSAGES]
    return [
        {
            "role": str(event.document.get("role")),
            "at": f"{event.at:%H:%M:%S}",
            "text": describe_message(row.cli, event.document.get("content")),
        }
        for event in reversed(own)
    ], ""


def describe_message(cli: str, content: Any) -> str:
    """Return a message as text: what the agent says and the tools that it calls, else indented JSON."""
    text = content if isinstance(content, str) else json.dumps(content, indent=1, ensure_ascii=False)
    if isinstance(content, dict) and cli in CLIS:
        message = CLIS[cli].interpret(content)
        calls = [f"{call.name} {call.command}".rstrip() for call in message.tool_calls]
        result = message.result.text if message.result else ""
        text = "\n".join(part for part in (message.text, *calls, result) if part) or text
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[:MAX_MESSAGE_CHARS]} …"


def describe_command(row: QueuedRun) -> str:
    if row.request.get("kind") == "agent_run":
        return f"agent CLI {row.request.get('cli')}"
    return truncate_text(format_command(row.request.get("argv", [])))


def render_state(state: str) -> SafeString:
    badges = {str(name): badge for name, badge in STATE_BADGES.items()}
    return render_badge(badges.get(str(state), str(state)), str(state))


def _interrupt_agent_run(row: AgentRun, actor: str, reason: str, now: Any) -> bool:
    interruption.interrupt(row, now=now)
    return row.interrupted_at == now


INTERRUPT_AGENT_RUN_ACTION = AdminAction(
    title="Interrupt",
    warning="The agent CLI and everything that it started are killed. Its files stay.",
    done="interrupted",
    refusal_reason="has ended",
    legal=lambda row: row.ended_at is None and row.interrupted_at is None,
    verb=_interrupt_agent_run,
    icon="stop_circle",
    permissions=("leases.interrupt_run",),
    danger=True,
)
INTERRUPT_QUEUED_RUN_ACTION = replace(
    INTERRUPT_AGENT_RUN_ACTION,
    warning="A pending run ends without being executed. The command of a started run is killed.",
    verb=lambda row, actor, reason, now: bool(queue.interrupt(QueuedRun.objects.filter(pk=row.pk), now=now)),
)
AgentRunAdmin.add_actions({"interrupt": INTERRUPT_AGENT_RUN_ACTION}, {"interrupt_all": INTERRUPT_AGENT_RUN_ACTION})
QueuedRunAdmin.add_actions({"interrupt": INTERRUPT_QUEUED_RUN_ACTION}, {"interrupt_all": INTERRUPT_QUEUED_RUN_ACTION})

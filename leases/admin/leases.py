"""Console pages of leases and turns."""

import json
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin
from django.contrib.admin.utils import quote
from django.db.models import Count, Q
from django.http import HttpRequest
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.decorators import display

from billing.admin.formatting import build_total_cost_field
from leases import leasing
from leases.admin import budgets, spending
from leases.admin.lease_grants import GRANT_LEASE_ACTION
from leases.admin.spending import SET_CALL_LIMITS_ACTION
from leases.admin.timeline import SOURCE_LABELS, load_timeline, render_turn_status
from leases.failed_by import classify_end_reason, classify_turn
from leases.models import Lease, LeaseStatus, Turn
from leases.tasks import enqueue_reclaim
from sandboxes.admin.base.actions import AdminAction
from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.formatting import (
    SummaryField,
    build_changelist_url,
    format_age,
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
from sandboxes.formatting import pluralize
from sandboxes.models import Run, RunOutcome, Sandbox

ENDING_SOON_WINDOW = timedelta(minutes=5)
MAX_SHELL_NAMES_CHARS = 80


def _end_lease(lease: Lease, actor: str, reason: str, now: datetime) -> bool:
    return leasing.end(lease.pk, reason="operator", now=now, actor=actor, detail=reason)


END_LEASE_ACTION = AdminAction(
    title="End lease",
    warning="The agent loses access at once. The sandbox's last state is stored and kept for LEASEHOLD_KEEP_STATE, then the "
    "sandbox is destroyed.",
    done="ended",
    refusal_reason="no longer active",
    legal=lambda lease: lease.status == LeaseStatus.ACTIVE,
    verb=_end_lease,
    icon="block",
    permissions=("leases.end_lease",),
    danger=True,
    bulk_button="End leases… (active only)",
    enqueue=enqueue_reclaim,
)


def render_lease_end(lease: Lease, now: datetime) -> SafeString:
    """Render the time until or since the end. An active lease past its end is overdue."""
    if lease.ended_at:
        return render_timestamp(lease.ended_at, f"ended {format_age(now - lease.ended_at)} ago")
    if lease.expires_at > now:
        return render_timestamp(lease.expires_at, f"in {format_age(lease.expires_at - now)}")
    return format_html(
        '<b class="lh-alarm">{}</b>', render_timestamp(lease.expires_at, f"overdue {format_age(now - lease.expires_at)}")
    )


@admin.register(Lease)
class LeaseAdmin(ReadOnlyModelAdmin):
    list_display = ["agent_label", "state", "ends", "held", "kind", "last_used"]
    list_filter = ["status", "pool", "environment_type"]
    list_select_related = ["pool"]
    search_fields = ["agent_did__startswith", "environment_id__startswith"]
    search_help_text = "Agent or environment (prefix), or a complete id"
    ordering = ["-leased_at", "-pk"]
    list_tabs = {
        "active": ListTab(
            "Active",
            "No active leases. Agents acquire leases through the API, or grant one here.",
            lambda now: Q(status=LeaseStatus.ACTIVE),
        ),
        "soon": ListTab(
            "Ending soon",
            "No leases ending soon: none ends within five minutes.",
            lambda now: Q(
                status=LeaseStatus.ACTIVE,
                expires_minute__lte=leasing.to_epoch_minute(now + ENDING_SOON_WINDOW),
                expires_at__range=(now, now + ENDING_SOON_WINDOW),
            ),
        ),
        "overdue": ListTab(
            "Overdue",
            "No overdue leases: the sweep that ends leases is on time.",
            lambda now: Q(status=LeaseStatus.ACTIVE, expires_minute__lte=leasing.to_epoch_minute(now), expires_at__lt=now),
        ),
        "undead": ListTab(
            "Expired, not destroyed",
            "No remaining sandboxes: the sandbox of every ended lease is destroyed.",
            lambda now: Q(status=LeaseStatus.EXPIRED),
        ),
        "history": ListTab("History", "No leases yet. Agents acquire leases through the API, or grant one here."),
    }
    fieldsets = build_all_fields_fieldset(
        "id", "agent_did", "environment_id", "environment_type", "pool", "memory_mib", "millicpus", "size",
        "disk_mib", "gpus", "gpu_type", "image", "status", "leased_at", "last_activity_at",
        "ttl", "expires_at", "max_expires_at", "sleep_after", "auto_stop", "auto_delete", "expiry_conditions", "llm_limit",
        "llm_token_limit", "llm_enabled", "ended_at", "end_reason", "destroyed_at",
    )  # fmt: skip
    change_form_outer_before_template = "admin/leases/lease/timeline.html"
    row_actions = {"limit_calls": SET_CALL_LIMITS_ACTION, "end_lease": END_LEASE_ACTION}
    bulk_actions = {"end_leases": END_LEASE_ACTION}
    create_actions = {"grant": GRANT_LEASE_ACTION}

    @display(description="Agent and environment")
    def agent_label(self, row: Lease) -> SafeString:
        return render_two_lines(row.agent_did, row.environment_id)

    @display(description="State")
    def state(self, row: Lease) -> SafeString:
        return render_two_lines(render_badge(row.status), row.end_reason) if row.end_reason else render_badge(row.status)

    @display(description="Ends")
    def ends(self, row: Lease) -> SafeString:
        return render_lease_end(row, database_time.now())

    @display(description="Duration")
    def held(self, row: Lease) -> str:
        return format_duration((row.ended_at or database_time.now()) - row.leased_at)

    @display(description="Type and pool")
    def kind(self, row: Lease) -> SafeString:
        return render_two_lines(row.environment_type_id, row.pool)

    @display(description="Last used")
    def last_used(self, row: Lease) -> SafeString | str:
        return render_time_ago(row.last_activity_at)

    def get_page_context(self, request: HttpRequest, row: Lease) -> dict[str, Any]:
        now = database_time.now()
        before, only = _parse_datetime(request.GET.get("before", "")), request.GET.get("only", "")
        entries, older = load_timeline(row, before=before, only=only)
        notices, budget_fields = budgets.summarize_lease_budgets(request, row, now)
        return {
            "notices": notices,
            "facts": [*self.build_fields(row, now), *budget_fields],
            "entries": entries,
            "newer": before,
            "older": "?" + urlencode({"only": only, "before": older.isoformat()}) if older else "",
            "source_filters": [(name, label, only == name) for name, label in {"": "All", **SOURCE_LABELS}.items()],
        }

    def build_fields(self, row: Lease, now: datetime) -> list[SummaryField]:
        sandboxes = Sandbox.objects.filter(holder=row.pk).select_related("pool").order_by("-created_at")
        runs = Run.objects.filter(holder=row.pk).aggregate(
            total=Count("pk"), failed=Count("pk", filter=~Q(outcome__in=[RunOutcome.OK, RunOutcome.OPEN]))
        )
        sandbox = sandboxes.first()
        return [
            SummaryField("State", render_badge(row.status), note=row.end_reason),
            *([SummaryField("Failed by", origin)] if (origin := classify_end_reason(row.end_reason)) else []),
            build_agent_field(row.agent_did),
            SummaryField(
                "Environment",
                render_admin_link("leases_environment", quote(row.environment_id), row.environment_id),
                note=row.environment_type_id,
            ),
            SummaryField(
                "Duration",
                format_duration((row.ended_at or now) - row.leased_at),
                note=format_html("since {}", render_timestamp(row.leased_at)),
            ),
            SummaryField(
                "Ends", render_lease_end(row, now), note=format_html("hard limit {}", render_timestamp(row.max_expires_at))
            ),
            SummaryField(
                "Last used", render_time_ago(row.last_activity_at), note=f"ends after {format_duration(row.ttl)} without use"
            ),
            SummaryField(
                "Sandbox",
                render_admin_link("sandboxes_sandbox", sandbox.pk, render_badge(sandbox.state)) if sandbox else "none yet",
                note=f"{sandbox.pool}, {sandbox.provider}" if sandbox else "" if row.ended_at else "starts on first use",
            ),
            build_resources_field(row, sandbox),
            SummaryField(
                "Runs",
                f"{runs['total']:,}",
                href=build_changelist_url("sandboxes_run", slice="all", holder=row.pk),
                note=format_html(
                    '<a class="lh-link lh-alarm" href="{}">{} failed</a>',
                    build_changelist_url("sandboxes_run", slice="failed", holder=row.pk),
                    f"{runs['failed']:,}",
                )
                if runs["failed"]
                else "",
            ),
            *_build_shell_fields(row),
            *spending.build_lease_spending_fields(row),
            *spending.build_lease_network_fields(row),
            build_total_cost_field(holder=row.pk),
        ]


def build_resources_field(row: Lease, sandbox: Sandbox | None) -> SummaryField:
    """Build the resources of the last sandbox, with the requested ones. Without a sandbox, only those."""
    requested = format_resources(row)
    note = f"requested: {requested}" if requested else "those of the pool: the lease requested none"
    return SummaryField("Resources", format_resources(sandbox) if sandbox else "no sandbox yet", note=note)


def format_resources(row: Lease | Sandbox) -> str:
    """Format the resources that a row states, such as "1,024 MiB, 0.5 CPU, 20,480 MiB of disk, 2 H100 GPUs, image python:3"."""
    gpus = pluralize(row.gpus, f"{row.gpu_type} GPU".strip(), f"{row.gpu_type} GPUs".strip())
    parts = [
        f"{row.memory_mib:,} MiB" if row.memory_mib else "",
        f"{row.millicpus / 1000:g} CPU" if row.millicpus else "",
        f"{row.disk_mib:,} MiB of disk" if row.disk_mib else "",
        gpus if row.gpus else "",
        f"image {row.image}" if row.image else "",
    ]
    return ", ".join(part for part in parts if part)


def _build_shell_fields(row: Lease) -> list[SummaryField]:
    names = [*row.shells.values_list("name", flat=True)]
    return (
        [SummaryField("Shells", f"{len(names)}", note=truncate_text(", ".join(names), MAX_SHELL_NAMES_CHARS))] if names else []
    )


def _parse_datetime(raw: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(raw)
    except ValueError:
        return None
    return moment if timezone.is_aware(moment) else None


@admin.register(Turn)
class TurnAdmin(ReadOnlyModelAdmin):
    list_display = ["turn", "agent_label", "status_badge", "action_summary", "lasted", "started"]
    list_filter = ["skipped"]
    list_select_related = ["lease"]
    search_fields = ["lease__agent_did__startswith", "lease__environment_id__startswith"]
    owner_search = OwnerSearch("lease")
    search_help_text = "Agent or environment (prefix)"
    ordering = ["-pk"]
    list_tabs = {
        "all": ListTab("All", "No turns yet. Clients play turns through the API."),
        "skipped": ListTab("Skipped", "No skipped turns: every turn returned an action.", lambda now: Q(skipped=True)),
        "open": ListTab("In progress", "No turns in progress.", lambda now: Q(ended_at__isnull=True)),
    }
    fieldsets = build_all_fields_fieldset("lease", "number", "run", "started_at", "deadline_at", "ended_at", "skipped")
    change_form_outer_before_template = "admin/leases/turn/action.html"

    @display(description="Turn")
    def turn(self, row: Turn) -> str:
        return str(row.number)

    @display(description="Agent and environment")
    def agent_label(self, row: Turn) -> SafeString:
        return render_two_lines(row.lease.agent_did, row.lease.environment_id)

    @display(description="State")
    def status_badge(self, row: Turn) -> SafeString:
        return render_turn_status(row)

    @display(description="Action")
    def action_summary(self, row: Turn) -> SafeString:
        return format_html('<span class="lh-command">{}</span>', truncate_text(row.answer) or "–")

    @display(description="Duration")
    def lasted(self, row: Turn) -> str:
        return format_duration((row.ended_at or database_time.now()) - row.started_at)

    @display(description="Started")
    def started(self, row: Turn) -> SafeString | str:
        return render_time_ago(row.started_at)

    def get_page_context(self, request: HttpRequest, row: Turn) -> dict[str, Any]:
        return {
            "facts": [
                SummaryField("Turn", row.number, note=render_turn_status(row)),
                *([SummaryField("Failed by", origin)] if (origin := classify_turn(row)) else []),
                SummaryField("Lease", render_admin_link("leases_lease", row.lease_id, row.lease)),
                SummaryField("Run", render_admin_link("sandboxes_run", row.run_id, row.run_id) if row.run_id else "none"),
                SummaryField("Started", render_time_ago(row.started_at), note=render_timestamp(row.started_at)),
                SummaryField("Duration" if row.ended_at else "Running for", self.lasted(row)),
            ],
            "action_json": json.dumps(row.action, indent=2, ensure_ascii=False) if row.answer else "",
        }

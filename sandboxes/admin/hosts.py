"""Console pages of hosts."""

from datetime import datetime
from typing import Any

from django.contrib import admin
from django.db.models import Count, Q
from django.http import HttpRequest
from django.utils.safestring import SafeString
from unfold.decorators import display

from sandboxes.admin.base.actions import AdminAction
from sandboxes.admin.base.audit import list_audit_entries
from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.formatting import (
    SummaryField,
    build_changelist_url,
    format_age,
    render_badge,
    render_time_ago,
    render_timestamp,
    render_two_lines,
    truncate_text,
)
from sandboxes.admin.base.model_admin import ConsoleModelAdmin
from sandboxes.admin.engine_quotas import build_quota_fields, build_quota_panels
from sandboxes.db import database_time
from sandboxes.formatting import pluralize
from sandboxes.hosts import registry
from sandboxes.models import Host, Sandbox, SandboxState
from sandboxes.pool import start_breaker
from sandboxes.providers.registry import PROVIDERS

MAX_AUDIT_ROWS = 12
BADGES = {"live": "ok", "unreachable": "late", "lost": "failing"}


RESUME_STARTS_ACTION = AdminAction(
    title="Resume starts",
    warning="Sandboxes are started on this host again. Three more failures in a row pause the starts again.",
    done="starts sandboxes again",
    refusal_reason="its starts are not paused",
    legal=lambda row: start_breaker.is_open(row, now=database_time.now()),
    verb=lambda row, actor, reason, now: start_breaker.reset(row, now=now, actor=actor),
    icon="replay",
    permissions=("sandboxes.drain_pool",),
)


def build_unreachable_filter(now: datetime) -> Q:
    return Q(lost_at__isnull=True) & ~Q(pk__in=registry.find_live_hosts(now=now).values("pk"))


@admin.register(Host)
class HostAdmin(ConsoleModelAdmin):
    list_display = ["name", "state", "heartbeat", "load", "memory", "engine", "release"]
    ordering = ["name"]
    list_tabs = {
        "all": ListTab("All", "No hosts yet. A host appears when its worker runs for the first time: manage.py up."),
        "unreachable": ListTab("Unreachable", "Each host has a recent heartbeat.", build_unreachable_filter),
        "paused": ListTab("Starts paused", "Every host may start sandboxes.", lambda now: Q(starts_paused_until__gt=now)),
        "lost": ListTab("Lost", "No host is declared lost.", lambda now: Q(lost_at__isnull=False)),
    }
    fieldsets = [(None, {"fields": ["name"]})]
    change_form_outer_before_template = "admin/sandboxes/host/actions.html"
    row_actions = {"resume_starts": RESUME_STARTS_ACTION}

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def annotate_rows(self, rows: list[Host]) -> None:
        # Destroyed sandboxes are left out by a condition of an index: a host has many of them.
        live = Sandbox.objects.exclude(state=SandboxState.DESTROYED).exclude(state=SandboxState.COLD)
        counted = live.filter(host__in=[row.pk for row in rows]).order_by().values("host").annotate(number=Count("pk"))
        numbers = dict(counted.values_list("host", "number"))
        for row in rows:
            row.number = numbers.get(row.pk, 0)  # type: ignore[attr-defined]

    @display(description="State")
    def state(self, row: Host) -> SafeString:
        now = database_time.now()
        problems = {"starts paused": start_breaker.is_open(row, now=now), "image missing": row.missing_images}
        alarm = ", ".join(text for text, present in problems.items() if present)
        state = render_state(row, now)
        return render_two_lines(state, render_badge("paused", alarm)) if alarm else state

    @display(description="Last heartbeat")
    def heartbeat(self, row: Host) -> SafeString | str:
        return render_time_ago(row.heartbeat_at)

    @display(description="Sandboxes")
    def load(self, row: Host) -> str:
        return f"{row.number:,}"  # type: ignore[attr-defined]

    @display(description="Memory")
    def memory(self, row: Host) -> str:
        return f"{row.memory_mib:,} MiB" if row.memory_mib else "–"

    @display(description="Provider and engine")
    def engine(self, row: Host) -> SafeString:
        return render_two_lines(row.provider, row.engine_id)

    @display(description="Version")
    def release(self, row: Host) -> str:
        return row.version or "–"

    def get_page_context(self, request: HttpRequest, row: Host) -> dict[str, Any]:
        now = database_time.now()
        state = registry.get_state(row, now=now)
        notes = {
            "unreachable": "its sandboxes and their leases wait for it",
            "lost": "its places are released; it starts no sandboxes until it is cleaned up",
        }
        self.annotate_rows([row])
        quotas = build_quota_panels([row] if has_quotas(row) else [], now)
        return {
            "engine_quotas": quotas,
            "facts": [
                SummaryField("State", render_state(row, now), note=notes.get(state, ""), alarm=state != "live"),
                SummaryField(
                    "Last heartbeat",
                    self.heartbeat(row),
                    note=f"{row.heartbeat_at:%Y-%m-%d %H:%M:%S} UTC" if row.heartbeat_at else "",
                ),
                SummaryField(
                    "Sandboxes",
                    self.load(row),
                    note="with a process",
                    href=build_changelist_url("sandboxes_sandbox", slice="live", host__exact=row.pk),
                ),
                build_starts_field(row, now),
                *build_image_fields(row),
                *build_seal_fields(row),
                *build_quota_fields(quotas),
                SummaryField("Memory", self.memory(row), note="of the engine's machine"),
                *build_clock_fields(row),
                SummaryField("Provider", row.provider, note=f"engine {row.engine_id}"),
                SummaryField("Version", self.release(row), note="of the worker"),
                SummaryField("Task queue", row.queue or "–"),
            ],
            "audit": list_audit_entries(row, MAX_AUDIT_ROWS),
        }


def has_quotas(row: Host) -> bool:
    entry = PROVIDERS.get(row.provider)
    return entry is not None and entry.has_quotas


def render_state(row: Host, now: datetime) -> SafeString:
    state = registry.get_state(row, now=now)
    return render_badge(BADGES[state], state)


def build_image_fields(row: Host) -> list[SummaryField]:
    """Build the images of pools that the engine does not have."""
    if not row.missing_images:
        return []
    listed = ", ".join(f"{image} (pool {pool})" for pool, image in sorted(row.missing_images.items()))
    return [SummaryField("Missing images", f"{len(row.missing_images):,}", note=listed, alarm=True)]


def build_seal_fields(row: Host) -> list[SummaryField]:
    """Build the result of the last check that sandboxes reach the gateway alone, of a provider that has to prove it."""
    entry = PROVIDERS.get(row.provider)
    if entry is None or not entry.proves_isolation:
        return []
    if row.sealed is None:
        return [SummaryField("Seal", "not checked", note="no sandbox is started before a check has passed", alarm=True)]
    text = "gateway alone" if row.sealed else "open"
    shown = render_timestamp(row.seal_checked_at, text) if row.seal_checked_at else text
    return [SummaryField("Seal", shown, note=row.seal_report.replace("\n", "; "), alarm=not row.sealed)]


def build_starts_field(row: Host, now: datetime) -> SummaryField:
    """Build the state of the circuit breaker of starts."""
    failed = pluralize(row.start_failures, "failed start", "failed starts")
    if row.starts_paused_until and start_breaker.is_open(row, now=now):
        left = render_timestamp(row.starts_paused_until, f"paused for {format_age(row.starts_paused_until - now)}")
        return SummaryField("Starts", left, note=f"after {failed}: {truncate_text(row.start_error)}", alarm=True)
    return SummaryField("Starts", "allowed", note=f"{failed} in a row" if row.start_failures else "no failed starts")


def build_clock_fields(row: Host) -> list[SummaryField]:
    """Build the field of a clock that differs from the database's."""
    if row.clock_offset is None or abs(row.clock_offset) <= database_time.TOLERATED_SKEW:
        return []
    return [SummaryField("Clock", f"{row.clock_offset.total_seconds():+,.0f} s", note="from the database's", alarm=True)]

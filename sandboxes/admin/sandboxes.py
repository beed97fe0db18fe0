"""Console pages of sandboxes."""

from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.contrib.filters.admin import RadioFilter
from unfold.decorators import display

from sandboxes import destruction, formatting, suspension
from sandboxes.admin.agent_data import build_agent_data_field, find_attachment
from sandboxes.admin.base.actions import AdminAction
from sandboxes.admin.base.audit import AuditEntry, list_audit_entries
from sandboxes.admin.base.changelist import KnownValuesFilter
from sandboxes.admin.base.formatting import (
    SummaryField,
    build_changelist_url,
    decode_output,
    format_command,
    format_counts,
    format_duration,
    format_time_until,
    render_admin_link,
    render_badge,
    render_time_ago,
    render_time_since,
    render_timestamp,
    render_two_lines,
    truncate_text,
)
from sandboxes.admin.base.model_admin import ReadOnlyModelAdmin, build_all_fields_fieldset
from sandboxes.admin.base.registry import build_agent_field, build_holder_field
from sandboxes.admin.policies import build_policy_field
from sandboxes.admin.readings import build_cpu_field
from sandboxes.admin.runs import format_run_duration, render_run_outcome
from sandboxes.admin.snapshots import SNAPSHOT_KIND_LABELS, SnapshotAdmin, describe_snapshot_location, find_snapshots
from sandboxes.admin.tabs import SANDBOX_TABS
from sandboxes.db import database_time
from sandboxes.formatting import format_bytes, pluralize
from sandboxes.hosts import registry
from sandboxes.models import ALIVE_STATES, GONE_STATES, Host, Sandbox, SandboxState, Snapshot, Transition
from sandboxes.models.state import Attachment, SnapshotKind
from sandboxes.providers.base import Network
from sandboxes.providers.registry import PROVIDERS

NETWORK_NOTES = {Network.SEALED: "", Network.GATEWAY: ", network to the gateway alone", Network.OPEN: ", open network"}
MAX_PANEL_ROWS = 25  # newest entries of each table on a sandbox's page
UNSTORED_STATES = (SandboxState.RUNNING, SandboxState.WAITING, SandboxState.SUSPENDED)  # with changes since the last store
RUN_TRANSITIONS_FILTER = Q(to=SandboxState.RUNNING) | Q(
    was=SandboxState.RUNNING, to=SandboxState.WAITING
)  # duplicates of the entry of the run


def format_transition_reason(row: Transition) -> str:
    """Format the code and the text of a transition's reason, such as "lease_ended: released", without repeating the code."""
    return row.reason if row.reason.startswith(row.code) else f"{row.code}: {row.reason}"


def compute_time_alive(sandbox: Sandbox, now: datetime) -> timedelta:
    """Total time with a process, from each requested start to the confirmed end."""
    without_process = ("", SandboxState.COLD, SandboxState.DESTROYED)
    edges = sandbox.transitions.filter(Q(was__in=without_process) | Q(to__in=without_process)).order_by("pk")
    total, began = timedelta(0), None
    for to, at in edges.values_list("to", "at"):
        if to not in without_process:
            began = at
        elif began:  # the clock may have been set back in between
            total, began = total + max(at - began, timedelta(0)), None
    return total + max(now - began, timedelta(0)) if began else total


def build_alive_field(row: Sandbox, now: datetime) -> SummaryField:
    if row.destroyed_at and not row.transitions.exists():
        return SummaryField("Alive", "not known", note="its transitions are past their retention")
    return SummaryField("Alive", format_duration(compute_time_alive(row, now)), note="total time with a process")


RETRY_DESTROY_ACTION = AdminAction(
    title="Retry destroy",
    warning="The next sweep sends the destroy request again, with the full number of retries.",
    done="released from quarantine; the next sweep retries the destroy",
    refusal_reason="not in quarantine",
    legal=lambda sandbox: sandbox.state == SandboxState.DESTROYING and sandbox.quarantined_at is not None,
    verb=lambda sandbox, actor, reason, now: destruction.retry_destroy(sandbox.pk, now=now, actor=actor),
    icon="replay",
    permissions=("sandboxes.act_on_sandbox",),
    bulk_button="Retry destroy… (quarantine only)",
)
SOURCE_LABELS = {"local": "the local copy", "cloud": "the store", "vendor": "the vendor's snapshot"}


class TimeInStateFilter(RadioFilter):
    """Filter by time in the present state."""

    title = "time in this state"
    parameter_name = "lasting"
    lengths = {"5m": timedelta(minutes=5), "1h": timedelta(hours=1), "1d": timedelta(days=1)}

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("5m", "More than 5 minutes"), ("1h", "More than 1 hour"), ("1d", "More than 1 day")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Sandbox]) -> QuerySet[Sandbox]:
        length = self.lengths.get(self.value() or "")
        return queryset.filter(state_since__lt=database_time.now() - length) if length else queryset


class SandboxProviderFilter(KnownValuesFilter):
    known_values = [*PROVIDERS]


@admin.register(Sandbox)
class SandboxAdmin(ReadOnlyModelAdmin):
    list_display = ["agent_label", "status", "lasted", "place", "used", "trouble"]
    list_filter = ["state", TimeInStateFilter, "pool", "policy", ("provider", SandboxProviderFilter)]
    list_select_related = ["pool", "attachment"]
    list_defer = ["attachment__base", "attachment__pulling"]
    search_fields = ["agent_did__startswith", "environment_id__startswith"]
    search_help_text = "Agent or environment (prefix), or a complete id"
    ordering = ["-created_at", "-pk"]
    list_tabs = SANDBOX_TABS
    fieldsets = build_all_fields_fieldset(
        "id", "pool", "agent_did", "environment_id", "holder", "state", "state_since", "incarnation", "provider",
        "isolated", "ref", "image", "memory_mib", "millicpus", "disk_mib", "gpus", "gpu_type", "pids", "runtime", "policy",
        "open_runs", "suspend_after", "frozen",
        "held_until", "auto_stop", "auto_delete", "vendor_auto_stop", "vendor_auto_delete", "lifetime_ends_at",
        "idle_after", "idle_at", "last_used_at", "prepared", "source", "workspace_bytes", "measured_at", "warm_hits",
        "woken_local", "woken_cloud", "woken_vendor", "woken_fresh", "lost_at", "claimed_by", "deadline_at", "tries",
        "persist_failures", "quarantined_at", "created_at", "destroyed_at",
    )  # fmt: skip
    change_form_outer_before_template = "admin/sandboxes/sandbox/history.html"
    row_actions = {"retry_destroy": RETRY_DESTROY_ACTION}
    bulk_actions = {"retry_all": RETRY_DESTROY_ACTION}

    # --- the list -----------------------------------------------------------------------------------------------------

    @display(description="Agent and environment")
    def agent_label(self, row: Sandbox) -> SafeString:
        return render_two_lines(row.agent_did or row.pk, row.environment_id or "unclaimed")

    @display(description="State")
    def status(self, row: Sandbox) -> SafeString:
        alarm = format_html('<b class="lh-alarm">lost {}</b>', render_time_ago(row.lost_at)) if is_lost(row) else ""
        return render_two_lines(render_badge(row.state), alarm) if alarm else render_badge(row.state)

    @display(description="Time in state")
    def lasted(self, row: Sandbox) -> SafeString:
        return render_time_since(row.state_since)

    @display(description="Pool")
    def place(self, row: Sandbox) -> SafeString:
        return render_two_lines(row.pool, row.provider)

    @display(description="Last used")
    def used(self, row: Sandbox) -> SafeString:
        return render_two_lines(render_time_ago(row.last_used_at), format_eviction_time(row))

    @display(description="Error")
    def trouble(self, row: Sandbox) -> SafeString | str:
        unsaved = get_unsaved_attachment(row, getattr(row, "attachment", None))
        if not row.last_error and unsaved is None:
            return "–"
        step, failures = ("eviction", row.persist_failures) if row.state == SandboxState.WAITING else ("destroy", row.tries)
        title = pluralize(failures, f"failed {step}", f"failed {step}s") if failures else "Last error"
        if unsaved and not failures:
            title = "Data not stored"
        return format_html(
            '<span class="lh-two lh-trouble"><span>{}</span><span>{}</span></span>',
            title,
            truncate_text(row.last_error or (unsaved.last_error if unsaved else "")),
        )

    # --- the page -----------------------------------------------------------------------------------------------------

    def get_page_context(self, request: HttpRequest, row: Sandbox) -> dict[str, Any]:
        now, isolation = database_time.now(), f", {row.runtime}" if row.runtime else ""
        isolation += "" if row.isolated else ", not isolated"
        isolation += NETWORK_NOTES[Network(row.network)]
        ref = format_html('<span class="lh-command">{}</span>', row.ref or "–")
        entries = self.list_entries(row)
        stored = list(find_snapshots(row)[: MAX_PANEL_ROWS + 1])
        attachment = find_attachment(row)
        unsaved = get_unsaved_attachment(row, attachment)
        runs = list(row.runs.defer("stdout", "stderr")[: MAX_PANEL_ROWS + 1])
        return {
            "facts": [
                SummaryField("State", render_badge(row.state), note=format_html("for {}", render_time_since(row.state_since))),
                *(
                    [SummaryField("Lost", render_time_ago(row.lost_at), note="the next sweep ends its lease", alarm=True)]
                    if is_lost(row)
                    else []
                ),
                build_holder_field(row.holder) if row.holder else SummaryField("Lease", "none", note="unclaimed"),
                build_agent_field(row.agent_did),
                SummaryField("Pool", render_admin_link("sandboxes_pool", row.pool_id, row.pool), note=row.provider + isolation),
                *([build_host_field(row.host)] if row.host else []),
                build_policy_field(row.policy),
                SummaryField("Last used", render_time_ago(row.last_used_at), note=format_eviction_time(row)),
                *(
                    [SummaryField("Suspended after", format_duration(row.suspend_after), note="in waiting")]
                    if row.suspend_after
                    else []
                ),
                build_workspace_field(row),
                *([build_agent_data_field(attachment)] if attachment else []),
                *([build_wake_source_field(row, stored)] if stored or row.state not in GONE_STATES else []),
                *([build_background_processes_field(row)] if row.state in ALIVE_STATES else []),
                SummaryField("Provider name", ref, note=f"incarnation {row.incarnation}, {describe_state_source(row)}"),
                SummaryField(
                    "Wakes",
                    f"{row.woken_local + row.woken_cloud + row.woken_vendor + row.woken_fresh:,}",
                    note=format_counts(
                        {
                            "from local copy": row.woken_local,
                            "from store": row.woken_cloud,
                            "from vendor's snapshot": row.woken_vendor,
                            "fresh": row.woken_fresh,
                        }
                    ),
                ),
                SummaryField("Runs without a wake", f"{row.warm_hits:,}", note="the sandbox was already alive"),
                build_alive_field(row, now),
                build_cpu_field(row),
                *([build_destroy_field(row, now)] if row.deadline_at or row.destroyed_at else []),
            ],
            "sandbox": row,
            "last_error": decode_output(row.last_error.encode()),
            "timeline": entries[:MAX_PANEL_ROWS],
            "more_entries": len(entries) > MAX_PANEL_ROWS,
            "unsaved": unsaved,
            "unsaved_error": decode_output(unsaved.last_error.encode()) if unsaved else "",
            "snapshots": [self.build_snapshot_row(row, each) for each in stored[:MAX_PANEL_ROWS]],
            "can_act_on_snapshots": any(
                request.user.has_perms(each.permissions) for each in SnapshotAdmin.row_actions.values()
            ),
            "more_snapshots": build_changelist_url("sandboxes_snapshot", slice="history", holder=row.holder)
            if len(stored) > MAX_PANEL_ROWS
            else "",
            "runs": [
                (run, format_command(run.argv), render_run_outcome(run), format_run_duration(run))
                for run in runs[:MAX_PANEL_ROWS]
            ],
            "more_runs": build_changelist_url("sandboxes_run", slice="all", sandbox=row.pk)
            if len(runs) > MAX_PANEL_ROWS
            else "",
        }

    def list_entries(self, row: Sandbox) -> list[AuditEntry]:
        """List transitions and actions of operators, newest first."""
        transitions = [
            AuditEntry(each.at, render_badge(each.to), format_transition_reason(each), each.actor)
            for each in row.transitions.exclude(RUN_TRANSITIONS_FILTER)[: MAX_PANEL_ROWS + 1]
        ]
        return sorted([*transitions, *list_audit_entries(row, MAX_PANEL_ROWS)], key=attrgetter("at"), reverse=True)

    def build_snapshot_row(self, row: Sandbox, each: Snapshot) -> dict[str, Any]:
        """Build a row of the snapshot table. Its actions open the dialogs of the snapshot's own page."""
        return {
            "snapshot": each,
            "size": format_bytes(each.size_bytes),
            "reason": SNAPSHOT_KIND_LABELS[SnapshotKind(each.kind)],
            "location": describe_snapshot_location(each),
            "is_from_other_sandbox": each.sandbox_id != row.pk,
            "name": formatting.format_path(each.name),
            "actions": [
                (
                    f"{declared.title}…",
                    f"{declared.title} the snapshot of {each.at:%Y-%m-%d %H:%M:%S}",
                    reverse(f"admin:sandboxes_snapshot_{name}", args=[each.pk]),
                )
                for name, declared in SnapshotAdmin.row_actions.items()
                if each.forgotten_at is None
            ],
        }


def build_host_field(host: Host) -> SummaryField:
    state = registry.get_state(host, now=database_time.now())
    return SummaryField("Host", render_admin_link("sandboxes_host", host.pk, host), note=state, alarm=state != "live")


def is_lost(row: Sandbox) -> bool:
    return row.lost_at is not None and row.state not in GONE_STATES


def get_unsaved_attachment(row: Sandbox, attachment: Attachment | None) -> Attachment | None:
    """Return the attachment if its /data has changes that are stored nowhere else."""
    stale = attachment is None or attachment.unsaved_since is None or attachment.incarnation != row.incarnation
    return None if stale or row.lost_at or row.state in (SandboxState.COLD, SandboxState.DESTROYED) else attachment


def build_background_processes_field(row: Sandbox) -> SummaryField:
    """Build the number of running background processes."""
    open_processes = row.processes.filter(ended_at__isnull=True)
    running = open_processes.count()
    note = "they do not prevent eviction"
    if row.suspend_after and running and suspension.find_keeping_awake(now=database_time.now()).filter(sandbox=row).exists():
        note = "they prevent suspension, but not eviction"
    return SummaryField(
        "Background processes",
        f"{running:,}",
        note=note if running else "",
        href=build_changelist_url("sandboxes_process", slice="all", sandbox=row.pk) if running else "",
    )


def format_eviction_time(row: Sandbox) -> str:
    """Format the time until an idle eviction."""
    return format_time_until(row.idle_at, "evicted", "eviction due") if row.state in ALIVE_STATES and not row.lost_at else ""


def build_workspace_field(row: Sandbox) -> SummaryField:
    """Build the size of /workspace when it was last measured, and its limit."""
    if row.workspace_bytes is None:
        return SummaryField("Workspace", "not measured", note=f"limit {row.pool.workspace_limit_mib:,} MiB")
    limit = row.pool.workspace_limit_mib << 20
    over = row.workspace_bytes > limit
    return SummaryField(
        "Workspace",
        f"{format_bytes(row.workspace_bytes)} of {format_bytes(limit)}",
        note=format_html(
            "{}measured {}", "over the limit: runs are refused; " if over else "", render_time_ago(row.measured_at)
        ),
        alarm=over,
    )


def describe_state_source(row: Sandbox) -> str:
    """Describe the source of the present incarnation's state."""
    return (
        f"state from {SOURCE_LABELS[row.source]}"
        if row.source in SOURCE_LABELS
        else "no earlier state"
        if row.source
        else "not ready yet"
    )


def build_wake_source_field(row: Sandbox, stored: list[Snapshot]) -> SummaryField:
    """Build the source that the next wake would restore from."""
    newest = next((each for each in stored if each.forgotten_at is None), None)
    if newest is None:
        return SummaryField("Next wake from", "no stored state", note="starts fresh")
    next_store = "; stored again when evicted" if row.state in UNSTORED_STATES else ""
    note = format_html("stored {}{}", render_time_ago(newest.at), next_store)
    source = "vendor" if newest.vendor_snapshot else "local" if newest.local else "cloud"
    return SummaryField("Next wake from", SOURCE_LABELS[source], note=note)


def build_destroy_field(row: Sandbox, now: datetime) -> SummaryField:
    """Build the progress of the destroy, or the deadline of the present step."""
    if row.destroyed_at:
        return SummaryField("Destroyed", render_time_ago(row.destroyed_at), note="confirmed by the provider")
    if row.state != SandboxState.DESTROYING:
        return SummaryField("Deadline", render_timestamp(row.deadline_at) if row.deadline_at else "–")
    tries = pluralize(row.tries, "failed attempt", "failed attempts") if row.tries else "not attempted yet"
    if row.quarantined_at:
        return SummaryField("Destroy", "quarantined", note=f"after {tries}", alarm=True)
    next_attempt = (
        f"next attempt in {format_duration(row.deadline_at - now)}"
        if row.deadline_at and row.deadline_at > now
        else "due at the next sweep"
    )
    return SummaryField("Destroy", tries, note=next_attempt, alarm=row.tries > 0)

"""Operators' pages on what exists and what ran in it. `leases.admin.leases` tells some of them what a holder is."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any, ClassVar
from uuid import UUID

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import Q, QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import URLPattern, path, reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.contrib.filters.admin import RadioFilter
from unfold.decorators import action, display

from sandboxes import destruction
from sandboxes.admin import formatting
from sandboxes.admin.base import (
    AdminAction,
    AuditEntry,
    HolderDisplayMixin,
    ListTab,
    ReadOnlyModelAdmin,
    ReasonForm,
    SummaryField,
    build_all_fields_fieldset,
    build_sandbox_field,
    list_audit_entries,
)
from sandboxes.admin.formatting import (
    build_changelist_url,
    decode_output,
    format_bytes,
    format_command,
    format_counts,
    format_duration,
    format_time_until,
    pluralize,
    render_admin_link,
    render_badge,
    render_time_ago,
    render_time_since,
    render_timestamp,
    render_two_lines,
    truncate_text,
)
from sandboxes.admin.model_rates import ModelRateAdmin
from sandboxes.admin.policies import PolicyAdmin, build_policy_field
from sandboxes.admin.pools import PoolAdmin, QuotaAdmin
from sandboxes.admin.processes import ProcessAdmin
from sandboxes.admin.readings import ReadingAdmin, build_cpu_field
from sandboxes.admin.state import (
    SNAPSHOT_KIND_LABELS,
    AgentDataAdmin,
    DataEventAdmin,
    SnapshotAdmin,
    build_agent_data_field,
    describe_snapshot_location,
    find_attachment,
    find_snapshots,
)
from sandboxes.admin.tabs import SANDBOX_TABS
from sandboxes.admin.webhooks import DeliveryAdmin, EventAdmin, WebhookAdmin
from sandboxes.models import ALIVE_STATES, GONE_STATES, Run, RunOutcome, Sandbox, SandboxState, Snapshot, Sweep
from sandboxes.models.state import Attachment, SnapshotKind
from sandboxes.pool_stats import STALLED_AFTER

__all__ = [
    "AgentDataAdmin", "DataEventAdmin", "DeliveryAdmin", "EventAdmin", "ModelRateAdmin", "PolicyAdmin", "PoolAdmin",
    "ProcessAdmin", "QuotaAdmin", "ReadingAdmin", "RunAdmin", "SandboxAdmin", "SnapshotAdmin", "SweepAdmin", "WebhookAdmin",
]  # fmt: skip

MAX_PANEL_ROWS = 25  # newest entries of each list on a sandbox's page
RUN_TRANSITIONS_FILTER = Q(to=SandboxState.RUNNING) | Q(
    was=SandboxState.RUNNING, to=SandboxState.WAITING
)  # the run's own line says as much


def compute_time_alive(sandbox: Sandbox, now: datetime) -> timedelta:
    """How long it had a process, from the start that was asked for to the end that was confirmed."""
    without = ("", SandboxState.COLD, SandboxState.DESTROYED)
    edges = sandbox.transitions.filter(Q(was__in=without) | Q(to__in=without)).order_by("pk")
    total, began = timedelta(0), None
    for to, at in edges.values_list("to", "at"):
        if to not in without:
            began = at
        elif began:  # a clock may have jumped back in between
            total, began = total + max(at - began, timedelta(0)), None
    return total + max(now - began, timedelta(0)) if began else total


RETRY_DESTROY_ACTION = AdminAction(
    title="Retry destroy",
    warning="The provider is asked again by the next sweep, as often as the first time.",
    done="out of quarantine: the next sweep tries again",
    refusal_reason="not in quarantine",
    legal=lambda sandbox: sandbox.state == SandboxState.DESTROYING and sandbox.quarantined_at is not None,
    verb=lambda sandbox, actor, reason, now: destruction.retry_destroy(sandbox.pk, now=now, actor=actor),
)
SOURCE_LABELS = {"local": "this machine's copy", "cloud": "the store"}


class TimeInStateFilter(RadioFilter):
    """For how long it has been in its state."""

    title = "time in this state"
    parameter_name = "lasting"
    lengths = {"5m": timedelta(minutes=5), "1h": timedelta(hours=1), "1d": timedelta(days=1)}

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("5m", "More than 5 minutes"), ("1h", "More than an hour"), ("1d", "More than a day")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Sandbox]) -> QuerySet[Sandbox]:
        length = self.lengths.get(self.value() or "")
        return queryset.filter(state_since__lt=timezone.now() - length) if length else queryset


@admin.register(Sandbox)
class SandboxAdmin(HolderDisplayMixin, ReadOnlyModelAdmin):
    list_display = ["who", "status", "lasted", "place", "used", "trouble"]
    list_filter = ["state", TimeInStateFilter, "pool", "policy", "provider"]
    list_select_related = ["pool", "attachment"]
    list_defer = ["attachment__base", "attachment__pulling"]
    search_fields = ["agent_did__startswith", "environment_id__startswith"]
    search_help_text = "Agent or environment, or a whole id"
    ordering = ["-created_at", "-pk"]
    slices = SANDBOX_TABS
    fieldsets = build_all_fields_fieldset(
        "id", "pool", "agent_did", "environment_id", "holder", "state", "state_since", "incarnation", "provider",
        "isolated", "ref", "image", "memory_mib", "millicpus", "pids", "policy", "open_runs", "idle_after", "idle_at",
        "last_used_at", "prepared", "source", "workspace_bytes", "measured_at", "warm_hits", "woken_local", "woken_cloud",
        "woken_fresh", "lost_at", "claimed_by", "deadline_at", "tries", "quarantined_at", "created_at", "destroyed_at",
    )  # fmt: skip
    change_form_outer_before_template = "admin/sandboxes/sandbox/history.html"
    acts = {"retry_destroy": RETRY_DESTROY_ACTION}
    actions_detail = ["retry_destroy"]
    actions = ["retry_all"]
    snapshot_actions: ClassVar[
        Mapping[str, str]
    ] = {}  # what may be done with a snapshot: dialogs of its own page. `leases` has some

    # --- the list -----------------------------------------------------------------------------------------------------

    @display(description="Agent and environment")
    def who(self, row: Sandbox) -> SafeString:
        nobody = "held by nobody" if row.state in GONE_STATES else "held by nobody yet"
        return render_two_lines(row.agent_did or row.pk, row.environment_id or nobody)

    @display(description="State")
    def status(self, row: Sandbox) -> SafeString:
        alarm = format_html('<b class="lh-alarm">lost {}</b>', render_time_ago(row.lost_at)) if is_lost(row) else ""
        return render_two_lines(render_badge(row.state), alarm) if alarm else render_badge(row.state)

    @display(description="For")
    def lasted(self, row: Sandbox) -> SafeString:
        return render_time_since(row.state_since)

    @display(description="Pool")
    def place(self, row: Sandbox) -> SafeString:
        return render_two_lines(row.pool, row.provider)

    @display(description="Last used")
    def used(self, row: Sandbox) -> SafeString:
        return render_two_lines(render_time_ago(row.last_used_at), format_eviction_time(row))

    @display(description="Trouble")
    def trouble(self, row: Sandbox) -> SafeString | str:
        here = get_unsaved_attachment(row, getattr(row, "attachment", None))
        if not row.last_error and here is None:
            return "–"
        what = "sleep" if row.state == SandboxState.WAITING else "destroy"
        tried = pluralize(row.tries, f"failed {what}", f"failed {what}s") if row.tries else "Last error"
        if here and not row.tries:
            tried = "Data not stored"
        return format_html(
            '<span class="lh-two lh-trouble"><span>{}</span><span>{}</span></span>',
            tried,
            truncate_text(row.last_error or (here.last_error if here else "")),
        )

    # --- the page -----------------------------------------------------------------------------------------------------

    def page(self, request: HttpRequest, row: Sandbox) -> dict[str, Any]:
        now, isolation = timezone.now(), "" if row.isolated else ", not isolated"
        ref = format_html('<span class="lh-command">{}</span>', row.ref or "–")
        entries = self.entries(row)
        stored = list(find_snapshots(row)[: MAX_PANEL_ROWS + 1])
        here = find_attachment(row)
        unsaved = get_unsaved_attachment(row, here)
        ran = list(row.runs.defer("stdout", "stderr")[: MAX_PANEL_ROWS + 1])
        return {
            "facts": [
                SummaryField("State", render_badge(row.state), note=format_html("for {}", render_time_since(row.state_since))),
                *(
                    [SummaryField("Lost", render_time_ago(row.lost_at), note="its lease ends", alarm=True)]
                    if is_lost(row)
                    else []
                ),
                self.holder(row.holder) if row.holder else SummaryField("Holder", "nobody"),
                self.agent(row.agent_did),
                SummaryField("Pool", render_admin_link("sandboxes_pool", row.pool_id, row.pool), note=row.provider + isolation),
                build_policy_field(row.policy),
                SummaryField("Last used", render_time_ago(row.last_used_at), note=format_eviction_time(row)),
                build_workspace_field(row),
                *([build_agent_data_field(here)] if here else []),
                *([build_wake_source_field(row, stored)] if stored or row.state not in GONE_STATES else []),
                *([build_background_processes_field(row)] if row.state in ALIVE_STATES else []),
                SummaryField("Process", ref, note=f"number {row.incarnation}, {describe_state_source(row)}"),
                SummaryField(
                    "Woken",
                    f"{row.woken_local + row.woken_cloud + row.woken_fresh:,}",
                    note=format_counts({"local": row.woken_local, "cloud": row.woken_cloud, "fresh": row.woken_fresh}),
                ),
                SummaryField("Found it alive", pluralize(row.warm_hits, "run", "runs"), note="that had to wait for nothing"),
                SummaryField(
                    "Seconds alive", f"{compute_time_alive(row, now).total_seconds():,.0f}", note="while it had a process"
                ),
                build_cpu_field(row),
                *([build_destroy_field(row, now)] if row.deadline_at or row.destroyed_at else []),
            ],
            "sandbox": row,
            "last_error": decode_output(row.last_error.encode()),
            "entries": entries[:MAX_PANEL_ROWS],
            "more_entries": len(entries) > MAX_PANEL_ROWS,
            "unsaved": unsaved,
            "unsaved_error": decode_output(unsaved.last_error.encode()) if unsaved else "",
            "snapshots": [self.copy(row, each) for each in stored[:MAX_PANEL_ROWS]],
            "can_act_on_snapshots": bool(self.snapshot_actions) and self.has_act_permission(request),
            "more_snapshots": build_changelist_url("sandboxes_snapshot", slice="history", holder=row.holder)
            if len(stored) > MAX_PANEL_ROWS
            else "",
            "runs": [
                (run, format_command(run.argv), render_run_outcome(run), format_run_duration(run))
                for run in ran[:MAX_PANEL_ROWS]
            ],
            "more_runs": build_changelist_url("sandboxes_run", slice="all", sandbox=row.pk)
            if len(ran) > MAX_PANEL_ROWS
            else "",
        }

    def entries(self, row: Sandbox) -> list[AuditEntry]:
        """What happened to it and what operators did to it, newest first."""
        moved = [
            AuditEntry(each.at, render_badge(each.to), each.reason, each.actor)
            for each in row.transitions.exclude(RUN_TRANSITIONS_FILTER)[: MAX_PANEL_ROWS + 1]
        ]
        return sorted([*moved, *list_audit_entries(row, MAX_PANEL_ROWS)], key=attrgetter("at"), reverse=True)

    def copy(self, row: Sandbox, each: Snapshot) -> dict[str, Any]:
        """A row of the table of snapshots."""
        return {
            "snapshot": each,
            "size": format_bytes(each.size_bytes),
            "why": SNAPSHOT_KIND_LABELS[SnapshotKind(each.kind)],
            "where": describe_snapshot_location(each),
            "is_from_other_sandbox": each.sandbox_id != row.pk,
            "name": formatting.format_path(each.name),
            "acts": [
                (title, f"{title} {each.at:%Y-%m-%d %H:%M:%S}", reverse(f"admin:sandboxes_snapshot_{act}", args=[each.pk]))
                for act, title in self.snapshot_actions.items()
                if each.forgotten_at is None
            ],
        }

    # --- acts ---------------------------------------------------------------------------------------------------------

    def has_act_permission(self, request: HttpRequest, object_id: str | None = None) -> bool:
        return request.user.has_perm("sandboxes.act_on_sandbox")

    @action(description="Retry destroy…", permissions=["act"], icon="replay", dialog=RETRY_DESTROY_ACTION.dialog)
    def retry_destroy(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, RETRY_DESTROY_ACTION, form)

    @action(description="Retry destroy… (quarantine only)", permissions=["act"])
    def retry_all(self, request: HttpRequest, queryset: QuerySet[Sandbox]) -> HttpResponse | None:
        return self.ask(request, queryset, RETRY_DESTROY_ACTION)


def is_lost(row: Sandbox) -> bool:
    return row.lost_at is not None and row.state not in GONE_STATES


def get_unsaved_attachment(row: Sandbox, here: Attachment | None) -> Attachment | None:
    """What it has of its agent's data, if there are changes in it that are stored nowhere else."""
    stale = here is None or here.unsaved_since is None or here.incarnation != row.incarnation
    return None if stale or row.lost_at or row.state in (SandboxState.COLD, SandboxState.DESTROYED) else here


def build_background_processes_field(row: Sandbox) -> SummaryField:
    """What runs in it without keeping it awake."""
    running = row.processes.filter(ended_at__isnull=True).count()
    return SummaryField(
        "In the background",
        pluralize(running, "process", "processes"),
        note="they do not keep it awake" if running else "",
        href=build_changelist_url("sandboxes_process", slice="all", sandbox=row.pk) if running else "",
    )


def format_eviction_time(row: Sandbox) -> str:
    """When it goes to sleep, if nothing uses it before."""
    return format_time_until(row.idle_at, "sleeps", "due to sleep") if row.state in ALIVE_STATES and not row.lost_at else ""


def build_workspace_field(row: Sandbox) -> SummaryField:
    """How large it was when it was last measured, and how large it may be."""
    if row.workspace_bytes is None:
        return SummaryField("Workspace", "not measured", note=f"{row.pool.workspace_limit_mib:,} MiB at most")
    most = row.pool.workspace_limit_mib << 20
    over = row.workspace_bytes > most
    return SummaryField(
        "Workspace",
        f"{format_bytes(row.workspace_bytes)} of {format_bytes(most)}",
        note=format_html("{}measured {}", "too large to run anything, " if over else "", render_time_ago(row.measured_at)),
        alarm=over,
    )


def describe_state_source(row: Sandbox) -> str:
    """Where the state of its present incarnation is from."""
    return (
        f"state from {SOURCE_LABELS[row.source]}"
        if row.source in SOURCE_LABELS
        else "started fresh"
        if row.source
        else "not ready yet"
    )


def build_wake_source_field(row: Sandbox, stored: list[Snapshot]) -> SummaryField:
    """Where its state would come from."""
    newest = next((each for each in stored if each.forgotten_at is None), None)
    if newest is None:
        return SummaryField("Wakes from", "a fresh start", note="nothing is stored of it")
    again = ", and again when it sleeps" if row.state in (SandboxState.RUNNING, SandboxState.WAITING) else ""
    note = format_html("stored {}{}", render_time_ago(newest.at), again)
    return SummaryField("Wakes from", SOURCE_LABELS["local" if newest.local else "cloud"], note=note)


def build_destroy_field(row: Sandbox, now: datetime) -> SummaryField:
    """How its destruction goes, if it has begun."""
    if row.destroyed_at:
        return SummaryField("Destroyed", render_time_ago(row.destroyed_at), note="confirmed by the provider")
    if row.state != SandboxState.DESTROYING:
        return SummaryField("Next step due", render_timestamp(row.deadline_at) if row.deadline_at else "–")
    tries = pluralize(row.tries, "failed try", "failed tries") if row.tries else "not tried yet"
    if row.quarantined_at:
        return SummaryField("Destroy", "quarantined", note=f"after {tries}", alarm=True)
    when = (
        f"next try in {format_duration(row.deadline_at - now)}"
        if row.deadline_at and row.deadline_at > now
        else "due at the next sweep"
    )
    return SummaryField("Destroy", tries, note=when, alarm=row.tries > 0)


def format_run_duration(run: Run) -> str:
    return format_duration(run.duration if run.duration is not None else timezone.now() - run.started_at)


def render_run_outcome(run: Run) -> SafeString:
    said = (
        f"exit {run.exit_code}" if run.outcome == RunOutcome.FAILED and run.exit_code is not None else run.get_outcome_display()
    )
    return render_badge(run.outcome, said)


@admin.register(Run)
class RunAdmin(HolderDisplayMixin, ReadOnlyModelAdmin):
    list_display = ["line", "result", "kind_label", "duration", "started", "who"]
    list_filter = ["outcome", "kind"]
    list_select_related = ["sandbox"]
    list_defer = ["stdout", "stderr"]
    search_fields = ["agent_did__startswith", "sandbox__environment_id__startswith"]
    search_help_text = "Agent or environment, or a whole id"
    ordering = ["-started_at", "-pk"]
    slices = {
        "all": ListTab("All", "Nothing has run yet."),
        "open": ListTab("Running", "Nothing runs now.", lambda now: Q(ended_at__isnull=True)),
        "failed": ListTab("Not ok", "Every run ended well.", lambda now: ~Q(outcome__in=[RunOutcome.OK, RunOutcome.OPEN])),
        "overdue": ListTab(
            "Overdue", "No run is past its deadline.", lambda now: Q(ended_at__isnull=True, deadline_at__lt=now - STALLED_AFTER)
        ),
    }
    fieldsets = build_all_fields_fieldset(
        "id", "sandbox", "holder", "agent_did", "incarnation", "kind", "turn_number", "cwd", "claimed_by",
        "started_at", "deadline_at", "ended_at", "outcome", "exit_code", "timed_out", "oom", "truncated",
        "stdin_bytes", "stdout_bytes", "stderr_bytes",
    )  # fmt: skip
    change_form_outer_before_template = "admin/sandboxes/run/output.html"

    @display(description="Command")
    def line(self, row: Run) -> SafeString:
        return format_html('<span class="lh-command">{}</span>', truncate_text(format_command(row.argv)))

    @display(description="Outcome")
    def result(self, row: Run) -> SafeString:
        return render_run_outcome(row)

    @display(description="Kind")
    def kind_label(self, row: Run) -> str:
        return row.kind if row.turn_number is None else f"{row.kind} {row.turn_number}"

    @display(description="Took")
    def duration(self, row: Run) -> str:
        return format_run_duration(row)

    @display(description="Started")
    def started(self, row: Run) -> SafeString | str:
        return render_time_ago(row.started_at)

    @display(description="Agent and environment")
    def who(self, row: Run) -> SafeString:
        return render_two_lines(row.agent_did, row.sandbox.environment_id)

    def page(self, request: HttpRequest, row: Run) -> dict[str, Any]:
        turn = f"turn {row.turn_number}" if row.turn_number is not None else row.kind
        return {
            "facts": [
                SummaryField("Outcome", render_run_outcome(row), note=row.note),
                SummaryField(
                    "Took" if row.ended_at else "Running for",
                    format_run_duration(row),
                    note=row.kind if row.kind == turn else turn,
                ),
                SummaryField("Started", render_time_ago(row.started_at), note=render_timestamp(row.started_at)),
                SummaryField("Deadline", render_timestamp(row.deadline_at)),
                build_sandbox_field(row),
                *([self.holder(row.holder)] if row.holder else []),
                SummaryField("Directory", row.cwd),
                SummaryField("Given", f"{row.stdin_bytes:,} bytes on stdin", note=", ".join(row.env_names) or "no variables"),
            ],
            "argv": format_command(row.argv),
            "streams": [build_output_stream(row, "stderr"), build_output_stream(row, "stdout")],  # what went wrong first
            "truncated": row.truncated,
        }

    def get_urls(self) -> list[URLPattern]:
        raw = self.admin_site.admin_view(self.raw)
        ours = [
            path("<uuid:pk>/stdout/", raw, {"name": "stdout"}, name="sandboxes_run_stdout"),
            path("<uuid:pk>/stderr/", raw, {"name": "stderr"}, name="sandboxes_run_stderr"),
        ]
        return [*ours, *super().get_urls()]

    def raw(self, request: HttpRequest, pk: UUID, name: str) -> HttpResponse:
        """What was kept of a stream, byte for byte. Never shown by the browser: an agent wrote it."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        run = Run.objects.filter(pk=pk).first()
        if run is None:
            raise Http404
        return HttpResponse(
            bytes(getattr(run, name)),
            content_type="text/plain; charset=utf-8",
            headers={
                "Content-Disposition": f'attachment; filename="{run.pk}.{name}.txt"',
                "X-Content-Type-Options": "nosniff",
            },
        )


def build_output_stream(run: Run, name: str) -> dict[str, Any]:
    """One output of a run: its text, and how much of it there was."""
    kept, received = bytes(getattr(run, name)), getattr(run, f"{name}_bytes")
    size = pluralize(received, "byte", "bytes")
    return {
        "name": name,
        "text": decode_output(kept),
        "size": f"The first {len(kept):,} of {size}" if received > len(kept) else size,
        "href": reverse(f"admin:sandboxes_run_{name}", args=[run.pk]) if kept else "",
    }


def is_late(sweep: Sweep, now: datetime) -> bool:
    """It has not succeeded for three times as long as it should."""
    return sweep.succeeded_at is None or sweep.succeeded_at < now - 3 * sweep.every


def build_late_filter(now: datetime) -> Q:
    # A handful of rows, and arithmetic with two columns that the databases do not do alike.
    return Q(pk__in=[sweep.pk for sweep in Sweep.objects.all() if is_late(sweep, now)])


@admin.register(Sweep)
class SweepAdmin(ReadOnlyModelAdmin):
    list_display = ["name", "health", "succeeded", "period", "lasted", "did", "error"]
    ordering = ["name"]
    slices = {
        "all": ListTab("All", "No sweep has run yet: is the worker running?"),
        "late": ListTab("Late", "Every sweep is on time.", build_late_filter),
    }
    fieldsets = build_all_fields_fieldset("name", "every", "started_at", "succeeded_at", "took", "counts")
    change_form_outer_before_template = "admin/sandboxes/sweep/error.html"

    @display(description="Health")
    def health(self, row: Sweep) -> SafeString:
        return render_sweep_health(row, timezone.now())

    @display(description="Last success")
    def succeeded(self, row: Sweep) -> SafeString | str:
        return render_time_ago(row.succeeded_at)

    @display(description="Every")
    def period(self, row: Sweep) -> str:
        return format_duration(row.every)

    @display(description="Took")
    def lasted(self, row: Sweep) -> str:
        return format_duration(row.took) if row.took is not None else "–"

    @display(description="Did")
    def did(self, row: Sweep) -> str:
        return ", ".join(f"{times} {what}" for what, times in row.counts.items()) or "nothing to do"

    @display(description="Error")
    def error(self, row: Sweep) -> SafeString | str:
        return format_html('<span class="lh-trouble">{}</span>', truncate_text(row.last_error)) if row.last_error else "–"

    def page(self, request: HttpRequest, row: Sweep) -> dict[str, Any]:
        return {
            "facts": [
                SummaryField("Health", self.health(row)),
                SummaryField(
                    "Last success", self.succeeded(row), note=render_timestamp(row.succeeded_at) if row.succeeded_at else ""
                ),
                SummaryField("Last start", render_time_ago(row.started_at)),
                SummaryField("Every", self.period(row)),
                SummaryField("Took", self.lasted(row)),
                SummaryField("Did", self.did(row), note="at its last success"),
            ],
            "last_error": decode_output(row.last_error.encode()),
        }


def render_sweep_health(sweep: Sweep, now: datetime) -> SafeString:
    if is_late(sweep, now):
        return render_badge("late")
    return render_badge("failing") if sweep.last_error else render_badge("ok")

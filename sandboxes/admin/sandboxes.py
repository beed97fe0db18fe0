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

from sandboxes import eviction
from sandboxes.admin import formatting
from sandboxes.admin.base import Act, Done, Fact, Facts, Held, Reason, Slice, all_fields, done_to, place_of
from sandboxes.admin.formatting import (
    ago,
    badge,
    command,
    counted,
    link,
    listed,
    rows,
    shortened,
    since,
    size,
    span,
    stamp,
    text,
    two,
    until,
)
from sandboxes.admin.model_rates import ModelRateAdmin
from sandboxes.admin.policies import PolicyAdmin, policy_fact
from sandboxes.admin.pools import PoolAdmin, QuotaAdmin
from sandboxes.admin.processes import ProcessAdmin
from sandboxes.admin.readings import ReadingAdmin, used
from sandboxes.admin.state import KINDS, AgentDataAdmin, DataEventAdmin, SnapshotAdmin, attached, of_agent, places, stored_of
from sandboxes.admin.tabs import SANDBOXES
from sandboxes.admin.webhooks import DeliveryAdmin, EventAdmin, WebhookAdmin
from sandboxes.models import ALIVE, GONE, Outcome, Run, Sandbox, Snapshot, State, Sweep
from sandboxes.models.state import Attachment, SnapshotKind
from sandboxes.pool_stats import LATE

__all__ = [
    "AgentDataAdmin", "DataEventAdmin", "DeliveryAdmin", "EventAdmin", "ModelRateAdmin", "PolicyAdmin", "PoolAdmin",
    "ProcessAdmin", "QuotaAdmin", "ReadingAdmin", "RunAdmin", "SandboxAdmin", "SnapshotAdmin", "SweepAdmin", "WebhookAdmin",
]  # fmt: skip

SHOWN = 25  # newest entries of each list on a sandbox's page
AROUND_RUNS = Q(to=State.RUNNING) | Q(was=State.RUNNING, to=State.WAITING)  # the run's own line says as much


def seconds_alive(sandbox: Sandbox, now: datetime) -> timedelta:
    """How long it had a process, from the start that was asked for to the end that was confirmed."""
    without = ("", State.COLD, State.DESTROYED)
    edges = sandbox.transitions.filter(Q(was__in=without) | Q(to__in=without)).order_by("pk")
    total, began = timedelta(0), None
    for to, at in edges.values_list("to", "at"):
        if to not in without:
            began = at
        elif began:  # a clock may have jumped back in between
            total, began = total + max(at - began, timedelta(0)), None
    return total + max(now - began, timedelta(0)) if began else total


RETRY = Act(
    title="Retry destroy",
    warning="The provider is asked again by the next sweep, as often as the first time.",
    done="out of quarantine: the next sweep tries again",
    illegal="not in quarantine",
    legal=lambda sandbox: sandbox.state == State.DESTROYING and sandbox.quarantined_at is not None,
    verb=lambda sandbox, actor, reason, now: eviction.retry_destroy(sandbox.pk, now=now, actor=actor),
)
SOURCES = {"local": "this machine's copy", "cloud": "the store"}


class Lasting(RadioFilter):
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
class SandboxAdmin(Held, Facts):
    list_display = ["who", "status", "lasted", "place", "used", "trouble"]
    list_filter = ["state", Lasting, "pool", "policy", "provider"]
    list_select_related = ["pool", "attachment"]
    list_defer = ["attachment__base", "attachment__pulling"]
    search_fields = ["agent_did__startswith", "environment_id__startswith"]
    search_help_text = "Agent or environment, or a whole id"
    ordering = ["-created_at", "-pk"]
    slices = SANDBOXES
    fieldsets = all_fields(
        "id", "pool", "agent_did", "environment_id", "holder", "state", "state_since", "incarnation", "provider",
        "isolated", "ref", "image", "memory_mib", "millicpus", "pids", "policy", "open_runs", "idle_after", "idle_at",
        "last_used_at", "prepared", "source", "workspace_bytes", "measured_at", "warm_hits", "woken_local", "woken_cloud",
        "woken_fresh", "lost_at", "claimed_by", "deadline_at", "tries", "quarantined_at", "created_at", "destroyed_at",
    )  # fmt: skip
    change_form_outer_before_template = "admin/sandboxes/sandbox/history.html"
    acts = {"retry_destroy": RETRY}
    actions_detail = ["retry_destroy"]
    actions = ["retry_all"]
    copy_acts: ClassVar[Mapping[str, str]] = {}  # what may be done with a snapshot: dialogs of its own page. `leases` has some

    # --- the list -----------------------------------------------------------------------------------------------------

    @display(description="Agent and environment")
    def who(self, row: Sandbox) -> SafeString:
        nobody = "held by nobody" if row.state in GONE else "held by nobody yet"
        return two(row.agent_did or row.pk, row.environment_id or nobody)

    @display(description="State")
    def status(self, row: Sandbox) -> SafeString:
        alarm = format_html('<b class="lh-alarm">lost {}</b>', ago(row.lost_at)) if is_lost(row) else ""
        return two(badge(row.state), alarm) if alarm else badge(row.state)

    @display(description="For")
    def lasted(self, row: Sandbox) -> SafeString:
        return since(row.state_since)

    @display(description="Pool")
    def place(self, row: Sandbox) -> SafeString:
        return two(row.pool, row.provider)

    @display(description="Last used")
    def used(self, row: Sandbox) -> SafeString:
        return two(ago(row.last_used_at), sleeps(row))

    @display(description="Trouble")
    def trouble(self, row: Sandbox) -> SafeString | str:
        here = unsaved_of(row, getattr(row, "attachment", None))
        if not row.last_error and here is None:
            return "–"
        what = "sleep" if row.state == State.WAITING else "destroy"
        tried = counted(row.tries, f"failed {what}", f"failed {what}s") if row.tries else "Last error"
        if here and not row.tries:
            tried = "Data not stored"
        return format_html(
            '<span class="lh-two lh-trouble"><span>{}</span><span>{}</span></span>',
            tried,
            shortened(row.last_error or (here.last_error if here else "")),
        )

    # --- the page -----------------------------------------------------------------------------------------------------

    def page(self, request: HttpRequest, row: Sandbox) -> dict[str, Any]:
        now, isolation = timezone.now(), "" if row.isolated else ", not isolated"
        ref = format_html('<span class="lh-command">{}</span>', row.ref or "–")
        entries = self.entries(row)
        stored = list(stored_of(row)[: SHOWN + 1])
        here = attached(row)
        unsaved = unsaved_of(row, here)
        ran = list(row.runs.defer("stdout", "stderr")[: SHOWN + 1])
        return {
            "facts": [
                Fact("State", badge(row.state), note=format_html("for {}", since(row.state_since))),
                *([Fact("Lost", ago(row.lost_at), note="its lease ends", alarm=True)] if is_lost(row) else []),
                self.holder(row.holder) if row.holder else Fact("Holder", "nobody"),
                self.agent(row.agent_did),
                Fact("Pool", link("sandboxes_pool", row.pool_id, row.pool), note=row.provider + isolation),
                policy_fact(row.policy),
                Fact("Last used", ago(row.last_used_at), note=sleeps(row)),
                workspace(row),
                *([of_agent(here)] if here else []),
                *([on_wake(row, stored)] if stored or row.state not in GONE else []),
                *([in_background(row)] if row.state in ALIVE else []),
                Fact("Process", ref, note=f"number {row.incarnation}, {came_from(row)}"),
                Fact(
                    "Woken",
                    f"{row.woken_local + row.woken_cloud + row.woken_fresh:,}",
                    note=listed({"local": row.woken_local, "cloud": row.woken_cloud, "fresh": row.woken_fresh}),
                ),
                Fact("Found it alive", counted(row.warm_hits, "run", "runs"), note="that had to wait for nothing"),
                Fact("Seconds alive", f"{seconds_alive(row, now).total_seconds():,.0f}", note="while it had a process"),
                used(row),
                *([destroys(row, now)] if row.deadline_at or row.destroyed_at else []),
            ],
            "sandbox": row,
            "last_error": text(row.last_error.encode()),
            "entries": entries[:SHOWN],
            "more_entries": len(entries) > SHOWN,
            "unsaved": unsaved,
            "unsaved_error": text(unsaved.last_error.encode()) if unsaved else "",
            "snapshots": [self.copy(row, each) for each in stored[:SHOWN]],
            "may_act_on_copies": bool(self.copy_acts) and self.has_act_permission(request),
            "more_snapshots": rows("sandboxes_snapshot", slice="history", holder=row.holder) if len(stored) > SHOWN else "",
            "runs": [(run, command(run.argv), outcome(run), took(run)) for run in ran[:SHOWN]],
            "more_runs": rows("sandboxes_run", slice="all", sandbox=row.pk) if len(ran) > SHOWN else "",
        }

    def entries(self, row: Sandbox) -> list[Done]:
        """What happened to it and what operators did to it, newest first."""
        moved = [
            Done(each.at, badge(each.to), each.reason, each.actor) for each in row.transitions.exclude(AROUND_RUNS)[: SHOWN + 1]
        ]
        return sorted([*moved, *done_to(row, SHOWN)], key=attrgetter("at"), reverse=True)

    def copy(self, row: Sandbox, each: Snapshot) -> dict[str, Any]:
        """A row of the table of snapshots."""
        return {
            "snapshot": each,
            "size": size(each.size_bytes),
            "why": KINDS[SnapshotKind(each.kind)],
            "where": places(each),
            "of_another": each.sandbox_id != row.pk,
            "name": formatting.path(each.name),
            "acts": [
                (title, f"{title} {each.at:%Y-%m-%d %H:%M:%S}", reverse(f"admin:sandboxes_snapshot_{act}", args=[each.pk]))
                for act, title in self.copy_acts.items()
                if each.forgotten_at is None
            ],
        }

    # --- acts ---------------------------------------------------------------------------------------------------------

    def has_act_permission(self, request: HttpRequest, object_id: str | None = None) -> bool:
        return request.user.has_perm("sandboxes.act_on_sandbox")

    @action(description="Retry destroy…", permissions=["act"], icon="replay", dialog=RETRY.dialog)
    def retry_destroy(self, request: HttpRequest, form: Reason, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, RETRY, form)

    @action(description="Retry destroy… (quarantine only)", permissions=["act"])
    def retry_all(self, request: HttpRequest, queryset: QuerySet[Sandbox]) -> HttpResponse | None:
        return self.ask(request, queryset, RETRY)


def is_lost(row: Sandbox) -> bool:
    return row.lost_at is not None and row.state not in GONE


def unsaved_of(row: Sandbox, here: Attachment | None) -> Attachment | None:
    """What it has of its agent's data, if there are changes in it that are stored nowhere else."""
    stale = here is None or here.unsaved_since is None or here.incarnation != row.incarnation
    return None if stale or row.lost_at or row.state in (State.COLD, State.DESTROYED) else here


def in_background(row: Sandbox) -> Fact:
    """What runs in it without keeping it awake."""
    running = row.processes.filter(ended_at__isnull=True).count()
    return Fact(
        "In the background",
        counted(running, "process", "processes"),
        note="they do not keep it awake" if running else "",
        href=rows("sandboxes_process", slice="all", sandbox=row.pk) if running else "",
    )


def sleeps(row: Sandbox) -> str:
    """When it goes to sleep, if nothing uses it before."""
    return until(row.idle_at, "sleeps", "due to sleep") if row.state in ALIVE and not row.lost_at else ""


def workspace(row: Sandbox) -> Fact:
    """How large it was when it was last measured, and how large it may be."""
    if row.workspace_bytes is None:
        return Fact("Workspace", "not measured", note=f"{row.pool.workspace_limit_mib:,} MiB at most")
    most = row.pool.workspace_limit_mib << 20
    over = row.workspace_bytes > most
    return Fact(
        "Workspace",
        f"{size(row.workspace_bytes)} of {size(most)}",
        note=format_html("{}measured {}", "too large to run anything, " if over else "", ago(row.measured_at)),
        alarm=over,
    )


def came_from(row: Sandbox) -> str:
    """Where the state of its present incarnation is from."""
    return f"state from {SOURCES[row.source]}" if row.source in SOURCES else "started fresh" if row.source else "not ready yet"


def on_wake(row: Sandbox, stored: list[Snapshot]) -> Fact:
    """Where its state would come from."""
    newest = next((each for each in stored if each.forgotten_at is None), None)
    if newest is None:
        return Fact("Wakes from", "a fresh start", note="nothing is stored of it")
    again = ", and again when it sleeps" if row.state in (State.RUNNING, State.WAITING) else ""
    note = format_html("stored {}{}", ago(newest.at), again)
    return Fact("Wakes from", SOURCES["local" if newest.local else "cloud"], note=note)


def destroys(row: Sandbox, now: datetime) -> Fact:
    """How its destruction goes, if it has begun."""
    if row.destroyed_at:
        return Fact("Destroyed", ago(row.destroyed_at), note="confirmed by the provider")
    if row.state != State.DESTROYING:
        return Fact("Next step due", stamp(row.deadline_at) if row.deadline_at else "–")
    tries = counted(row.tries, "failed try", "failed tries") if row.tries else "not tried yet"
    if row.quarantined_at:
        return Fact("Destroy", "quarantined", note=f"after {tries}", alarm=True)
    when = (
        f"next try in {span(row.deadline_at - now)}" if row.deadline_at and row.deadline_at > now else "due at the next sweep"
    )
    return Fact("Destroy", tries, note=when, alarm=row.tries > 0)


def took(run: Run) -> str:
    return span(run.duration if run.duration is not None else timezone.now() - run.started_at)


def outcome(run: Run) -> SafeString:
    said = f"exit {run.exit_code}" if run.outcome == Outcome.FAILED and run.exit_code is not None else run.get_outcome_display()
    return badge(run.outcome, said)


@admin.register(Run)
class RunAdmin(Held, Facts):
    list_display = ["line", "result", "kind_and_turn", "duration", "started", "who"]
    list_filter = ["outcome", "kind"]
    list_select_related = ["sandbox"]
    list_defer = ["stdout", "stderr"]
    search_fields = ["agent_did__startswith", "sandbox__environment_id__startswith"]
    search_help_text = "Agent or environment, or a whole id"
    ordering = ["-started_at", "-pk"]
    slices = {
        "all": Slice("All", "Nothing has run yet."),
        "open": Slice("Running", "Nothing runs now.", lambda now: Q(ended_at__isnull=True)),
        "failed": Slice("Not ok", "Every run ended well.", lambda now: ~Q(outcome__in=[Outcome.OK, Outcome.OPEN])),
        "overdue": Slice(
            "Overdue", "No run is past its deadline.", lambda now: Q(ended_at__isnull=True, deadline_at__lt=now - LATE)
        ),
    }
    fieldsets = all_fields(
        "id", "sandbox", "holder", "agent_did", "incarnation", "kind", "turn_number", "cwd", "claimed_by",
        "started_at", "deadline_at", "ended_at", "outcome", "exit_code", "timed_out", "oom", "truncated",
        "stdin_bytes", "stdout_bytes", "stderr_bytes",
    )  # fmt: skip
    change_form_outer_before_template = "admin/sandboxes/run/output.html"

    @display(description="Command")
    def line(self, row: Run) -> SafeString:
        return format_html('<span class="lh-command">{}</span>', shortened(command(row.argv)))

    @display(description="Outcome")
    def result(self, row: Run) -> SafeString:
        return outcome(row)

    @display(description="Kind")
    def kind_and_turn(self, row: Run) -> str:
        return row.kind if row.turn_number is None else f"{row.kind} {row.turn_number}"

    @display(description="Took")
    def duration(self, row: Run) -> str:
        return took(row)

    @display(description="Started")
    def started(self, row: Run) -> SafeString | str:
        return ago(row.started_at)

    @display(description="Agent and environment")
    def who(self, row: Run) -> SafeString:
        return two(row.agent_did, row.sandbox.environment_id)

    def page(self, request: HttpRequest, row: Run) -> dict[str, Any]:
        turn = f"turn {row.turn_number}" if row.turn_number is not None else row.kind
        return {
            "facts": [
                Fact("Outcome", outcome(row), note=row.note),
                Fact("Took" if row.ended_at else "Running for", took(row), note=row.kind if row.kind == turn else turn),
                Fact("Started", ago(row.started_at), note=stamp(row.started_at)),
                Fact("Deadline", stamp(row.deadline_at)),
                place_of(row),
                *([self.holder(row.holder)] if row.holder else []),
                Fact("Directory", row.cwd),
                Fact("Given", f"{row.stdin_bytes:,} bytes on stdin", note=", ".join(row.env_names) or "no variables"),
            ],
            "argv": command(row.argv),
            "streams": [stream(row, "stderr"), stream(row, "stdout")],  # what went wrong first
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


def stream(run: Run, name: str) -> dict[str, Any]:
    """One output of a run: its text, and how much of it there was."""
    kept, received = bytes(getattr(run, name)), getattr(run, f"{name}_bytes")
    size = counted(received, "byte", "bytes")
    return {
        "name": name,
        "text": text(kept),
        "size": f"The first {len(kept):,} of {size}" if received > len(kept) else size,
        "href": reverse(f"admin:sandboxes_run_{name}", args=[run.pk]) if kept else "",
    }


def is_late(sweep: Sweep, now: datetime) -> bool:
    """It has not succeeded for three times as long as it should."""
    return sweep.succeeded_at is None or sweep.succeeded_at < now - 3 * sweep.every


def late(now: datetime) -> Q:
    # A handful of rows, and arithmetic with two columns that the databases do not do alike.
    return Q(pk__in=[sweep.pk for sweep in Sweep.objects.all() if is_late(sweep, now)])


@admin.register(Sweep)
class SweepAdmin(Facts):
    list_display = ["name", "health", "succeeded", "period", "lasted", "did", "error"]
    ordering = ["name"]
    slices = {
        "all": Slice("All", "No sweep has run yet: is the worker running?"),
        "late": Slice("Late", "Every sweep is on time.", late),
    }
    fieldsets = all_fields("name", "every", "started_at", "succeeded_at", "took", "counts")
    change_form_outer_before_template = "admin/sandboxes/sweep/error.html"

    @display(description="Health")
    def health(self, row: Sweep) -> SafeString:
        return health(row, timezone.now())

    @display(description="Last success")
    def succeeded(self, row: Sweep) -> SafeString | str:
        return ago(row.succeeded_at)

    @display(description="Every")
    def period(self, row: Sweep) -> str:
        return span(row.every)

    @display(description="Took")
    def lasted(self, row: Sweep) -> str:
        return span(row.took) if row.took is not None else "–"

    @display(description="Did")
    def did(self, row: Sweep) -> str:
        return ", ".join(f"{times} {what}" for what, times in row.counts.items()) or "nothing to do"

    @display(description="Error")
    def error(self, row: Sweep) -> SafeString | str:
        return format_html('<span class="lh-trouble">{}</span>', shortened(row.last_error)) if row.last_error else "–"

    def page(self, request: HttpRequest, row: Sweep) -> dict[str, Any]:
        return {
            "facts": [
                Fact("Health", self.health(row)),
                Fact("Last success", self.succeeded(row), note=stamp(row.succeeded_at) if row.succeeded_at else ""),
                Fact("Last start", ago(row.started_at)),
                Fact("Every", self.period(row)),
                Fact("Took", self.lasted(row)),
                Fact("Did", self.did(row), note="at its last success"),
            ],
            "last_error": text(row.last_error.encode()),
        }


def health(sweep: Sweep, now: datetime) -> SafeString:
    if is_late(sweep, now):
        return badge("late")
    return badge("failing") if sweep.last_error else badge("ok")

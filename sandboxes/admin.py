"""Operators' pages on what exists and what ran in it. `leases.admin` tells some of them what a holder is."""

from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import Q, QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import URLPattern, path, reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.decorators import action, display

from sandboxes import pool, runs
from sandboxes.cells import ago, badge, command, counted, link, rows, shortened, since, span, stamp, text, two
from sandboxes.models import IN_FLIGHT, Outcome, Pool, Run, Sandbox, State, Sweep
from sandboxes.pages import Act, Fact, Facts, Page, Reason, Slice, all_fields

LATE = timedelta(minutes=2)  # past its deadline by two sweeps: nobody is taking the next step
SHOWN = 25  # newest transitions and runs on a sandbox's page
AROUND_RUNS = Q(to=State.RUNNING) | Q(was=State.RUNNING, to=State.WAITING)  # the run's own line says as much


def stalled(now: datetime) -> Q:
    """In flight, or running something, past its deadline, and no sweep has seen to it."""
    over = now - LATE
    in_flight = Q(state__in=IN_FLIGHT, deadline_at__lt=over, quarantined_at__isnull=True)
    return in_flight | Q(state=State.RUNNING, pk__in=runs.overdue(now=over).order_by().values("sandbox"))


def seconds_alive(sandbox: Sandbox, now: datetime) -> timedelta:
    """How long it had a process, from the start that was asked for to the end that was confirmed."""
    without = ("", State.COLD, State.DESTROYED)
    edges = sandbox.transitions.filter(Q(was__in=without) | Q(to__in=without)).order_by("at", "pk")
    total, began = timedelta(0), None
    for to, at in edges.values_list("to", "at"):
        if to not in without:
            began = at
        elif began:
            total, began = total + (at - began), None
    return total + (now - began) if began else total


RETRY = Act(
    title="Retry destroy",
    warning="The provider is asked again by the next sweep, as often as the first time.",
    done="out of quarantine: the next sweep tries again",
    illegal="not in quarantine",
    legal=lambda sandbox: sandbox.state == State.DESTROYING and sandbox.quarantined_at is not None,
    verb=lambda sandbox, actor, reason, now: pool.retry_destroy(sandbox.pk, now=now),
)


class Held:
    """What pages here say of a holder. `leases.admin` overrides it: for this app a holder is only an id."""

    def holder(self, pk: UUID) -> Fact:
        return Fact("Holder", str(pk))


@admin.register(Pool)
class PoolAdmin(Page):
    list_display = ["name", "filled", "where", "size"]
    search_fields = ["name__startswith"]
    ordering = ["name"]
    fieldsets = [
        (None, {"fields": ["name", "capacity", "provider", "image"]}),
        ("Each new sandbox gets", {"fields": ["memory_mib", "millicpus", "pids"]}),
    ]
    labels = {"memory_mib": "Memory in MiB", "millicpus": "Thousandths of a CPU", "pids": "Processes"}

    def get_readonly_fields(self, request: HttpRequest, obj: Pool | None = None) -> list[str]:
        return ["name"] if obj else []  # environment types, requests and scripts call it by its name

    @display(description="Used")
    def filled(self, row: Pool) -> SafeString:
        return two(
            format_html('<meter class="lh-meter" min="0" max="{}" value="{}"></meter>', row.capacity, row.used),
            f"{row.used:,} of {row.capacity:,}",
        )

    @display(description="Provider and image")
    def where(self, row: Pool) -> SafeString:
        return two(row.provider or "as SANDBOX_PROVIDER says", row.image or "as LEASEHOLD_SANDBOX_IMAGE says")

    @display(description="Each sandbox")
    def size(self, row: Pool) -> SafeString:
        return two(f"{row.memory_mib:,} MiB", f"{row.millicpus / 1000:g} CPU, {row.pids} processes")

    def page(self, request: HttpRequest, row: Pool) -> dict[str, Any]:
        here = {"pool__id__exact": row.pk}
        return {
            "facts": [
                Fact("Used", f"{row.used:,} of {row.capacity:,}", href=rows("sandboxes_sandbox", slice="live", **here)),
                Fact("Running", link_to_rows(row, "running")),
                Fact("Waiting", link_to_rows(row, "waiting")),
                Fact("Quarantine", link_to_rows(row, "quarantine")),
                Fact("Owner label", row.owner, note="by which the provider lists its sandboxes"),
            ]
        }


def link_to_rows(row: Pool, part: str) -> SafeString:
    where = SandboxAdmin.slices[part].where(timezone.now())
    href = rows("sandboxes_sandbox", slice=part, pool__id__exact=row.pk)
    return format_html('<a class="lh-link" href="{}">{}</a>', href, row.sandboxes.filter(where).count())


@admin.register(Sandbox)
class SandboxAdmin(Held, Facts):
    list_display = ["who", "status", "lasted", "place", "used", "trouble"]
    list_filter = ["state", "pool", "provider"]
    list_select_related = ["pool"]
    search_fields = ["agent_did__startswith", "environment_id__startswith"]
    search_help_text = "Agent or environment, or a whole id"
    ordering = ["-created_at", "-pk"]
    slices = {
        "live": Slice("Live", "No sandbox exists now.", lambda now: ~Q(state=State.DESTROYED)),
        "running": Slice("Running", "Nothing runs now.", lambda now: Q(state=State.RUNNING)),
        "waiting": Slice("Waiting", "No sandbox waits for its next run.", lambda now: Q(state=State.WAITING)),
        "quarantine": Slice(
            "Quarantine",
            "Nothing in quarantine: every destroy was confirmed, or is still being tried.",
            lambda now: Q(state=State.DESTROYING, quarantined_at__isnull=False),
        ),
        "stalled": Slice("Stalled", "Nothing is past its deadline.", stalled),
        "history": Slice("History", "There was never a sandbox."),
    }
    fieldsets = all_fields(
        "id", "pool", "agent_did", "environment_id", "holder", "state", "state_since", "incarnation",
        "provider", "isolated", "ref", "image", "memory_mib", "millicpus", "pids", "open_runs", "idle_after",
        "last_used_at", "claimed_by", "deadline_at", "tries", "quarantined_at", "created_at", "destroyed_at",
    )  # fmt: skip
    change_form_outer_before_template = "admin/sandboxes/sandbox/history.html"
    acts = {"retry_destroy": RETRY}
    actions_detail = ["retry_destroy"]
    actions = ["retry_all"]

    # --- the list -----------------------------------------------------------------------------------------------------

    @display(description="Agent and environment")
    def who(self, row: Sandbox) -> SafeString:
        return two(row.agent_did or row.pk, row.environment_id or "held by nobody yet")

    @display(description="State")
    def status(self, row: Sandbox) -> SafeString:
        return badge(row.state)

    @display(description="For")
    def lasted(self, row: Sandbox) -> SafeString:
        return since(row.state_since)

    @display(description="Pool")
    def place(self, row: Sandbox) -> SafeString:
        return two(row.pool, row.provider)

    @display(description="Last used")
    def used(self, row: Sandbox) -> SafeString | str:
        return ago(row.last_used_at)

    @display(description="Trouble")
    def trouble(self, row: Sandbox) -> SafeString | str:
        if not row.last_error:
            return "–"
        tried = f"{counted(row.tries, 'failed destroy', 'failed destroys')}" if row.tries else "Last error"
        return format_html(
            '<span class="lh-two lh-trouble"><span>{}</span><span>{}</span></span>', tried, shortened(row.last_error)
        )

    # --- the page -----------------------------------------------------------------------------------------------------

    def page(self, request: HttpRequest, row: Sandbox) -> dict[str, Any]:
        now, isolation = timezone.now(), "" if row.isolated else ", not isolated"
        transitions = list(row.transitions.exclude(AROUND_RUNS)[: SHOWN + 1])
        ran = list(row.runs.defer("stdout", "stderr")[: SHOWN + 1])
        return {
            "facts": [
                Fact("State", badge(row.state), note=format_html("for {}", since(row.state_since))),
                *([self.holder(row.holder)] if row.holder else [Fact("Holder", "nobody")]),
                Fact("Agent", row.agent_did or "–", note=row.environment_id),
                Fact("Pool", link("sandboxes_pool", row.pool_id, row.pool), note=row.provider + isolation),
                Fact("Provider's name", row.ref or "–"),
                Fact("Last used", ago(row.last_used_at)),
                Fact("Seconds alive", f"{seconds_alive(row, now).total_seconds():,.0f}", note="while it had a process"),
                destroys(row, now),
            ],
            "sandbox": row,
            "last_error": text(row.last_error.encode()),
            "transitions": transitions[:SHOWN],
            "runs": [(run, command(run.argv), outcome(run), took(run)) for run in ran[:SHOWN]],
            "more_runs": rows("sandboxes_run", slice="all", sandbox=row.pk) if len(ran) > SHOWN else "",
            "more_transitions": len(transitions) > SHOWN,
        }  # fmt: skip

    # --- acts ---------------------------------------------------------------------------------------------------------

    def has_act_permission(self, request: HttpRequest, object_id: str | None = None) -> bool:
        return request.user.has_perm("sandboxes.act_on_sandbox")

    @action(description="Retry destroy…", permissions=["act"], icon="replay", dialog=RETRY.dialog)
    def retry_destroy(self, request: HttpRequest, form: Reason, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, RETRY, form)

    @action(description="Retry destroy… (quarantine only)", permissions=["act"])
    def retry_all(self, request: HttpRequest, queryset: QuerySet[Sandbox]) -> HttpResponse | None:
        return self.ask(request, queryset, RETRY)


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
                Fact(
                    "Sandbox",
                    link("sandboxes_sandbox", row.sandbox_id, row.sandbox),
                    note=f"process {row.incarnation} of it",
                ),
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

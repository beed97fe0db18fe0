"""Console pages of runs."""

from typing import Any
from uuid import UUID

from django.contrib import admin, messages
from django.contrib.admin import ChoicesFieldListFilter
from django.core.exceptions import PermissionDenied
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.decorators import display

from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.formatting import (
    SummaryField,
    build_sandbox_field,
    decode_output,
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
from sandboxes.admin.base.registry import build_holder_field
from sandboxes.db import database_time
from sandboxes.failed_by import classify_run
from sandboxes.formatting import pluralize
from sandboxes.models import Run, RunOutcome
from sandboxes.pool_stats import STALLED_AFTER
from sandboxes.state.run_outputs import RunOutput, load_output
from sandboxes.storage.base import StoreError


def format_run_duration(run: Run) -> str:
    """Format the duration of a run, up to now if it is still running."""
    return format_duration(run.duration if run.duration is not None else database_time.now() - run.started_at)


def render_run_outcome(run: Run) -> SafeString:
    text = (
        f"exit {run.exit_code}" if run.outcome == RunOutcome.FAILED and run.exit_code is not None else run.get_outcome_display()
    )
    return render_badge(run.outcome, text)


class OutcomeFilter(ChoicesFieldListFilter):
    """Filter by outcome. The index of open runs is by their missing end, which is equivalent: run_open_iff_not_ended."""

    def queryset(self, request: HttpRequest, queryset: QuerySet[Run]) -> QuerySet[Run] | None:
        is_open = self.lookup_val == [RunOutcome.OPEN]
        return super().queryset(request, queryset.filter(ended_at__isnull=True) if is_open else queryset)


@admin.register(Run)
class RunAdmin(ReadOnlyModelAdmin):
    list_display = ["line", "result", "kind_label", "duration", "started", "agent_label"]
    list_filter = [("outcome", OutcomeFilter), "kind", "stop_reason"]
    list_select_related = ["sandbox"]
    list_defer = ["stdout", "stderr"]
    search_fields = ["sandbox__agent_did__startswith", "sandbox__environment_id__startswith"]
    owner_search = OwnerSearch("sandbox", began="started_at", ended="destroyed_at")
    filter_columns = {"agent_did": "sandbox__agent_did"}
    search_help_text = "Agent or environment (prefix), or a complete id"
    ordering = ["-started_at", "-pk"]
    list_tabs = {
        "all": ListTab("All", "No runs yet. A run is recorded for each command or turn executed in a sandbox."),
        "open": ListTab("Running", "No runs in progress.", lambda now: Q(ended_at__isnull=True)),
        "failed": ListTab(
            "Failed",
            "No failed runs: every run ended with exit code 0.",
            lambda now: ~Q(outcome__in=[RunOutcome.OK, RunOutcome.OPEN]),
        ),
        "overdue": ListTab(
            "Overdue",
            "No overdue runs: none is past its deadline.",
            lambda now: Q(ended_at__isnull=True, deadline_at__lt=now - STALLED_AFTER),
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

    @display(description="Result")
    def result(self, row: Run) -> SafeString:
        return render_run_outcome(row)

    @display(description="Kind")
    def kind_label(self, row: Run) -> str:
        return row.kind if row.turn_number is None else f"{row.kind} {row.turn_number}"

    @display(description="Duration")
    def duration(self, row: Run) -> str:
        return format_run_duration(row)

    @display(description="Started")
    def started(self, row: Run) -> SafeString | str:
        return render_time_ago(row.started_at)

    @display(description="Agent and environment")
    def agent_label(self, row: Run) -> SafeString:
        return render_two_lines(row.agent_did, row.sandbox.environment_id)

    def get_page_context(self, request: HttpRequest, row: Run) -> dict[str, Any]:
        turn = f"turn {row.turn_number}" if row.turn_number is not None else row.kind
        return {
            "facts": [
                SummaryField("Result", render_run_outcome(row), note=row.note),
                SummaryField(
                    "Duration" if row.ended_at else "Running for",
                    format_run_duration(row),
                    note=row.kind if row.kind == turn else turn,
                ),
                SummaryField("Started", render_time_ago(row.started_at), note=render_timestamp(row.started_at)),
                *(
                    [SummaryField("Failed by", origin, note=row.get_stop_reason_display())]
                    if (origin := classify_run(row))
                    else []
                ),
                SummaryField("Deadline", render_timestamp(row.deadline_at)),
                build_sandbox_field(row),
                *([build_holder_field(row.holder)] if row.holder else []),
                SummaryField("Working directory", row.cwd),
                SummaryField(
                    "Input", f"{row.stdin_bytes:,} bytes on stdin", note=", ".join(row.env_names) or "no environment variables"
                ),
            ],
            "argv": format_command(row.argv),
            **build_output_context(row),
            "truncated": row.truncated,
        }

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view(self.download_stream)
        downloads = [
            path("<uuid:pk>/stdout/", view, {"name": "stdout"}, name="sandboxes_run_stdout"),
            path("<uuid:pk>/stderr/", view, {"name": "stderr"}, name="sandboxes_run_stderr"),
        ]
        return [*downloads, *super().get_urls()]

    def download_stream(self, request: HttpRequest, pk: UUID, name: str) -> HttpResponse:
        """Send the stored part of an output stream byte for byte, as an attachment: browsers must not render agent output."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        run = get_object_or_404(Run, pk=pk)
        try:
            output = load_output(run)
        except StoreError as error:
            messages.error(request, f"Download failed: {error}")
            return HttpResponseRedirect(reverse("admin:sandboxes_run_change", args=[run.pk]))
        return HttpResponse(
            getattr(output, name),
            content_type="text/plain; charset=utf-8",
            headers={
                "Content-Disposition": f'attachment; filename="{run.pk}.{name}.txt"',
                "X-Content-Type-Options": "nosniff",
            },
        )


def build_output_context(run: Run) -> dict[str, Any]:
    """Build both output streams, or the error of the object store that has them."""
    try:
        output = load_output(run)
    except StoreError as error:
        return {"streams": [], "output_error": str(error)}
    return {"streams": [build_output_stream(run, name, output) for name in ("stderr", "stdout")]}  # errors first


def build_output_stream(run: Run, name: str, output: RunOutput) -> dict[str, Any]:
    """Build the text, size and download link of one output stream."""
    stored, received = getattr(output, name), getattr(run, f"{name}_bytes")
    size = pluralize(received, "byte", "bytes")
    return {
        "name": name,
        "text": decode_output(stored),
        "size": f"The first {len(stored):,} of {size}" if received > len(stored) else size,
        "href": reverse(f"admin:sandboxes_run_{name}", args=[run.pk]) if stored else "",
    }

"""Console pages of sweeps."""

from datetime import datetime
from typing import Any

from django.contrib import admin
from django.db.models import Q
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.decorators import display

from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.formatting import (
    SummaryField,
    decode_output,
    format_duration,
    render_admin_link,
    render_badge,
    render_time_ago,
    render_timestamp,
    render_two_lines,
    truncate_text,
)
from sandboxes.admin.base.model_admin import ReadOnlyModelAdmin, build_all_fields_fieldset
from sandboxes.db import database_time
from sandboxes.models import Sweep


def is_late(sweep: Sweep, now: datetime) -> bool:
    """Return whether the last success is older than three times the sweep's interval."""
    return sweep.succeeded_at is None or sweep.succeeded_at < now - 3 * sweep.every


def build_late_filter(now: datetime) -> Q:
    # Evaluated in Python: there are few rows, and interval arithmetic differs between databases.
    return Q(pk__in=[sweep.pk for sweep in Sweep.objects.all() if is_late(sweep, now)])


@admin.register(Sweep)
class SweepAdmin(ReadOnlyModelAdmin):
    list_display = ["name", "host_label", "health", "succeeded", "period", "lasted", "result", "error"]
    list_select_related = ["host", "started_by"]
    ordering = ["name", "host"]
    list_tabs = {
        "all": ListTab("All", "No sweeps yet. A sweep appears after its first run: check that the worker is running."),
        "late": ListTab("Late", "No late sweeps: each one succeeded recently.", build_late_filter),
    }
    fieldsets = build_all_fields_fieldset("name", "host", "every", "started_at", "succeeded_at", "took", "counts")
    change_form_outer_before_template = "admin/sandboxes/sweep/error.html"

    @display(description="Host")
    def host_label(self, row: Sweep) -> SafeString:
        """Return the host whose work the sweep does, or the host that last ran a sweep of the installation."""
        if row.host:
            return render_admin_link("sandboxes_host", row.host.pk, row.host)
        return render_two_lines("installation", f"last on {row.started_by}" if row.started_by else "")

    @display(description="Health")
    def health(self, row: Sweep) -> SafeString:
        return render_sweep_health(row, database_time.now())

    @display(description="Last success")
    def succeeded(self, row: Sweep) -> SafeString | str:
        return render_time_ago(row.succeeded_at)

    @display(description="Interval")
    def period(self, row: Sweep) -> str:
        return format_duration(row.every)

    @display(description="Duration")
    def lasted(self, row: Sweep) -> str:
        return format_duration(row.took) if row.took is not None else "–"

    @display(description="Result")
    def result(self, row: Sweep) -> str:
        return ", ".join(f"{number} {label}" for label, number in row.counts.items()) or "nothing to do"

    @display(description="Error")
    def error(self, row: Sweep) -> SafeString | str:
        return format_html('<span class="lh-trouble">{}</span>', truncate_text(row.last_error)) if row.last_error else "–"

    def get_page_context(self, request: HttpRequest, row: Sweep) -> dict[str, Any]:
        return {
            "facts": [
                SummaryField("Health", self.health(row)),
                SummaryField("Host", self.host_label(row)),
                SummaryField(
                    "Last success", self.succeeded(row), note=render_timestamp(row.succeeded_at) if row.succeeded_at else ""
                ),
                SummaryField("Last start", render_time_ago(row.started_at)),
                SummaryField("Interval", self.period(row)),
                SummaryField("Duration", self.lasted(row)),
                SummaryField("Result", self.result(row), note="of the last successful run"),
            ],
            "last_error": decode_output(row.last_error.encode()),
        }


def render_sweep_health(sweep: Sweep, now: datetime) -> SafeString:
    if is_late(sweep, now):
        return render_badge("late")
    return render_badge("failing") if sweep.last_error else render_badge("ok")

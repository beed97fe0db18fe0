"""Console pages of CPU and memory readings."""

from typing import Any

from django.contrib import admin
from django.db.models import Sum, Window
from django.http import HttpRequest
from django.utils.safestring import SafeString
from unfold.decorators import display

from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.formatting import (
    SummaryField,
    build_changelist_url,
    build_sandbox_field,
    format_duration,
    render_time_ago,
    render_timestamp,
    render_two_lines,
)
from sandboxes.admin.base.model_admin import ReadOnlyModelAdmin, build_all_fields_fieldset
from sandboxes.admin.base.owner_search import OwnerSearch
from sandboxes.admin.base.registry import build_agent_field, build_holder_field
from sandboxes.models import Reading, Sandbox


@admin.register(Reading)
class ReadingAdmin(ReadOnlyModelAdmin):
    list_display = ["agent_label", "cpu", "memory", "over", "read_time"]
    list_select_related = ["sandbox"]
    search_fields = ["sandbox__agent_did__startswith", "sandbox__environment_id__startswith"]
    owner_search = OwnerSearch("sandbox", began="at", ended="destroyed_at")
    search_help_text = "Agent or environment (prefix)"
    ordering = ["-at", "-pk"]
    list_tabs = {
        "all": ListTab("All", "No readings yet. Live sandboxes are read every few minutes if their provider measures usage.")
    }
    fieldsets = build_all_fields_fieldset(
        "sandbox", "incarnation", "number", "holder", "since", "at", "counted", "cpu_micros", "memory_mib", "metered"
    )

    @display(description="Agent and environment")
    def agent_label(self, row: Reading) -> SafeString:
        return render_two_lines(row.sandbox.agent_did or str(row.sandbox), row.sandbox.environment_id)

    @display(description="CPU used")
    def cpu(self, row: Reading) -> str:
        return format_cpu_time(row.cpu_micros)

    @display(description="Memory")
    def memory(self, row: Reading) -> str:
        return f"{row.memory_mib:,} MiB"

    @display(description="Period")
    def over(self, row: Reading) -> str:
        return format_duration(row.at - row.since)

    @display(description="Read")
    def read_time(self, row: Reading) -> SafeString | str:
        return render_time_ago(row.at)

    def get_page_context(self, request: HttpRequest, row: Reading) -> dict[str, Any]:
        return {
            "facts": [
                SummaryField(
                    "CPU used",
                    format_cpu_time(row.cpu_micros),
                    note=f"in {format_duration(row.at - row.since)}, since the previous reading",
                ),
                SummaryField("Memory", f"{row.memory_mib:,} MiB", note="at the time of the reading, rounded up"),
                SummaryField("From", render_timestamp(row.since)),
                SummaryField("Until", render_timestamp(row.at)),
                build_sandbox_field(row),
                *([build_holder_field(row.holder)] if row.holder else []),
                build_agent_field(row.sandbox.agent_did if row.holder else ""),
            ]
        }


def format_cpu_time(micros: int) -> str:
    return f"{micros / 10**6:,.2f} s"


def build_cpu_field(row: Sandbox) -> SummaryField:
    """Build the total CPU time and the last measured memory of a sandbox. One query."""
    if not row.measured:
        return SummaryField("CPU used", "not measured", note="not supported by the provider")
    last = row.readings.annotate(total=Window(Sum("cpu_micros"))).order_by("-pk").first()
    if last is None:
        return SummaryField("CPU used", "no reading yet")
    return SummaryField(
        "CPU used",
        format_cpu_time(last.total),
        note=f"memory at the last reading: {last.memory_mib:,} MiB",
        href=build_changelist_url("sandboxes_reading", slice="all", sandbox=row.pk),
    )

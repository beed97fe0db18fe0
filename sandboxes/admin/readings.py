"""Operators' pages on what sandboxes were read to have used."""

from typing import Any

from django.contrib import admin
from django.db.models import Sum, Window
from django.http import HttpRequest
from django.utils.safestring import SafeString
from unfold.decorators import display

from sandboxes.admin.base import (
    HolderDisplayMixin,
    ListTab,
    ReadOnlyModelAdmin,
    SummaryField,
    build_all_fields_fieldset,
    build_sandbox_field,
)
from sandboxes.admin.formatting import (
    build_changelist_url,
    format_duration,
    render_time_ago,
    render_timestamp,
    render_two_lines,
)
from sandboxes.models import Reading, Sandbox


@admin.register(Reading)
class ReadingAdmin(HolderDisplayMixin, ReadOnlyModelAdmin):
    list_display = ["who", "cpu", "memory", "over", "when"]
    list_select_related = ["sandbox"]
    search_fields = ["sandbox__agent_did__startswith", "sandbox__environment_id__startswith"]
    search_help_text = "Agent or environment, or their beginning"
    ordering = ["-at", "-pk"]
    slices = {"all": ListTab("All", "Nothing was read yet: sandboxes whose provider counts are read every few minutes.")}
    fieldsets = build_all_fields_fieldset(
        "sandbox", "incarnation", "number", "holder", "since", "at", "counted", "cpu_micros", "memory_mib", "metered"
    )

    @display(description="Agent and environment")
    def who(self, row: Reading) -> SafeString:
        return render_two_lines(row.sandbox.agent_did or str(row.sandbox), row.sandbox.environment_id)

    @display(description="CPU used")
    def cpu(self, row: Reading) -> str:
        return format_cpu_time(row.cpu_micros)

    @display(description="Memory")
    def memory(self, row: Reading) -> str:
        return f"{row.memory_mib:,} MiB"

    @display(description="In")
    def over(self, row: Reading) -> str:
        return format_duration(row.at - row.since)

    @display(description="Read")
    def when(self, row: Reading) -> SafeString | str:
        return render_time_ago(row.at)

    def page(self, request: HttpRequest, row: Reading) -> dict[str, Any]:
        return {
            "facts": [
                SummaryField(
                    "CPU used",
                    format_cpu_time(row.cpu_micros),
                    note=f"in {format_duration(row.at - row.since)}, since it was read before",
                ),
                SummaryField("Memory", f"{row.memory_mib:,} MiB", note="as found, rounded up"),
                SummaryField("From", render_timestamp(row.since)),
                SummaryField("Until", render_timestamp(row.at)),
                build_sandbox_field(row),
                *([self.holder(row.holder)] if row.holder else []),
                self.agent(row.sandbox.agent_did if row.holder else ""),
            ]
        }


def format_cpu_time(micros: int) -> str:
    return f"{micros / 10**6:,.2f} s"


def build_cpu_field(row: Sandbox) -> SummaryField:
    """CPU and memory of a sandbox, as far as they are known. One query."""
    if not row.measured:
        return SummaryField("CPU used", "not measured", note="its provider does not count")
    last = row.readings.annotate(total=Window(Sum("cpu_micros"))).order_by("-pk").first()
    if last is None:
        return SummaryField("CPU used", "not read yet")
    return SummaryField(
        "CPU used",
        format_cpu_time(last.total),
        note=f"and {last.memory_mib:,} MiB of memory when it was last read",
        href=build_changelist_url("sandboxes_reading", slice="all", sandbox=row.pk),
    )

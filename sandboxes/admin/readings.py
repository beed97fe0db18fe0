"""Operators' pages on what sandboxes were read to have used."""

from typing import Any

from django.contrib import admin
from django.db.models import Sum, Window
from django.http import HttpRequest
from django.utils.safestring import SafeString
from unfold.decorators import display

from sandboxes.admin.base import Fact, Facts, Held, Slice, all_fields, place_of
from sandboxes.admin.formatting import ago, rows, span, stamp, two
from sandboxes.models import Reading, Sandbox


@admin.register(Reading)
class ReadingAdmin(Held, Facts):
    list_display = ["who", "cpu", "memory", "over", "when"]
    list_select_related = ["sandbox"]
    search_fields = ["sandbox__agent_did__startswith", "sandbox__environment_id__startswith"]
    search_help_text = "Agent or environment, or their beginning"
    ordering = ["-at", "-pk"]
    slices = {"all": Slice("All", "Nothing was read yet: sandboxes whose provider counts are read every few minutes.")}
    fieldsets = all_fields(
        "sandbox", "incarnation", "number", "holder", "since", "at", "counted", "cpu_micros", "memory_mib", "metered"
    )

    @display(description="Agent and environment")
    def who(self, row: Reading) -> SafeString:
        return two(row.sandbox.agent_did or str(row.sandbox), row.sandbox.environment_id)

    @display(description="CPU used")
    def cpu(self, row: Reading) -> str:
        return cpu_time(row.cpu_micros)

    @display(description="Memory")
    def memory(self, row: Reading) -> str:
        return f"{row.memory_mib:,} MiB"

    @display(description="In")
    def over(self, row: Reading) -> str:
        return span(row.at - row.since)

    @display(description="Read")
    def when(self, row: Reading) -> SafeString | str:
        return ago(row.at)

    def page(self, request: HttpRequest, row: Reading) -> dict[str, Any]:
        return {
            "facts": [
                Fact("CPU used", cpu_time(row.cpu_micros), note=f"in {span(row.at - row.since)}, since it was read before"),
                Fact("Memory", f"{row.memory_mib:,} MiB", note="as found, rounded up"),
                Fact("From", stamp(row.since)),
                Fact("Until", stamp(row.at)),
                place_of(row),
                *([self.holder(row.holder)] if row.holder else []),
                self.agent(row.sandbox.agent_did if row.holder else ""),
            ]
        }


def cpu_time(micros: int) -> str:
    return f"{micros / 10**6:,.2f} s"


def used(row: Sandbox) -> Fact:
    """CPU and memory of a sandbox, as far as they are known. One query."""
    if not row.measured:
        return Fact("CPU used", "not measured", note="its provider does not count")
    last = row.readings.annotate(total=Window(Sum("cpu_micros"))).order_by("-pk").first()
    if last is None:
        return Fact("CPU used", "not read yet")
    return Fact(
        "CPU used",
        cpu_time(last.total),
        note=f"and {last.memory_mib:,} MiB of memory when it was last read",
        href=rows("sandboxes_reading", slice="all", sandbox=row.pk),
    )

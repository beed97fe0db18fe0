"""Console pages of data events: conflicts, full storage, damaged objects."""

from typing import Any

from django.contrib import admin
from django.db.models import Q
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.decorators import display

from sandboxes import formatting
from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.formatting import SummaryField, render_badge, render_time_ago, render_timestamp, truncate_text
from sandboxes.admin.base.model_admin import ReadOnlyModelAdmin, build_all_fields_fieldset
from sandboxes.admin.base.registry import build_agent_field, build_holder_field, render_holders
from sandboxes.models.state import DataEvent

DATA_EVENT_LABELS = {
    DataEvent.Kind.CONFLICT: "Conflict",
    DataEvent.Kind.LEFT_OUT: "Skipped",
    DataEvent.Kind.FULL: "Full",
    DataEvent.Kind.CORRUPT: "Corrupt",
    DataEvent.Kind.OLDER: "Older copy",
    DataEvent.Kind.FOUND: "Found",
    DataEvent.Kind.DROPPED: "Dropped",
}


@admin.register(DataEvent)
class DataEventAdmin(ReadOnlyModelAdmin):
    list_display = ["event_label", "path_label", "detail_label", "agent_label", "writer", "record_time"]
    list_filter = ["kind"]
    search_fields = ["agent_did__startswith", "path__startswith"]
    search_help_text = "Agent or path (prefix)"
    ordering = ["-pk"]
    list_tabs = {
        "all": ListTab("All", "No data events yet. Conflicts, full storage and damaged objects are recorded here."),
        "conflicts": ListTab(
            "Conflicts",
            "No conflicts: no file was changed by two sandboxes at once.",
            lambda now: Q(kind=DataEvent.Kind.CONFLICT),
        ),
        "lost": ListTab(
            "Corrupt or lost",
            "No corrupt or lost data: every stored object could be read.",
            lambda now: Q(kind__in=[DataEvent.Kind.CORRUPT, DataEvent.Kind.OLDER, DataEvent.Kind.DROPPED]),
        ),
    }
    fieldsets = build_all_fields_fieldset("kind", "agent_did", "holder", "at", "path", "detail")

    def annotate_rows(self, rows: list[DataEvent]) -> None:
        writers = render_holders({row.holder for row in rows if row.holder})
        for row in rows:
            row.writer = writers[row.holder] if row.holder else "–"  # type: ignore[attr-defined]

    @display(description="Event")
    def event_label(self, row: DataEvent) -> SafeString:
        return render_data_event(row)

    @display(description="Path")
    def path_label(self, row: DataEvent) -> SafeString:
        return format_html('<span class="lh-command">{}</span>', truncate_text(formatting.format_path(row.path)) or "–")

    @display(description="Detail")
    def detail_label(self, row: DataEvent) -> str:
        return truncate_text(formatting.format_path(row.detail), 160)

    @display(description="Agent")
    def agent_label(self, row: DataEvent) -> str:
        return row.agent_did

    @display(description="Lease")
    def writer(self, row: DataEvent) -> Any:
        return row.writer  # type: ignore[attr-defined]

    @display(description="Recorded")
    def record_time(self, row: DataEvent) -> SafeString | str:
        return render_time_ago(row.at)

    def get_page_context(self, request: HttpRequest, row: DataEvent) -> dict[str, Any]:
        return {
            "facts": [
                SummaryField("Event", render_data_event(row)),
                SummaryField("Recorded", render_time_ago(row.at), note=render_timestamp(row.at)),
                build_agent_field(row.agent_did),
                *([build_holder_field(row.holder)] if row.holder else []),
                SummaryField("Path", formatting.format_path(row.path) or "–"),
                SummaryField("Detail", formatting.format_path(row.detail) or "–"),
            ]
        }


def render_data_event(row: DataEvent) -> SafeString:
    return render_badge(row.kind, DATA_EVENT_LABELS[DataEvent.Kind(row.kind)])

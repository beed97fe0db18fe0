"""Console pages of image templates. The actions are in leases.admin.template_actions, which queues builds."""

from typing import Any

from django.contrib import admin
from django.db.models import Q
from django.http import HttpRequest
from django.utils.safestring import SafeString
from unfold.decorators import display

from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.formatting import SummaryField, render_badge, render_time_ago, render_two_lines
from sandboxes.admin.base.model_admin import ReadOnlyModelAdmin
from sandboxes.models import ImageTemplate, Pool, TemplateState

BADGES = {TemplateState.BUILDING: "waiting", TemplateState.READY: "ok", TemplateState.FAILED: "failing"}


@admin.register(ImageTemplate)
class ImageTemplateAdmin(ReadOnlyModelAdmin):
    list_display = ["template_label", "status", "image_label", "size", "created"]
    list_select_related = ["host"]
    list_defer = ["log", "dockerfile", "commands"]
    search_fields = ["name__startswith"]
    search_help_text = "Name (prefix)"
    ordering = ["-created_at", "-pk"]
    list_tabs = {
        "all": ListTab("All", "No image templates yet. Build one with manage.py template build or POST /api/v1/templates."),
        "failed": ListTab("Failed", "No failed builds.", lambda now: Q(state=TemplateState.FAILED)),
        "building": ListTab("Building", "No builds in progress.", lambda now: Q(state=TemplateState.BUILDING)),
    }
    fieldsets = [
        (None, {"fields": ["name", "version", "host", "image", "image_id", "requested_by", "created_at", "finished_at"]}),
        ("Specification", {"fields": ["specification"]}),
        ("Build log", {"fields": ["build_output"]}),
    ]

    @display(description="Template")
    def template_label(self, row: ImageTemplate) -> SafeString:
        return render_two_lines(row, f"{row.host.name}, {row.host.provider}")

    @display(description="State")
    def status(self, row: ImageTemplate) -> SafeString:
        label = row.get_failure_display() if row.failure else row.get_state_display().lower()
        return render_badge(BADGES[TemplateState(row.state)], label)

    @display(description="Image")
    def image_label(self, row: ImageTemplate) -> str:
        return row.image or "–"

    @display(description="Size")
    def size(self, row: ImageTemplate) -> str:
        return f"{row.size_bytes / 1e6:,.0f} MB" if row.size_bytes is not None else "–"

    @display(description="Requested")
    def created(self, row: ImageTemplate) -> SafeString | str:
        return render_time_ago(row.created_at)

    @display(description="Specification")
    def specification(self, row: ImageTemplate) -> str:
        return row.dockerfile or "\n".join([f"base: {row.base}", *(f"run: {command}" for command in row.commands)])

    @display(description="Output")
    def build_output(self, row: ImageTemplate) -> str:
        return row.log or "No output yet. The log appears when a worker builds the image."

    def get_page_context(self, request: HttpRequest, row: ImageTemplate) -> dict[str, Any]:
        pools = ", ".join(Pool.objects.filter(image=row.tag).order_by("name").values_list("name", flat=True))
        return {
            "facts": [
                SummaryField("State", self.status(row), note=row.error),
                SummaryField("Size", self.size(row)),
                SummaryField("Attempts", row.attempts),
                SummaryField("Pools", pools or "none"),
            ]
        }

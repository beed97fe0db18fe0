"""Console pages of environment packs. Versions are added and assigned by manage.py pack."""

import json
from typing import Any

from django.contrib import admin
from django.db.models import Q
from django.http import HttpRequest
from django.utils.safestring import SafeString
from unfold.decorators import display

from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.formatting import SummaryField, render_time_ago, render_two_lines
from sandboxes.admin.base.model_admin import ReadOnlyModelAdmin
from sandboxes.models import PackAssignment, PackVersion


@admin.register(PackVersion)
class PackVersionAdmin(ReadOnlyModelAdmin):
    list_display = ["version_label", "used_by", "origin_label", "size", "created"]
    list_defer = ["archive", "schemas"]
    search_fields = ["pack__startswith"]
    search_help_text = "Pack (prefix)"
    ordering = ["-pk"]
    list_tabs = {
        "all": ListTab("All", "No packs yet. manage.py migrate stores the packs of the release, manage.py pack add others."),
        "used": ListTab("In use", "No environment type uses a pack.", lambda now: Q(assignments__isnull=False)),
    }
    fieldsets = [
        (None, {"fields": ["pack", "version", "description", "origin", "digest", "created_at"]}),
        ("Environment type", {"fields": ["default_values"]}),
        ("Skill", {"fields": ["file_names"]}),
        ("Schemas", {"fields": ["schema_text"], "classes": ["collapse"]}),
    ]

    def annotate_rows(self, rows: list[PackVersion]) -> None:
        types: dict[int, list[str]] = {}
        for assignment in PackAssignment.objects.filter(version__in=[row.pk for row in rows]):
            types.setdefault(assignment.version_id, []).append(assignment.environment_type)
        for row in rows:
            row.types = types.get(row.pk, [])  # type: ignore[attr-defined]

    @display(description="Pack")
    def version_label(self, row: PackVersion) -> SafeString:
        return render_two_lines(row, row.description)

    @display(description="Environment types")
    def used_by(self, row: PackVersion) -> str:
        return ", ".join(row.types) or "–"  # type: ignore[attr-defined]

    @display(description="Origin")
    def origin_label(self, row: PackVersion) -> str:
        return "this release" if row.origin == "shipped" else "added"

    @display(description="Files")
    def size(self, row: PackVersion) -> str:
        return str(len(row.files))

    @display(description="Stored")
    def created(self, row: PackVersion) -> SafeString | str:
        return render_time_ago(row.created_at)

    @display(description="Defaults")
    def default_values(self, row: PackVersion) -> str:
        return "\n".join(f"{name}: {json.dumps(value)}" for name, value in row.defaults.items()) or "none"

    @display(description="Files below /data/skills")
    def file_names(self, row: PackVersion) -> str:
        return "\n".join(sorted(row.files))

    @display(description="State and action")
    def schema_text(self, row: PackVersion) -> str:
        return json.dumps(row.schemas, indent=1)

    def get_page_context(self, request: HttpRequest, row: PackVersion) -> dict[str, Any]:
        types = ", ".join(row.assignments.values_list("environment_type", flat=True))
        return {"facts": [SummaryField("Environment types", types or "none"), SummaryField("Files", len(row.files))]}

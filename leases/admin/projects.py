"""Console pages of projects."""

from typing import Any

from django.contrib import admin
from django.db.models import Count
from django.http import HttpRequest
from django.utils.safestring import SafeString
from unfold.decorators import display

from leases.models import Agent, AgentKey, Environment
from leases.projects.models import Project
from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.formatting import SummaryField, build_changelist_url, render_time_ago
from sandboxes.admin.base.model_admin import ConsoleModelAdmin


@admin.register(Project)
class ProjectAdmin(ConsoleModelAdmin):
    list_display = ["name", "agents", "created"]
    search_fields = ["name__startswith"]
    search_help_text = "Name (prefix)"
    ordering = ["name"]
    list_tabs = {"all": ListTab("All", "No projects.")}
    fields = ["name"]

    def has_change_permission(self, request: HttpRequest, obj: Project | None = None) -> bool:
        return False

    def annotate_rows(self, rows: list[Project]) -> None:
        agents = Agent.objects.filter(project__in=[row.pk for row in rows]).order_by()
        counts = dict(agents.values_list("project").annotate(Count("pk")))
        for row in rows:
            row.agent_count = counts.get(row.pk, 0)  # type: ignore[attr-defined]

    @display(description="Agents")
    def agents(self, row: Project) -> str:
        return f"{row.agent_count:,}"  # type: ignore[attr-defined]

    @display(description="Created")
    def created(self, row: Project) -> SafeString | str:
        return render_time_ago(row.created_at)

    def get_page_context(self, request: HttpRequest, row: Project) -> dict[str, Any]:
        environments = Environment.objects.filter(project=row, ended_at__isnull=True).count()
        keys = AgentKey.objects.filter(project=row, operator=False, revoked_at__isnull=True).count()
        return {
            "facts": [
                SummaryField(
                    "Agents", Agent.objects.filter(project=row).count(),
                    href=build_changelist_url("leases_agent", slice="all", project__id__exact=str(row.pk)),
                    note="moved by manage.py project move",
                ),
                SummaryField("API keys", keys, note="of agents, not revoked"),
                SummaryField(
                    "Open environments", environments,
                    href=build_changelist_url("leases_environment", slice="open", project__id__exact=str(row.pk)),
                ),
                SummaryField("Created", render_time_ago(row.created_at)),
            ]
        }  # fmt: skip

"""Console pages of the agent catalog."""

from typing import Any

from django.contrib import admin
from django.db.models import Q
from django.http import HttpRequest
from django.utils.safestring import SafeString
from unfold.decorators import display

from leases.catalog.models import CatalogAgent
from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.formatting import SummaryField, render_admin_link, render_badge, render_two_lines
from sandboxes.admin.base.model_admin import ConsoleModelAdmin


@admin.register(CatalogAgent)
class CatalogAgentAdmin(ConsoleModelAdmin):
    list_display = ["agent_label", "catalog_id_label", "harness", "environment", "state"]
    list_select_related = ["environment_type"]
    search_fields = ["name__startswith", "title__startswith"]
    search_help_text = "Name or title (prefix)"
    ordering = ["name"]
    list_tabs = {
        "all": ListTab("All", "No agents in the catalog yet. Add one to let clients run it by POST /agent-catalog/{id}/runs."),
        "enabled": ListTab("Enabled", "No agent of the catalog is enabled.", lambda now: Q(enabled=True)),
    }
    fieldsets = [
        (None, {"fields": ["name", "title", "description", "environment_type", "enabled"]}),
        ("Harness", {"fields": ["cli", "argv", "model", "permission_mode", "system_prompt"]}),
        (
            "Limits of a run",
            {
                "fields": ["allowed_tools", "denied_commands", "max_turns", "max_cost"],
                "description": "Apply besides those of the environment type's policy; the stricter limit counts.",
            },
        ),
    ]
    labels = {"argv": "Command", "max_turns": "Turns", "max_cost": "Cost (USD)"}

    def get_readonly_fields(self, request: HttpRequest, obj: CatalogAgent | None = None) -> list[str]:
        return ["name"] if obj else []  # clients run the agent by its name

    @display(description="Agent")
    def agent_label(self, row: CatalogAgent) -> SafeString:
        return render_two_lines(row.title, row.description)

    @display(description="Id")
    def catalog_id_label(self, row: CatalogAgent) -> str:
        return row.catalog_id

    @display(description="Agent CLI and model")
    def harness(self, row: CatalogAgent) -> SafeString:
        return render_two_lines(row.cli, row.model or "default model")

    @display(description="Environment type")
    def environment(self, row: CatalogAgent) -> str:
        return row.environment_type.name

    @display(description="State")
    def state(self, row: CatalogAgent) -> SafeString:
        return render_badge("ok", "enabled") if row.enabled else render_badge("off", "disabled")

    def get_page_context(self, request: HttpRequest, row: CatalogAgent) -> dict[str, Any]:
        link = render_admin_link("leases_environmenttype", row.environment_type.pk, row.environment_type.name)
        return {"facts": [SummaryField("Id", row.catalog_id), SummaryField("Environment type", link)]}

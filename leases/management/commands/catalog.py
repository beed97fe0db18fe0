"""manage.py catalog: list, show, add and change the agents of the catalog."""

from collections.abc import Sequence

from leases.catalog.models import CatalogAgent
from sandboxes.management.named_rows import NamedRowCommand


class Command(NamedRowCommand):
    help = "List, show, add and change the agents of the catalog, which clients run by their id, `sandbox:<name>`."
    model = CatalogAgent
    columns = (
        "title", "description", "environment_type", "enabled", "cli", "argv", "model", "permission_mode", "system_prompt",
        "allowed_tools", "denied_commands", "max_turns", "max_cost",
    )  # fmt: skip

    def find_rows(self) -> Sequence[CatalogAgent]:
        return [*CatalogAgent.objects.select_related("environment_type").order_by("name")]

    def format_line(self, row: CatalogAgent) -> str:
        state = "" if row.enabled else " disabled"
        return f"{row.catalog_id} {row.cli} {row.model or 'default model'} in {row.environment_type}{state}: {row.title}"

from typing import Any

from django.apps import AppConfig
from django.db.models.signals import post_migrate

from sandboxes.agent import companions
from sandboxes.db import database_time


class LeasesConfig(AppConfig):
    """Leases: the right of an agent to a sandbox, its end, and the HTTP API."""

    name = "leases"

    def ready(self) -> None:
        companions.register("leases.stream_server.server.listening")
        post_migrate.connect(_install_shipped_packs, sender=self)


def _install_shipped_packs(using: str, **options: Any) -> None:
    """Store the packs of this release, unless this was a migration to an earlier state, whose tables have other columns."""
    from django.db import connections
    from django.db.migrations.executor import MigrationExecutor

    from leases.packs import installation

    executor = MigrationExecutor(connections[using])
    if not executor.migration_plan(executor.loader.graph.leaf_nodes()):
        installation.install_shipped_packs(now=database_time.now())

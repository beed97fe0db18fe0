"""Check for migrations of this code that the database lacks."""

from django.db import connection
from django.db.migrations.executor import MigrationExecutor

MIGRATIONS_MISSING = "Migrations are not applied: run manage.py migrate."

_migrations_applied: list[bool] = []


def find_unapplied_migrations() -> list[str]:
    """Return the names of unapplied migrations. Once all are applied, this process does not query again."""
    if not _migrations_applied:
        executor = MigrationExecutor(connection)
        plan = executor.migration_plan(executor.loader.graph.leaf_nodes())
        if plan:
            return [str(migration) for migration, _ in plan]
        _migrations_applied.append(True)
    return []

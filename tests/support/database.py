"""Test database: a migrated SQLite template, and the migrated rows after tests with real transactions.

The first run of a set of migrations creates the template, later runs copy it."""

import hashlib
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import django
from django.apps import apps
from django.conf import settings
from django.db import connection, transaction
from django.db.backends.utils import CursorWrapper

CACHE = Path(os.environ.get("LEASEHOLD_CACHE") or Path.home() / ".cache" / "leasehold")
# Of an app. Migrations import from the models, and the packs of the release are stored after them.
SCHEMA_SOURCES = ("migrations/*.py", "models.py", "models/**/*.py", "packs/shipped/**/*.*")
COPY_PREFIX = "migrated_"  # of tables with copies of the rows that migrations insert


def template_path() -> Path | None:
    """Return the template for the schema of all installed apps, or None on another database or under pytest-xdist."""
    default = settings.DATABASES["default"]
    if "sqlite3" not in default["ENGINE"] or os.environ.get("PYTEST_XDIST_WORKER"):
        return None
    digest = hashlib.sha256(django.__version__.encode())
    for config in sorted(apps.get_app_configs(), key=lambda config: config.label):
        root = Path(config.path)
        for path in sorted(path for pattern in SCHEMA_SOURCES for path in root.glob(pattern)):
            digest.update(f"{config.label}/{path.relative_to(root)}\0".encode() + path.read_bytes())
    return CACHE / f"test-{digest.hexdigest()[:16]}.sqlite3"


def restore_template() -> bool:
    """Copy the template to the path of the test database. Return whether there was one."""
    template = template_path()
    if template is None or not template.exists():
        return False
    shutil.copyfile(template, settings.DATABASES["default"]["TEST"]["NAME"])
    return True


def save_template() -> None:
    """Store the migrated test database as the template. Concurrent runs store the same content."""
    template = template_path()
    if template is None or template.exists():
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    partial = template.with_suffix(f".{os.getpid()}")
    # The backup API, not a file copy: in WAL mode most of the database is in another file.
    with (
        closing(sqlite3.connect(settings.DATABASES["default"]["TEST"]["NAME"])) as source,
        closing(sqlite3.connect(partial)) as copy,
    ):
        source.backup(copy)
    partial.rename(template)


class MigratedRows:
    """Rows inserted by migrations, copied into tables named COPY_PREFIX + table."""

    def __init__(self) -> None:
        self.tables = connection.introspection.django_table_names(only_existing=True)
        self.columns: dict[str, str] = {}  # of each copied table
        with transaction.atomic(), connection.cursor() as cursor:
            for table in self._find_filled(cursor):
                cursor.execute(f"DROP TABLE IF EXISTS {COPY_PREFIX}{table}")
                cursor.execute(f"CREATE TABLE {COPY_PREFIX}{table} AS SELECT * FROM {table}")
                cursor.execute(f"SELECT * FROM {table} LIMIT 0")
                self.columns[table] = ", ".join(connection.ops.quote_name(column[0]) for column in cursor.description)

    def restore(self) -> None:
        """Reset all tables to their migrated rows.

        Few tables have rows after a test. Django's flush truncates all tables and saves the migrated rows one by one."""
        with transaction.atomic(), connection.cursor() as cursor:  # foreign keys are checked at the end
            for table in self._find_filled(cursor):
                cursor.execute(f"DELETE FROM {table}")
            for table, columns in self.columns.items():
                cursor.execute(f"INSERT INTO {table} ({columns}) SELECT {columns} FROM {COPY_PREFIX}{table}")

    def _find_filled(self, cursor: CursorWrapper) -> list[str]:
        """Return the tables that have rows, by one query."""
        cursor.execute(" UNION ALL ".join(f"SELECT '{table}' WHERE EXISTS (SELECT 1 FROM {table})" for table in self.tables))
        return [table for (table,) in cursor.fetchall()]

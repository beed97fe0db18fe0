"""Test databases: migrated templates, and the migrated rows after tests with real transactions.

Migrations take longer than most tests. The first process of a set of migrations creates the template, the others copy it."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import django
import psycopg
from django.apps import apps
from django.conf import settings
from django.db import connection, transaction
from django.db.backends.utils import CursorWrapper

CACHE = Path(os.environ.get("LEASEHOLD_CACHE") or Path.home() / ".cache" / "leasehold")
# Of an app. Migrations import from the models, and the packs of the release are stored after them.
SCHEMA_SOURCES = ("migrations/*.py", "models.py", "models/**/*.py", "packs/shipped/**/*.*")
COPY_PREFIX = "migrated_"  # of tables with copies of the rows that migrations insert
MANAGE = Path(__file__).resolve().parents[2] / "manage.py"


def restore_template() -> bool:
    """Create the test database as a copy of the template. Return False under pytest-xdist, whose workers rename it later."""
    if os.environ.get("PYTEST_XDIST_WORKER"):
        return False
    if settings.ON_POSTGRES:
        copy_postgres_template(connection.creation._get_test_db_name())
    else:
        shutil.copyfile(get_sqlite_template(), settings.DATABASES["default"]["TEST"]["NAME"])
    return True


@cache
def get_sqlite_template() -> Path:
    """Return the path of a migrated SQLite database, which later runs use too."""
    template = CACHE / f"test-{compute_schema_digest()}.sqlite3"
    with lock(template.name):
        if not template.exists():
            partial = template.with_suffix(".partial")
            partial.unlink(missing_ok=True)
            migrate(f"sqlite:///{partial}")
            partial.rename(template)
    return template


@cache
def get_postgres_template() -> str:
    """Return the name of a migrated database on the server of DATABASE_URL."""
    template = f"migrated_{compute_schema_digest()}"
    partial = f"{template}_partial"
    with lock(template), connect_to_server() as server:
        if not server.execute("SELECT 1 FROM pg_database WHERE datname = %s", [template]).fetchone():
            server.execute(f"DROP DATABASE IF EXISTS {partial} WITH (FORCE)")  # of a process that was killed
            server.execute(f"CREATE DATABASE {partial}")
            migrate(build_database_url(partial))
            server.execute(f"ALTER DATABASE {partial} RENAME TO {template}")
    return template


def copy_postgres_template(name: str) -> None:
    """Create a migrated database on the server of DATABASE_URL, in place of one of that name."""
    template = get_postgres_template()
    with connect_to_server() as server:
        server.execute(f"DROP DATABASE IF EXISTS {name}")
        server.execute(f"CREATE DATABASE {name} TEMPLATE {template}")


def build_database_url(name: str) -> str:
    """URL of another database on the server of DATABASE_URL."""
    return f"{os.environ['DATABASE_URL'].rpartition('/')[0]}/{name}"


def connect_to_server() -> "psycopg.Connection[tuple[object, ...]]":
    return psycopg.connect(os.environ["DATABASE_URL"], autocommit=True)


def migrate(url: str) -> None:
    """Apply all migrations in another process, which leaves no connection to the database."""
    environment = os.environ | {"DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "tests.settings"}
    subprocess.run([sys.executable, str(MANAGE), "migrate", "--verbosity", "0"], env=environment, check=True)


def compute_schema_digest() -> str:
    """Digest of the sources from which migrations of the installed apps build a database."""
    digest = hashlib.sha256(django.__version__.encode())
    for config in sorted(apps.get_app_configs(), key=lambda config: config.label):
        root = Path(config.path)
        for path in sorted(path for pattern in SCHEMA_SOURCES for path in root.glob(pattern)):
            if path.suffix == ".pyc":  # has the time of a checkout
                continue
            digest.update(f"{config.label}/{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def lock(name: str) -> Iterator[None]:
    """Hold a lock of this machine, so that one process creates a template and the others wait."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


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

"""manage.py migrate beside processes that use the tables: locks, lost connections, repetitions, and another migrate."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from io import StringIO
from typing import Any

import psycopg
import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import ProgrammingError, connection
from django.utils import timezone

from controlplane.management.commands import migrate
from sandboxes.db import migrations
from sandboxes.db.postgresql import schema
from sandboxes.models import Host
from tests.conftest import SimulatedCrash

APP = "probe_app"
COLOR = (APP, "0002_color")
on_postgres = pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite has neither lock modes nor backends")
pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def probe_app(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """App whose table exists and whose second migration is not applied."""
    settings.INSTALLED_APPS = ["tests.support.probe_app"]  # Django builds the state of all migrations of all apps
    migrations.load_known.cache_clear()
    monkeypatch.setattr(migrate, "RETRY_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(schema, "LOCK_TIMEOUT_MS", 50)
    call_command("migrate", APP, "0001", verbosity=0)
    yield
    execute("DROP TABLE IF EXISTS probe_app_box")
    execute("DELETE FROM django_migrations WHERE app = 'probe_app'")
    migrations.load_known.cache_clear()


def execute(statement: str) -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchall() if cursor.description else []


def run_migrate(*arguments: str, before: Callable[[str], None] = lambda action: None) -> str:
    """Migrate with a hook that is called before each step. Return what is written to stderr."""

    class Hooked(migrate.Command):
        def migration_progress_callback(self, action: str, migration: Any = None, fake: bool = False) -> None:
            super().migration_progress_callback(action, migration, fake)
            before(action)

    call_command(Hooked(), *arguments, stdout=StringIO(), stderr=(errors := StringIO()))
    return errors.getvalue()


def is_migrated() -> bool:
    with connection.cursor() as cursor:
        columns = [column.name for column in connection.introspection.get_table_description(cursor, "probe_app_box")]
    return "color" in columns and f"{APP}.0002_color" not in migrations.read_status().unapplied


@contextmanager
def other_connection() -> "Iterator[psycopg.Connection[Any]]":
    parameters = connection.get_connection_params()
    names = {name: parameters[name] for name in ("dbname", "user", "host", "port", "password") if name in parameters}
    with psycopg.connect(**names) as other:
        yield other


@on_postgres
def test_a_lock_of_another_transaction_is_waited_for() -> None:
    with other_connection() as other:
        other.execute("SELECT * FROM probe_app_box")  # holds ACCESS SHARE until its end
        attempts: list[str] = []

        def end_at_second_attempt(action: str) -> None:
            attempts.extend([action] * (action == "apply_start"))
            if len(attempts) == 2:
                other.rollback()

        assert (
            run_migrate(before=end_at_second_attempt).count("probe_app.0002_color waits for a lock of another transaction.")
            == 1
        )
    assert is_migrated()


@on_postgres
def test_after_the_wait_one_line_says_that_a_repetition_continues() -> None:
    with other_connection() as other:
        other.execute("SELECT * FROM probe_app_box")
        with pytest.raises(
            CommandError, match=r"^probe_app\.0002_color: another transaction holds a lock .*nothing is lost\.$"
        ):
            run_migrate("--wait", "1s")
        other.rollback()
    assert not is_migrated()
    run_migrate()
    assert is_migrated()


@on_postgres
def test_a_lost_connection_is_one_line_and_a_repetition_continues() -> None:
    def terminate(action: str) -> None:
        if action == "apply_start":
            [[backend]] = execute("SELECT pg_backend_pid()")
            with other_connection() as other:
                other.execute("SELECT pg_terminate_backend(%s, 5000)", [backend])

    with pytest.raises(
        CommandError, match=r"^probe_app\.0002_color: the connection to the database was lost: .*nothing is lost\.$"
    ):
        run_migrate(before=terminate)
    connection.close()
    run_migrate()
    assert is_migrated()


def test_after_a_crash_a_repetition_continues() -> None:
    def crash(action: str) -> None:
        if action == "apply_success":
            raise SimulatedCrash

    with pytest.raises(SimulatedCrash):
        run_migrate(before=crash)
    run_migrate()
    assert is_migrated()


def apply_elsewhere(action: str) -> None:
    """Apply the migration as another `manage.py migrate` does between the plan of this one and its first statement."""
    if action == "apply_start" and not is_migrated():
        execute("ALTER TABLE probe_app_box ADD COLUMN color text NULL")
        execute("INSERT INTO django_migrations (app, name, applied) VALUES ('probe_app', '0002_color', CURRENT_TIMESTAMP)")


def test_a_migration_that_another_migrate_has_applied_meanwhile_is_left_alone() -> None:
    errors = run_migrate(before=apply_elsewhere)
    assert "probe_app.0002_color was applied by another manage.py migrate." in errors
    assert is_migrated()
    assert execute("SELECT COUNT(*) FROM django_migrations WHERE app = 'probe_app'") == [(2,)]


@on_postgres
def test_a_fault_of_a_migration_is_raised_with_its_name() -> None:
    execute("ALTER TABLE probe_app_box ADD COLUMN color text NULL")
    with pytest.raises(ProgrammingError, match="already exists"):
        run_migrate()


def test_hosts_that_serve_the_database_are_named_with_their_versions() -> None:
    now = timezone.now()
    for name, age in (("a", 0), ("b", 3600)):
        Host.objects.create(
            id=f"00000000-0000-0000-0000-00000000000{name}", provider="memory", engine_id=name, name=name, version="0.1.0",
            created_at=now, heartbeat_at=now - timedelta(seconds=age),
        )  # fmt: skip
    assert "Processes serve this database: a (version 0.1.0)." in run_migrate()
    assert run_migrate() == ""  # nothing to apply

"""Commands on a database of a later version, and on one whose migrations are not those of this version: one line each."""

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from django.core.management.base import CommandError
from django.db import IntegrityError, connection

from leases.management.base import report_errors
from sandboxes.db import migrations
from sandboxes.db.migrations import KnownMigrations, read_status
from tests.commands.manage import run_manage
from tests.commands.test_unmigrated_database import run_commands
from tests.support.database import get_sqlite_template

NEWER = "The database is newer than this version, which does not know the migration leases.9999_later."
OTHER = "The migrations of this database are not those of this version or of one before: "
ADD = "INSERT INTO django_migrations (app, name, applied) VALUES ('leases', '{}', '2026-01-01')"
REMOVE_FIRST = "DELETE FROM django_migrations WHERE app = 'sandboxes' AND name = '0001_initial'"


@pytest.fixture
def build(tmp_path: Path) -> Callable[[str], Path]:
    """Function that copies the migrated database to the home of an installation, and executes a statement there."""

    def copy(statement: str) -> Path:
        shutil.copyfile(get_sqlite_template(), tmp_path / "leasehold.sqlite3")
        with sqlite3.connect(tmp_path / "leasehold.sqlite3") as database:
            database.execute(statement)
        return tmp_path

    return copy


def test_a_newer_database_serves_and_is_not_migrated(build: Callable[[str], Path]) -> None:
    results = run_commands(build(ADD.format("9999_later")), {"migrate": [], "check": [], "lease": ["list"], "quickstart": []})
    status, output = results["migrate"]
    assert (status, output.count("\n")) == (1, 1) and NEWER in output
    status, output = results["check"]
    assert status == 0 and output.splitlines()[0].startswith(NEWER)
    assert (results["lease"][0], results["quickstart"][0]) == (0, 0)


@pytest.mark.parametrize(
    ("statement", "cause"),
    [
        (ADD.format("0002_other"), "leases.0002_other is not known"),
        (REMOVE_FIRST, "was applied before sandboxes.0001_initial"),
    ],
)
def test_a_database_of_another_history_is_refused_in_one_line(build: Callable[[str], Path], statement: str, cause: str) -> None:
    home = build(statement)
    results = run_commands(home, {"migrate": [], "check": [], "quickstart": [], "qcluster": [], "egress": ["--proxy", "none"]})
    up = run_manage(home, "up")
    results["up"] = [up.returncode, up.stdout + up.stderr]
    for name, (status, output) in results.items():
        assert (status, OTHER in output and cause in output) == (1, True), (name, output)
        assert output.count("\n") == (2 if name == "check" else 1), (name, output)


@pytest.mark.django_db
def test_a_command_that_fails_on_a_newer_database_says_so_and_logs_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    with connection.cursor() as cursor:
        cursor.execute(ADD.format("9999_later"))
    with pytest.raises(CommandError) as caught, report_errors(verbosity=1):
        raise IntegrityError('null value in column "color"')
    line = f'The database reports an error: IntegrityError: null value in column "color". {NEWER} '
    assert str(caught.value).startswith(line)


@pytest.mark.django_db
def test_a_history_that_was_replaced_is_another_one_although_its_numbers_are_higher(monkeypatch: pytest.MonkeyPatch) -> None:
    with connection.cursor() as cursor:
        cursor.execute(ADD.format("9999_replaced"))
    assert read_status().explain_newer()
    monkeypatch.setattr(migrations, "RETIRED", frozenset({("leases", "9999_replaced")}))
    assert "leases.9999_replaced is not known" in read_status().explain_error()


@pytest.mark.django_db
def test_migrations_that_one_migration_replaces_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with connection.cursor() as cursor:
        cursor.execute(ADD.format("0001_a"))
        cursor.execute(ADD.format("0002_b"))
    squashed = ("leases", "0001_squashed_0002")
    known = migrations.load_known()
    replaced = frozenset({("leases", "0001_a"), ("leases", "0002_b")})
    extended = KnownMigrations(known.parents | {squashed: frozenset()}, known.replaces | {squashed: replaced})
    monkeypatch.setattr(migrations, "load_known", lambda: extended)
    assert read_status() == migrations.SchemaStatus()

"""Operations of migrations on a table of their own: columns and tables dropped in two versions, checks in two steps."""

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import IntegrityError, connection, migrations, models
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState
from django.db.models import Q

from sandboxes.db.migration_operations import AddCheckNotValid, DropColumn, DropTable, ValidateCheck

pytestmark = [pytest.mark.django_db(transaction=True)]
CHECK = models.CheckConstraint(condition=Q(size__gt=0), name="probe_size")
CREATE = migrations.CreateModel("probe", [
    ("id", models.AutoField(primary_key=True)), ("size", models.IntegerField()), ("color", models.TextField(db_default="red")),
    ("note", models.CharField(max_length=9, null=True, db_index=True)),
])  # fmt: skip


def without_database(*operations: Operation) -> migrations.SeparateDatabaseAndState:
    return migrations.SeparateDatabaseAndState(state_operations=operations)


def apply(state: ProjectState, *operations: Operation) -> ProjectState:
    """Apply a migration. Return the state after it."""
    migration = type("Migration", (migrations.Migration,), {"operations": list(operations)})("0001", "app")
    with connection.schema_editor(atomic=migration.atomic) as editor:
        return migration.apply(state, editor)


@pytest.fixture
def state() -> Iterator[ProjectState]:
    """State with the table app_probe, which has one row."""
    yield apply(ProjectState(), CREATE)
    execute("DROP TABLE IF EXISTS app_probe")


def execute(statement: str) -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchall() if cursor.description else []


def list_columns() -> list[str]:
    with connection.cursor() as cursor:
        return [column.name for column in connection.introspection.get_table_description(cursor, "app_probe")]


def test_a_column_goes_in_two_versions_and_both_insert_meanwhile(state: ProjectState) -> None:
    removals = [migrations.RemoveField("probe", "color"), migrations.RemoveField("probe", "note")]
    state = apply(state, without_database(*removals))
    execute("INSERT INTO app_probe (size) VALUES (1)")  # the new version
    execute("INSERT INTO app_probe (size, color, note) VALUES (2, 'blue', 'old')")  # the version before
    state = apply(state, DropColumn("probe", "color"), DropColumn("probe", "note"))
    assert list_columns() == ["id", "size"]
    assert execute("SELECT size FROM app_probe ORDER BY id") == [(1,), (2,)]
    apply(state, DropColumn("probe", "color"))  # a repetition does nothing
    assert list_columns() == ["id", "size"]


def test_a_table_goes_in_two_versions(state: ProjectState) -> None:
    state = apply(state, without_database(migrations.DeleteModel("probe")))
    assert "app_probe" in connection.introspection.table_names()
    apply(state, DropTable("app_probe"), DropTable("app_probe"))
    assert "app_probe" not in connection.introspection.table_names()


def test_a_check_holds_for_new_rows_at_once_and_is_validated_later(state: ProjectState) -> None:
    execute("INSERT INTO app_probe (size) VALUES (1)")
    state = apply(state, AddCheckNotValid("probe", CHECK))
    with pytest.raises(IntegrityError):
        execute("INSERT INTO app_probe (size) VALUES (0)")
    apply(state, ValidateCheck("probe", "probe_size"))
    if connection.vendor == "postgresql":
        assert execute("SELECT convalidated FROM pg_constraint WHERE conname = 'probe_size'") == [(True,)]


@pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite copies the table, and checks its rows")
def test_rows_that_violate_a_check_stop_its_validation_only(state: ProjectState) -> None:
    execute("INSERT INTO app_probe (size) VALUES (0)")
    state = apply(state, AddCheckNotValid("probe", CHECK))
    with pytest.raises(IntegrityError):
        apply(state, ValidateCheck("probe", "probe_size"))

"""Operations of migrations on a table of their own: columns and tables dropped in two versions, checks in two steps."""

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import IntegrityError, NotSupportedError, connection, migrations, models
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState
from django.db.models import F, Q

from sandboxes.db.migration_operations import (
    BATCH_SIZE,
    AddCheckNotValid,
    ChangeRowsInBatches,
    DropColumn,
    DropTable,
    ValidateCheck,
)

pytestmark = [pytest.mark.django_db(transaction=True)]
CHECK = models.CheckConstraint(condition=Q(size__gt=0), name="probe_size")
CREATE = migrations.CreateModel("probe", [
    ("id", models.AutoField(primary_key=True)), ("size", models.IntegerField()), ("color", models.TextField(db_default="red")),
    ("note", models.CharField(max_length=9, null=True, db_index=True)),
])  # fmt: skip


def without_database(*operations: Operation) -> migrations.SeparateDatabaseAndState:
    return migrations.SeparateDatabaseAndState(state_operations=operations)


def apply(state: ProjectState, *operations: Operation, atomic: bool = True) -> ProjectState:
    """Apply a migration. Return the state after it."""
    migration = type("Migration", (migrations.Migration,), {"operations": list(operations), "atomic": atomic})("0001", "app")
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


def insert_rows(*sizes: int) -> None:
    execute(f"INSERT INTO app_probe (size) VALUES {', '.join(f'({size})' for size in sizes)}")


@pytest.mark.parametrize("further", [0, 1])
def test_rows_are_changed_in_batches_and_a_crash_keeps_those_that_ended(state: ProjectState, further: int) -> None:
    insert_rows(*[0] * (2 * BATCH_SIZE + further), 7)
    batches: list[int] = []

    def change(rows: Any) -> None:
        batches.append(rows.update(size=F("size") + 1))
        if len(batches) == 2:
            raise ConnectionError("crash")

    with pytest.raises(ConnectionError):
        apply(state, ChangeRowsInBatches("probe", change, Q(size=0)), atomic=False)
    counts = "SELECT size, COUNT(*) FROM app_probe GROUP BY size ORDER BY size"
    assert execute(counts) == [(0, BATCH_SIZE + further), (1, BATCH_SIZE), (7, 1)]
    apply(state, ChangeRowsInBatches("probe", change, Q(size=0)), atomic=False)  # a repetition
    assert batches == [BATCH_SIZE] * 3 + [further] * bool(further)
    assert execute(counts) == [(1, 2 * BATCH_SIZE + further), (7, 1)]
    apply(state, ChangeRowsInBatches("probe", lambda rows: rows.delete(), Q(size=1)), atomic=False)
    assert execute(counts) == [(7, 1)]


def test_rows_whose_condition_stays_true_are_changed_once(state: ProjectState) -> None:
    insert_rows(*[0] * (BATCH_SIZE + 1))
    apply(state, ChangeRowsInBatches("probe", lambda rows: rows.update(size=F("size") + 1), Q(size__gte=0)), atomic=False)
    assert execute("SELECT DISTINCT size FROM app_probe") == [(1,)]


def test_batches_in_one_transaction_are_refused(state: ProjectState) -> None:
    insert_rows(0)
    with pytest.raises(NotSupportedError, match="needs atomic = False"):
        apply(state, ChangeRowsInBatches("probe", lambda rows: rows.update(size=1), Q(size=0)))
    assert execute("SELECT size FROM app_probe") == [(0,)]

"""Migration operations with which the version before keeps working: removals and checks in two steps, rows in batches.

A version is compared with the one before, whose processes still serve while `manage.py migrate` runs:

1. The version that stops using a column or a table removes it from the models only, with `SeparateDatabaseAndState`. The column
   is nullable or has a `db_default`, since the new version does not name it in an INSERT.
2. The next version drops it, with DropColumn or DropTable."""

from collections.abc import Callable
from typing import Any

from django.db import NotSupportedError, migrations, transaction
from django.db.migrations.operations.base import Operation
from django.db.models import Q, QuerySet

BATCH_SIZE = 500  # rows of one transaction; SQLite limits the number of values of a statement


class DropColumn(Operation):
    """Drop a column that no model has any more. Does nothing if there is no such column: SQLite copies tables without it."""

    reversible = False

    def __init__(self, model_name: str, column: str) -> None:
        self.model_name, self.column = model_name, column

    def state_forwards(self, app_label: str, state: Any) -> None:
        pass

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        model = to_state.apps.get_model(app_label, self.model_name)
        if self.allow_migrate_model(schema_editor.connection.alias, model):
            drop_column(schema_editor, model, self.column)

    def describe(self) -> str:
        return f"Drop column {self.column} of {self.model_name}"


class DropTable(Operation):
    """Drop a table that no model has any more. Does nothing if there is no such table."""

    reversible = False

    def __init__(self, table: str) -> None:
        self.table = table

    def state_forwards(self, app_label: str, state: Any) -> None:
        pass

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        schema_editor.execute(f"DROP TABLE IF EXISTS {schema_editor.quote_name(self.table)}")

    def describe(self) -> str:
        return f"Drop table {self.table}"


class AddCheckNotValid(migrations.AddConstraint):
    """Like AddConstraint with a CheckConstraint; on PostgreSQL existing rows are not checked, which takes a lock for long.

    ValidateCheck in a later migration checks them."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        if schema_editor.connection.vendor != "postgresql":
            super().database_forwards(app_label, schema_editor, from_state, to_state)
            return
        model = to_state.apps.get_model(app_label, self.model_name)
        if self.allow_migrate_model(schema_editor.connection.alias, model):
            statement = self.constraint.create_sql(model, schema_editor)
            schema_editor.execute(f"{statement} NOT VALID", params=None)


class ValidateCheck(Operation):
    """Check the existing rows against a constraint of AddCheckNotValid, while others read and write the table."""

    reversible = True

    def __init__(self, model_name: str, name: str) -> None:
        self.model_name, self.name = model_name, name

    def state_forwards(self, app_label: str, state: Any) -> None:
        pass

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        model = to_state.apps.get_model(app_label, self.model_name)
        if schema_editor.connection.vendor == "postgresql" and self.allow_migrate_model(schema_editor.connection.alias, model):
            table, name = schema_editor.quote_name(model._meta.db_table), schema_editor.quote_name(self.name)
            schema_editor.execute(f"ALTER TABLE {table} VALIDATE CONSTRAINT {name}")

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        pass

    def describe(self) -> str:
        return f"Validate constraint {self.name} of {self.model_name}"


class ChangeRowsInBatches(Operation):
    """Change the rows of a table, each batch in a transaction of its own. Only for migrations with `atomic = False`.

    `change` gets the rows of a batch as a query set: `lambda rows: rows.update(size=F("width"))`. The rows are locked, and
    still fulfil `condition`. A repetition after a crash begins anew, so `condition` excludes rows that were changed. A row that
    the version before inserts meanwhile may be missed: the new code has to work with it, as before the migration."""

    reversible = True

    def __init__(self, model_name: str, change: Callable[[QuerySet[Any]], object], condition: Q) -> None:
        self.model_name, self.change, self.condition = model_name, change, condition

    def state_forwards(self, app_label: str, state: Any) -> None:
        pass

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        alias = schema_editor.connection.alias
        if schema_editor.connection.in_atomic_block:
            raise NotSupportedError(f"{self.describe()}: the migration needs atomic = False.")
        model = from_state.apps.get_model(app_label, self.model_name)
        if not self.allow_migrate_model(alias, model):
            return
        rows = model._base_manager.using(alias).filter(self.condition).order_by("pk")
        further: QuerySet[Any] | None = rows
        while further is not None:
            with transaction.atomic(using=alias):
                batch = [*further.select_for_update().values_list("pk", flat=True)[:BATCH_SIZE]]
                if batch:
                    self.change(rows.filter(pk__in=batch).order_by())
            further = rows.filter(pk__gt=batch[-1]) if batch else None

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        pass

    def describe(self) -> str:
        return f"Change rows of {self.model_name} in batches"


def drop_column(schema_editor: Any, model: Any, column: str) -> None:
    table = schema_editor.quote_name(model._meta.db_table)
    if schema_editor.connection.vendor == "postgresql":
        schema_editor.execute(f"ALTER TABLE {table} DROP COLUMN IF EXISTS {schema_editor.quote_name(column)}")
        return
    with schema_editor.connection.cursor() as cursor:
        columns = schema_editor.connection.introspection.get_table_description(cursor, model._meta.db_table)
    if column in {existing.name for existing in columns}:
        schema_editor._remake_table(model)  # copies the columns of the model, with their indexes and constraints

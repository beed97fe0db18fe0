"""Rules for the operations of a migration: the code of the base keeps working beside it, and no table is locked for long.

A migration may break a rule of REASONED if it says why, for example `reasons = {"check": "One row a host."}`."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import singledispatchmethod
from typing import Any

import sqlparse
from django.db import migrations, models
from django.db.migrations.operations.base import Operation
from django.db.migrations.operations.fields import FieldOperation
from django.db.migrations.state import ProjectState
from django.db.models import NOT_PROVIDED, Field

from sandboxes.db.concurrent_indexes import AddIndexConcurrently
from sandboxes.db.migration_operations import AddCheckNotValid, ChangeRowsInBatches, DropColumn, DropTable, ValidateCheck

REASONED = {
    "batches": "one statement or transaction for all rows of a table holds their locks for long: ChangeRowsInBatches in a "
    "migration with atomic = False",
    "check": "a new constraint reads all rows under a lock, and may refuse rows of the version before: AddCheckNotValid, "
    "ValidateCheck in a later migration",
    "index": "an index that is not created concurrently stops writes: AddIndexConcurrently in a migration with atomic = False",
    "not-null": "reads all rows under a lock, and the version before may write NULL",
    "tables": "an atomic migration that locks two tables deadlocks with requests that lock them in another order",
    "type": "a new type copies the table under a lock, and the version before may write other values",
}
# And none stops others while it waits for a lock.
REPEATABLE = (AddIndexConcurrently, ValidateCheck, ChangeRowsInBatches, migrations.RunPython)
SCHEMA_STATEMENT = re.compile(
    r"(CREATE|ALTER|DROP|COMMENT)\b(?!.*\bAS\s+(SELECT|WITH|TABLE|VALUES)\b)", re.IGNORECASE | re.DOTALL
)
OPTIONS_OF_TYPES = ("max_digits", "decimal_places")
Problem = tuple[str, str]  # rule, text


@dataclass(frozen=True)
class Step:
    """An operation, and whether it acts on the database, on the state of the models, or on both."""

    operation: Operation
    on_database: bool = True
    on_state: bool = True


def check_migration(migration: migrations.Migration, before: ProjectState, base: ProjectState) -> list[Problem]:
    """Return the broken rules of a migration. `before` is the state that it is applied to, `base` that of the base's code."""
    steps = [step for operation in migration.operations for step in split_operation(operation)]
    reasons: dict[str, str] = getattr(migration, "reasons", {})
    found, locked, state = [], set[str](), before.clone()
    for step in steps:
        check = OperationCheck(migration.app_label, state, base)
        found += check.list_problems(step)
        locked |= check.locked
        if step.on_state:
            step.operation.state_forwards(migration.app_label, state)
    if migration.atomic and len(locked) > 1:
        found.append(("tables", f"locks {', '.join(sorted(locked))} in one transaction"))
    changes_data = [is_data_change(step.operation) for step in steps if step.on_database]
    if any(changes_data) and not all(changes_data):
        found.append(("data", "changes rows and the schema: rows in a migration of their own, with ChangeRowsInBatches"))
    elif any(changes_data):
        found += find_unbatched(migration, steps)
    if not migration.atomic and any(not isinstance(step.operation, REPEATABLE) for step in steps if step.on_database):
        found.append(("atomic", "a repetition after a crash fails: with atomic = False only operations that can be repeated"))
    unused = reasons.keys() - {rule for rule, _ in found if rule in REASONED}
    kept = [(rule, text) for rule, text in found if not (rule in REASONED and reasons.get(rule))]
    return [*kept, *(("reasons", f"nothing needs the reason {name!r}") for name in sorted(unused))]


def split_operation(operation: Operation) -> Iterator[Step]:
    if isinstance(operation, migrations.SeparateDatabaseAndState):
        yield from (Step(step, on_state=False) for step in operation.database_operations)
        yield from (Step(step, on_database=False) for step in operation.state_operations)
    elif isinstance(operation, migrations.RunSQL):
        yield Step(operation, on_state=False)
        yield from (Step(step, on_database=False) for step in operation.state_operations)
    elif is_of_state_only(operation):
        yield Step(operation, on_database=False)
    else:
        yield Step(operation)


def is_of_state_only(operation: Operation) -> bool:
    return isinstance(operation, migrations.AlterModelOptions | migrations.AlterModelManagers)


def is_data_change(operation: Operation) -> bool:
    """Return whether an operation may change rows: every statement may that is not known to change the schema alone."""
    if isinstance(operation, migrations.RunSQL):
        return not all(SCHEMA_STATEMENT.match(statement) for statement in split_sql(operation.sql))
    return isinstance(operation, migrations.RunPython | ChangeRowsInBatches)


def split_sql(sql: Any) -> Iterator[str]:
    """Yield the statements of a RunSQL, without comments. A list has statements, or pairs of a statement and parameters."""
    for script in [sql] if isinstance(sql, str) else sql:
        text = script if isinstance(script, str) else script[0]
        yield from filter(None, (sqlparse.format(part, strip_comments=True).strip("; \n") for part in sqlparse.split(text)))


def find_unbatched(migration: migrations.Migration, steps: Sequence[Step]) -> Iterator[Problem]:
    for step in steps:
        if step.on_database and not isinstance(step.operation, ChangeRowsInBatches):
            yield "batches", f"{type(step.operation).__name__} changes rows without batches"
        elif step.on_database and migration.atomic:
            yield "batches", "all batches are in the transaction of the migration"


class OperationCheck:
    """Check of one operation. `locked` has the existing tables that it locks against writes."""

    def __init__(self, app: str, state: ProjectState, base: ProjectState) -> None:
        self.app, self.state, self.base = app, state, base
        self.locked: set[str] = set()

    def list_problems(self, step: Step) -> list[Problem]:
        """Return the broken rules. Those of tables that the base does not have are none: no code uses them yet."""
        return list(self._check(step.operation) if step.on_database else self._check_state(step.operation))

    def _lock(self, model: str) -> bool:
        """Note that a table is locked. Return whether the base has it."""
        app, _, name = model.lower().rpartition(".")
        exists = (app or self.app, name) in self.base.models
        if exists:
            self.locked.add(f"{app or self.app}.{name}")
        return exists

    def _get_field(self, model: str, name: str) -> "Field[Any, Any]":
        return self.state.models[self.app, model.lower()].fields[name]

    def _check_state(self, operation: Operation) -> Iterator[Problem]:
        """A field that is removed from the models alone gets no value from the new code."""
        if isinstance(operation, migrations.RemoveField) and self._has_base_field(operation):
            field = self._get_field(operation.model_name, operation.name)
            if not field.many_to_many and is_required(field):
                yield "removal", f"{operation.model_name}.{operation.name} is NOT NULL: give it a db_default first"

    def _has_base_field(self, operation: FieldOperation) -> bool:
        model = self.base.models.get((self.app, operation.model_name_lower))
        return bool(model) and operation.name in model.fields

    @singledispatchmethod
    def _check(self, operation: Operation) -> Iterator[Problem]:
        if not isinstance(operation, migrations.RunPython | migrations.RunSQL | ChangeRowsInBatches):
            yield "unknown", f"no rule is known for {type(operation).__name__}: add one to tests/lint/operations.py"

    @_check.register(AddIndexConcurrently | ValidateCheck | migrations.RemoveIndex | migrations.RenameIndex)
    @_check.register(migrations.AlterModelTableComment | migrations.AlterOrderWithRespectTo)
    def _check_brief(self, operation: Any) -> Iterator[Problem]:
        yield from ()

    @_check.register
    def _check_create(self, operation: migrations.CreateModel) -> Iterator[Problem]:
        for _, field in operation.fields:
            self._lock_target(field)
        yield from ()

    def _lock_target(self, field: Any) -> None:
        """A foreign key locks the other table against writes, while it is created."""
        if field.remote_field and not field.many_to_many:
            target = field.remote_field.model
            label = target if isinstance(target, str) else target._meta.label
            if not label.lower().startswith("settings."):
                self._lock(label)

    @_check.register
    def _check_add_field(self, operation: migrations.AddField) -> Iterator[Problem]:
        field: Any = operation.field
        if field.many_to_many or not self._lock(operation.model_name):
            return
        self._lock_target(field)
        name = f"{operation.model_name}.{operation.name}"
        if is_required(field) and not isinstance(field, models.GeneratedField):
            yield "default", f"{name} is NOT NULL: the version before inserts rows without it. Add a db_default"
        if field.db_index or field.unique:
            yield "index", f"{name} has an index"

    @_check.register
    def _check_alter_field(self, operation: migrations.AlterField) -> Iterator[Problem]:
        old: Any = self._get_field(operation.model_name, operation.name)
        new: Any = operation.field
        if not is_altered(old, new) or not self._lock(operation.model_name):
            return
        name = f"{operation.model_name}.{operation.name}"
        if old.null and not new.null:
            yield "not-null", f"{name} becomes NOT NULL"
        if old.has_db_default() and not new.has_db_default() and not new.null:
            yield "default", f"{name} loses its db_default, on which the version before depends"
        if not has_same_type(old, new):
            yield "type", f"{name} has another type"
        if (new.db_index or new.unique) and not (old.db_index or old.unique):
            yield "index", f"{name} gets an index"

    @_check.register(migrations.RemoveField | migrations.RenameField)
    def _check_remove_field(self, operation: Any) -> Iterator[Problem]:
        name = getattr(operation, "old_name", None) or operation.name
        model = self.base.models.get((self.app, operation.model_name_lower))
        if model and name in model.fields:
            yield "removal", f"the version before uses {operation.model_name}.{name}: see sandboxes/db/migration_operations.py"

    @_check.register(migrations.DeleteModel | migrations.RenameModel)
    def _check_remove_model(self, operation: Any) -> Iterator[Problem]:
        name = getattr(operation, "old_name", None) or operation.name
        if (self.app, name.lower()) in self.base.models:
            yield "removal", f"the version before uses {name}: see sandboxes/db/migration_operations.py"

    @_check.register
    def _check_rename_table(self, operation: migrations.AlterModelTable) -> Iterator[Problem]:
        if self._lock(operation.name):
            yield "removal", f"the version before uses the table of {operation.name}"

    @_check.register
    def _check_drop_column(self, operation: DropColumn) -> Iterator[Problem]:
        model = self.base.models.get((self.app, operation.model_name.lower()))
        self._lock(operation.model_name)
        if model and operation.column in {get_column(name, field) for name, field in model.fields.items()}:
            yield "removal", f"the version before uses {operation.model_name}.{operation.column}: drop it in the next one"

    @_check.register
    def _check_drop_table(self, operation: DropTable) -> Iterator[Problem]:
        for (app, name), model in self.base.models.items():
            if operation.table == (model.options.get("db_table") or f"{app}_{name}"):
                yield "removal", f"the version before uses the table {operation.table}: drop it in the next one"

    @_check.register
    def _check_add_index(self, operation: migrations.AddIndex) -> Iterator[Problem]:
        if self._lock(operation.model_name):
            yield "index", f"{operation.index.name} of {operation.model_name}"

    @_check.register(migrations.AlterUniqueTogether | migrations.AlterIndexTogether)
    def _check_together(self, operation: Any) -> Iterator[Problem]:
        if self._lock(operation.name):
            yield "index", f"{operation.option_name} of {operation.name}"

    @_check.register
    def _check_add_constraint(self, operation: migrations.AddConstraint) -> Iterator[Problem]:
        if self._lock(operation.model_name) and not isinstance(operation, AddCheckNotValid):
            yield "check", f"{operation.constraint.name} of {operation.model_name}"

    @_check.register(migrations.RemoveConstraint)
    def _check_remove_constraint(self, operation: Any) -> Iterator[Problem]:
        self._lock(operation.model_name)
        yield from ()


def is_required(field: "Field[Any, Any]") -> bool:
    """Return whether an INSERT that does not name the column fails."""
    return not field.null and field.db_default is NOT_PROVIDED


def is_altered(old: Any, new: Any) -> bool:
    """Return whether the column changes, and not the state of the model alone."""
    return describe(old) != describe(new)


def describe(field: Any) -> tuple[str, Sequence[Any], dict[str, Any]]:
    _, path, arguments, options = field.deconstruct()
    left_out = {*field.non_db_attrs, "default", "auto_now", "auto_now_add"}
    return path, arguments, {name: value for name, value in options.items() if name not in left_out}


def has_same_type(old: Any, new: Any) -> bool:
    """Return whether the values of the old type are those of the new one, without a copy of the table."""
    if old.get_internal_type() != new.get_internal_type():
        return False
    if any(getattr(old, option, None) != getattr(new, option, None) for option in OPTIONS_OF_TYPES):
        return False
    return new.max_length is None or (old.max_length is not None and old.max_length <= new.max_length)


def get_column(name: str, field: Any) -> str:
    is_key = field.remote_field and not field.many_to_many
    return str(field.db_column or (f"{name}_id" if is_key else name))

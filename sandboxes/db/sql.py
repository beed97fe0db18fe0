"""Hand-written SQL for the hot paths: exec, renew and model call. Building an ORM query costs several times its execution.

A statement is written by hand only where a benchmark shows that the ORM's query building dominates, or where
the ORM cannot express the statement. Every statement runs on SQLite and PostgreSQL; values are always parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any, TypeVar, cast
from uuid import UUID

from django.db import connection, transaction
from django.db.models import Field, ForeignKey, Model
from django.db.models.expressions import Col

M = TypeVar("M", bound=Model)


@dataclass(frozen=True)
class Statement:
    """A statement, or the part of one after its first keywords, with the values of its parameters."""

    text: str
    values: tuple[Any, ...] = ()


ALWAYS = Statement("TRUE")  # condition


def find_first(model: type[M], where: str, *values: Any) -> M | None:
    """Return the first instance that matches a condition in SQL, or None."""
    columns, _, _ = _describe_columns(model)
    rows = fetch_all(f"SELECT {columns} FROM {model._meta.db_table} WHERE {where} LIMIT 1", *values)  # noqa: S608 - no user input
    return _build_instance(model, rows[0]) if rows else None


def find_first_with_related(
    model: type[M], key: str, subqueries: Sequence[str], where: str, *values: Any
) -> tuple[M, Sequence[Any]] | tuple[None, Sequence[Any]]:
    """Like find_first, and also load the row of the foreign key `key` and the scalar `subqueries` in the same query.

    `values` are the parameters of the subqueries, then those of the condition. Returns the instance and the results."""
    field = cast("ForeignKey[Any, Any]", model._meta.get_field(key))
    other = field.related_model
    join = f"{other._meta.db_table}.{other._meta.pk.column} = {model._meta.db_table}.{field.column}"
    instance, (related,), results = find_joined(model, [(other, join)], subqueries, where, *values)
    if instance is None:
        return None, ()
    if related:
        setattr(instance, key, related)
    return instance, results


def find_joined(
    model: type[M], joins: Sequence[tuple[type[Model], str]], subqueries: Sequence[str], where: str, *values: Any
) -> tuple[M | None, list[Any], Sequence[Any]]:
    """Like find_first, and also load a row of each joined table and the scalar `subqueries` in the same query.

    Each join has a condition that at most one row matches. `values` are the parameters of the subqueries, of the joins, then of
    the condition. Returns the instance, the joined rows, None where there is none, and the results of the subqueries."""
    tables: list[type[Model]] = [model, *(other for other, _ in joins)]
    selected = ", ".join([*(_describe_columns(each)[0] for each in tables), *(f"({subquery})" for subquery in subqueries)])
    source = " ".join([
        model._meta.db_table, *(f"LEFT JOIN {other._meta.db_table} ON {condition}" for other, condition in joins)
    ])  # fmt: skip
    rows = fetch_all(f"SELECT {selected} FROM {source} WHERE {where} LIMIT 1", *values)  # noqa: S608 - no user input
    if not rows:
        return None, [None] * len(joins), ()
    [row] = rows
    instances: list[Model | None] = []
    start = 0
    for each in tables:
        names = _describe_columns(each)[1]
        columns = row[start : start + len(names)]
        instances.append(None if columns[names.index(_get_key_name(each))] is None else _build_instance(each, columns))
        start += len(names)
    return cast(M, instances[0]), instances[1:], row[start:]


def _get_key_name(model: type[Model]) -> str:
    assert model._meta.pk is not None  # every model has one
    return model._meta.pk.attname


def _build_instance(model: type[M], row: Sequence[Any]) -> M:
    _, names, casts = _describe_columns(model)
    values = [*row]
    for index, column, convert in casts:
        values[index] = convert(values[index], column, connection)
    return model.from_db(connection.alias, names, values)


def insert(row: Model) -> None:
    """Insert one row. Only a primary key chosen by the database is read back."""
    statement, fields = _build_insert(type(row), keyed=row.pk is not None)
    with connection.cursor() as cursor:
        cursor.execute(statement, [field.get_db_prep_save(getattr(row, field.attname), connection) for field in fields])
        if row.pk is None:
            [[row.pk]] = cursor.fetchall()
    row._state.adding, row._state.db = False, connection.alias


def build_insert_from(row: Model, source: str) -> Statement:
    """Build the INSERT of a row whose primary key is set, once for each row of a table or common table expression."""
    statement, fields = _build_insert(type(row), keyed=True)
    names, _, _ = statement.partition(" VALUES ")
    values = tuple(field.get_db_prep_save(getattr(row, field.attname), connection) for field in fields)
    return Statement(f"{names} SELECT {', '.join(['%s'] * len(fields))} FROM {source}", values)  # noqa: S608 - no user input


def insert_if_absent(row: Model) -> bool:
    """Insert a row whose primary key is set, unless a unique constraint is violated. Return whether the row was inserted.

    Waits for a concurrent transaction that inserts a conflicting row."""
    statement, fields = _build_insert(type(row), keyed=True)
    values = [field.get_db_prep_save(getattr(row, field.attname), connection) for field in fields]
    return execute(f"{statement} ON CONFLICT DO NOTHING", *values) == 1


def lock_rows(model: type[Model], where: str, *values: Any) -> None:
    """Lock the rows that match a condition in SQL until the transaction ends.

    FOR NO KEY UPDATE does not delay inserts of rows that refer to a locked row. No effect on SQLite, where a write
    transaction is exclusive."""
    if connection.features.has_select_for_no_key_update:
        fetch_all(f"SELECT 1 FROM {model._meta.db_table} WHERE {where} FOR NO KEY UPDATE", *values)  # noqa: S608 - no user input


def lock_key(key: str) -> None:
    """Make transactions that lock the same key wait for each other until they end. Two keys may share a lock.

    Lock the key before any row. No effect on SQLite, where a write transaction is exclusive."""
    if connection.vendor == "postgresql":
        fetch_all("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", key)


def fetch_all(statement: str, *values: Any) -> list[Sequence[Any]]:
    """Execute a statement and return its rows with the driver's values."""
    with connection.cursor() as cursor:
        cursor.execute(statement, [adapt_value(value) for value in values])
        rows: list[Sequence[Any]] = cursor.fetchall()
    return rows


def execute(statement: str, *values: Any) -> int:
    """Execute a statement and return the number of affected rows."""
    with connection.cursor() as cursor:
        cursor.execute(statement, [adapt_value(value) for value in values])
        return int(cursor.rowcount)


def update(model: type[Model], change: str, *values: Any) -> int:
    """Execute one UPDATE ("a = %s WHERE b = %s") and return the number of changed rows."""
    return execute(f"UPDATE {model._meta.db_table} SET {change}", *values)  # noqa: S608 - no user input


def update_then(model: type[Model], pk: UUID, change: Statement, then: Sequence[Statement]) -> bool:
    """Execute one UPDATE of the row `pk`, and if it changed the row, the statements that read the new row as `changed`.

    One statement on PostgreSQL: a chain of common table expressions, each of which takes the rows of the one before. SQLite
    changes no rows in them. It executes the statements in turn, in a transaction, and has no round trips to save."""
    table = model._meta.db_table
    if can_chain():
        steps = [("changed", Statement(f"UPDATE {table} SET {change.text} RETURNING {table}.*", change.values))]  # noqa: S608 - no user input
        steps += [(f"then_{number}", statement) for number, statement in enumerate(then)]
        return bool(execute_chain(steps, ["changed"])[0])
    with transaction.atomic(savepoint=False):
        changed = update(model, change.text, *change.values)
        for statement in then if changed else ():
            execute(f"WITH changed AS (SELECT * FROM {table} WHERE id = %s) {statement.text}", pk, *statement.values)  # noqa: S608 - no user input
    return bool(changed)


def can_chain() -> bool:
    """Return whether the database executes statements that change rows as common table expressions."""
    return connection.vendor == "postgresql"


def execute_chain(steps: Sequence[tuple[str, Statement]], counted: Sequence[str]) -> Sequence[int]:
    """Execute named statements as one, and return how many rows the `counted` ones return.

    All see the rows as they were before the chain, so a statement that depends on another reads the rows it returns. They are
    executed in the order in which they depend on each other, not in that of the text."""
    text = ", ".join(f"{name} AS ({statement.text})" for name, statement in steps)
    counts = ", ".join(f"(SELECT COUNT(*) FROM {name})" for name in counted)  # noqa: S608 - no user input
    values = [value for _, statement in steps for value in statement.values]
    [row] = fetch_all(f"WITH {text} SELECT {counts}", *values)
    return row


@cache
def _describe_columns(model: type[Model]) -> tuple[str, list[str], list[tuple[int, Col, Callable[..., Any]]]]:
    """Return the column list, the field names and the converters from driver values of a model."""
    table, fields = model._meta.db_table, model._meta.concrete_fields
    columns: list[Col] = [field.get_col(table) for field in fields]
    casts = [
        (index, column, convert)
        for index, column in enumerate(columns)
        for convert in connection.ops.get_db_converters(column) + column.get_db_converters(connection)
    ]
    return ", ".join(f"{table}.{field.column}" for field in fields), [field.attname for field in fields], casts


@cache
def _build_insert(model: type[Model], *, keyed: bool) -> tuple[str, list["Field[Any, Any]"]]:
    fields = [field for field in model._meta.concrete_fields if not field.generated and (keyed or not field.primary_key)]
    names, placeholders = ", ".join(f'"{field.column}"' for field in fields), ", ".join(["%s"] * len(fields))
    returning = "" if keyed else f" RETURNING {model._meta.pk.column}"
    return f"INSERT INTO {model._meta.db_table} ({names}) VALUES ({placeholders}){returning}", fields  # noqa: S608 - no user input


def to_datetime(value: datetime) -> datetime:
    """Return the time that the driver returned for a column of a hand-written statement. SQLite stores UTC without the zone."""
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value


def to_uuid(value: Any) -> UUID:
    """Return the UUID that the driver returned for a column of a hand-written statement. SQLite has text."""
    return value if isinstance(value, UUID) else UUID(value)


def adapt_value(value: Any) -> Any:
    """Adapt a value to the driver: SQLite has no UUID or timestamp type."""
    if isinstance(value, UUID):
        return value if connection.features.has_native_uuid_field else value.hex
    return connection.ops.adapt_datetimefield_value(value) if isinstance(value, datetime) else value

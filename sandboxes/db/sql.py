"""Rows by hand-written SQL, for what every request does: for the ORM, building the query again each time costs several
times what executing it does."""

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cache
from typing import Any, TypeVar, cast
from uuid import UUID

from django.db import connection
from django.db.models import Field, ForeignKey, Model
from django.db.models.expressions import Col

M = TypeVar("M", bound=Model)


def find_first(model: type[M], where: str, *values: Any) -> M | None:
    """The first row of a model for which a condition in SQL holds, None if there is none."""
    columns, _, _ = _describe_columns(model)
    found = fetch_all(f"SELECT {columns} FROM {model._meta.db_table} WHERE {where} LIMIT 1", *values)  # noqa: S608 - no user's words
    return _build_instance(model, found[0]) if found else None


def find_first_with_related(
    model: type[M], key: str, also: Sequence[str], where: str, *values: Any
) -> tuple[M, Sequence[Any]] | tuple[None, Sequence[Any]]:
    """The same, and by the same query the row to which a foreign key of it points, and what scalar subqueries give for it,
    whose values come before the condition's."""
    field = cast("ForeignKey[Any, Any]", model._meta.get_field(key))
    table, other = model._meta.db_table, field.related_model
    join = f"LEFT JOIN {other._meta.db_table} ON {other._meta.db_table}.{other._meta.pk.column} = {table}.{field.column}"
    (mine, names, _), (theirs, other_names, _) = _describe_columns(model), _describe_columns(other)
    columns = ", ".join([mine, theirs, *(f"({each})" for each in also)])
    rows = fetch_all(f"SELECT {columns} FROM {table} {join} WHERE {where} LIMIT 1", *values)  # noqa: S608 - no user's words
    if not rows:
        return None, ()
    [row] = rows
    found, its, given = _build_instance(model, row[: len(names)]), len(names), len(names) + len(other_names)
    if getattr(found, field.attname) is not None:
        setattr(found, key, _build_instance(other, row[its:given]))
    return found, row[given:]


def _build_instance(model: type[M], row: Sequence[Any]) -> M:
    _, names, casts = _describe_columns(model)
    found = [*row]
    for at, column, convert in casts:
        found[at] = convert(found[at], column, connection)
    return model.from_db(connection.alias, names, found)


def insert(row: Model) -> None:
    """Insert one row. A key that it does not have yet the database chooses; nothing else is read back."""
    statement, fields = _build_insert(type(row), keyed=row.pk is not None)
    with connection.cursor() as cursor:
        cursor.execute(statement, [field.get_db_prep_save(getattr(row, field.attname), connection) for field in fields])
        if row.pk is None:
            [[row.pk]] = cursor.fetchall()
    row._state.adding, row._state.db = False, connection.alias


def insert_if_absent(row: Model) -> bool:
    """The same of a row whose key is set, unless one that has what is unique of it is there; whether it was not. Waits for a
    rival's transaction."""
    statement, fields = _build_insert(type(row), keyed=True)
    values = [field.get_db_prep_save(getattr(row, field.attname), connection) for field in fields]
    return execute(f"{statement} ON CONFLICT DO NOTHING", *values) == 1


def lock_rows(model: type[Model], where: str, *values: Any) -> None:
    """Lock the rows for which a condition in SQL holds until the transaction ends, but for their keys: who refers to one
    does not wait. On SQLite that transaction is the only one that writes."""
    if connection.features.has_select_for_no_key_update:
        fetch_all(f"SELECT 1 FROM {model._meta.db_table} WHERE {where} FOR NO KEY UPDATE", *values)  # noqa: S608 - no user's words


def fetch_all(statement: str, *given: Any) -> list[Sequence[Any]]:
    """The rows that a statement gives, as the driver has them."""
    with connection.cursor() as cursor:
        cursor.execute(statement, [_adapt_value(value) for value in given])
        found: list[Sequence[Any]] = cursor.fetchall()
    return found


def execute(statement: str, *values: Any) -> int:
    """Execute a statement and say how many rows it touched."""
    with connection.cursor() as cursor:
        cursor.execute(statement, [_adapt_value(value) for value in values])
        return int(cursor.rowcount)


def update(model: type[Model], change: str, *values: Any) -> int:
    """Execute one UPDATE ("a = %s WHERE b = %s") and say how many rows it changed."""
    return execute(f"UPDATE {model._meta.db_table} SET {change}", *values)  # noqa: S608 - no user's words


@cache
def _describe_columns(model: type[Model]) -> tuple[str, list[str], list[tuple[int, Col, Callable[..., Any]]]]:
    """How this database reads a model: its columns, the names of its fields, and what makes Python values of theirs."""
    table, fields = model._meta.db_table, model._meta.concrete_fields
    columns: list[Col] = [field.get_col(table) for field in fields]
    casts = [
        (at, column, convert)
        for at, column in enumerate(columns)
        for convert in connection.ops.get_db_converters(column) + column.get_db_converters(connection)
    ]
    return ", ".join(f"{table}.{field.column}" for field in fields), [field.attname for field in fields], casts


@cache
def _build_insert(model: type[Model], *, keyed: bool) -> tuple[str, list["Field[Any, Any]"]]:
    fields = [field for field in model._meta.concrete_fields if not field.generated and (keyed or not field.primary_key)]
    names, marks = ", ".join(f'"{field.column}"' for field in fields), ", ".join(["%s"] * len(fields))
    chosen = "" if keyed else f" RETURNING {model._meta.pk.column}"
    return f"INSERT INTO {model._meta.db_table} ({names}) VALUES ({marks}){chosen}", fields  # noqa: S608 - no user's words


def _adapt_value(value: Any) -> Any:
    """What this database's driver takes for a value: SQLite has neither UUIDs nor times."""
    if isinstance(value, UUID):
        return value if connection.features.has_native_uuid_field else value.hex
    return connection.ops.adapt_datetimefield_value(value) if isinstance(value, datetime) else value

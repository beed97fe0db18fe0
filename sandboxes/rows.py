"""Rows by hand-written SQL, for what every request does: for the ORM, building the query again each time costs several
times what executing it does."""

from collections.abc import Callable
from datetime import datetime
from functools import cache
from typing import Any, TypeVar
from uuid import UUID

from django.db import connection
from django.db.models import Field, Model
from django.db.models.expressions import Col

M = TypeVar("M", bound=Model)


def first(model: type[M], where: str, *values: Any) -> M | None:
    """The first row of a model for which a condition in SQL holds, None if there is none."""
    select, names, casts = _shape(model)
    with connection.cursor() as cursor:
        cursor.execute(f"{select} WHERE {where} LIMIT 1", [_adapted(value) for value in values])
        row = cursor.fetchone()
    if row is None:
        return None
    found = [*row]
    for at, column, cast in casts:
        found[at] = cast(found[at], column, connection)
    return model.from_db(connection.alias, names, found)


def insert(row: Model) -> None:
    """Insert one row whose key is set. Nothing is read back."""
    statement, fields = _insertion(type(row))
    with connection.cursor() as cursor:
        cursor.execute(statement, [field.get_db_prep_save(getattr(row, field.attname), connection) for field in fields])
    row._state.adding, row._state.db = False, connection.alias


def insert_new(row: Model) -> bool:
    """The same unless a row that has what is unique of it is there; whether it was not. Waits for a rival's transaction."""
    statement, fields = _insertion(type(row))
    values = [field.get_db_prep_save(getattr(row, field.attname), connection) for field in fields]
    return execute(f"{statement} ON CONFLICT DO NOTHING", *values) == 1


def execute(statement: str, *values: Any) -> int:
    """Execute a statement and say how many rows it touched."""
    with connection.cursor() as cursor:
        cursor.execute(statement, [_adapted(value) for value in values])
        return int(cursor.rowcount)


def update(model: type[Model], change: str, *values: Any) -> int:
    """Execute one UPDATE ("a = %s WHERE b = %s") and say how many rows it changed."""
    return execute(f"UPDATE {model._meta.db_table} SET {change}", *values)  # noqa: S608 - no user's words


@cache
def _shape(model: type[Model]) -> tuple[str, list[str], list[tuple[int, Col, Callable[..., Any]]]]:
    """How this database reads a model: the SELECT, the names of its fields, and what makes Python values of theirs."""
    table, fields = model._meta.db_table, model._meta.concrete_fields
    columns: list[Col] = [field.get_col(table) for field in fields]
    casts = [
        (at, column, cast)
        for at, column in enumerate(columns)
        for cast in connection.ops.get_db_converters(column) + column.get_db_converters(connection)
    ]
    select = f"SELECT {', '.join(str(field.column) for field in fields)} FROM {table}"  # noqa: S608 - no user's words
    return select, [field.attname for field in fields], casts


@cache
def _insertion(model: type[Model]) -> tuple[str, list["Field[Any, Any]"]]:
    fields = [field for field in model._meta.concrete_fields if not field.generated]
    names, marks = ", ".join(f'"{field.column}"' for field in fields), ", ".join(["%s"] * len(fields))
    return f"INSERT INTO {model._meta.db_table} ({names}) VALUES ({marks})", fields  # noqa: S608 - no user's words


def _adapted(value: Any) -> Any:
    """What this database's driver takes for a value: SQLite has neither UUIDs nor times."""
    if isinstance(value, UUID):
        return value if connection.features.has_native_uuid_field else value.hex
    return connection.ops.adapt_datetimefield_value(value) if isinstance(value, datetime) else value

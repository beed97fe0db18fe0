"""Hand-written SQL for the hot paths: exec, renew and model call.

A statement is written by hand only where a benchmark shows that Django takes longer to build the query than the database takes
to execute it, or where the ORM cannot express the statement. Every statement runs on SQLite and PostgreSQL. Values are always
parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, cast
from uuid import UUID

from django.db import DEFAULT_DB_ALIAS, connection, connections, transaction
from django.db.models import Field, ForeignKey, Model, QuerySet
from django.db.models.expressions import Col
from django.db.models.sql import UpdateQuery

from sandboxes.db import dialect

M = TypeVar("M", bound=Model)


@dataclass(frozen=True)
class Statement:
    """SQL text and the values of its parameters: a whole statement, or a part such as a condition."""

    text: str
    values: tuple[Any, ...] = ()


ALWAYS = Statement("TRUE")  # condition that holds for every row


def find_first(model: type[M], where: str, *values: Any) -> M | None:
    """Return the first instance that matches a condition in SQL, or None."""
    columns, _, _ = _describe_columns(model)
    rows = fetch_all(f"SELECT {columns} FROM {model._meta.db_table} WHERE {where} LIMIT 1", *values)  # noqa: S608 - no user input
    return _build_instance(model, rows[0]) if rows else None


def find_all(model: type[M], where: str, *values: Any) -> list[M]:
    """Return the instances that match a condition in SQL, which may end with an order and a lock."""
    columns, _, _ = _describe_columns(model)
    rows = fetch_all(f"SELECT {columns} FROM {model._meta.db_table} WHERE {where}", *values)  # noqa: S608 - no user input
    return [_build_instance(model, row) for row in rows]


def find_first_with_related(
    model: type[M], key: str, subqueries: Sequence[str], where: str, *values: Any
) -> tuple[M, Sequence[Any]] | tuple[None, Sequence[Any]]:
    """Like find_first, and also load the row of the foreign key `key` and the scalar `subqueries` in the same query.

    `values` are the parameters of the subqueries, then those of the condition. Returns the instance and the results of the
    subqueries."""
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
    model: type[M],
    joins: Sequence[tuple[type[Model], str]],
    subqueries: Sequence[str],
    where: str,
    *values: Any,
    deferred: tuple[str, ...] = (),
    lock: str = "",
) -> tuple[M | None, list[Any], Sequence[Any]]:
    """Like find_first, and also load a row of each joined table and the scalar `subqueries` in the same query.

    `joins` are models with a join condition that at most one of their rows matches. `values` are the parameters of the
    subqueries, then those of the joins and of the condition. `deferred` are fields of `model` that are read at their first
    use. `lock` is a clause of `dialect`, for a query without joins. Returns the instance, an instance or None for each join,
    and the results of the subqueries."""
    tables: list[tuple[type[Model], tuple[str, ...]]] = [(model, deferred), *((other, ()) for other, _ in joins)]
    columns_of_tables = [_describe_columns(*table)[0] for table in tables]
    selected = ", ".join([*columns_of_tables, *(f"({subquery})" for subquery in subqueries)])
    source = " ".join([
        model._meta.db_table, *(f"LEFT JOIN {other._meta.db_table} ON {condition}" for other, condition in joins)
    ])  # fmt: skip
    rows = fetch_all(f"SELECT {selected} FROM {source} WHERE {where} LIMIT 1 {lock}", *values)  # noqa: S608 - no user input
    if not rows:
        return None, [None] * len(joins), ()
    [row] = rows
    instances: list[Model | None] = []
    start = 0
    for table, left_out in tables:
        names = _describe_columns(table, left_out)[1]
        columns = row[start : start + len(names)]
        is_absent = columns[names.index(_get_key_name(table))] is None
        instances.append(None if is_absent else _build_instance(table, columns, left_out))
        start += len(names)
    return cast(M, instances[0]), instances[1:], row[start:]


def _get_key_name(model: type[Model]) -> str:
    assert model._meta.pk is not None  # every model has one
    return model._meta.pk.attname


def _build_instance(model: type[M], row: Sequence[Any], deferred: tuple[str, ...] = ()) -> M:
    _, names, casts = _describe_columns(model, deferred)
    values, database = [*row], connections[DEFAULT_DB_ALIAS]  # `connection` looks the database up at each access
    for index, column, convert in casts:
        values[index] = convert(values[index], column, database)
    return model.from_db(DEFAULT_DB_ALIAS, names, values)


def insert(row: Model) -> None:
    """Insert one row. The primary key is read back if the database chooses it; other values are not."""
    statement, fields = _build_insert(type(row), keyed=row.pk is not None)
    with connection.cursor() as cursor:
        cursor.execute(statement, _prepare_values(row, fields))
        if row.pk is None:
            [[row.pk]] = cursor.fetchall()
    row._state.adding, row._state.db = False, connection.alias


def insert_all(rows: Sequence[Model]) -> None:
    """Insert rows of several models in their order, in the caller's transaction: as one statement on PostgreSQL.

    Keys that the database chooses are not read back."""
    statements = [_build_insert_of(row) for row in rows]
    if dialect.can_chain():
        execute_chain([(f"inserted_{number}", statement) for number, statement in enumerate(statements)], [])
    else:
        for statement in statements:
            execute(statement.text, *statement.values)
    for row in rows:
        row._state.adding, row._state.db = False, connection.alias


def _build_insert_of(row: Model) -> Statement:
    text, fields = _build_insert(type(row), keyed=row.pk is not None)
    return Statement(text, tuple(field.get_db_prep_save(getattr(row, field.attname), connection) for field in fields))


def build_insert_from(row: Model, source: str) -> Statement:
    """Build an INSERT of `row`, whose primary key is set, that inserts it once for each row of `source`.

    `source` is a table or a common table expression with at most one row: without a row nothing is inserted."""
    statement, fields = _build_insert(type(row), keyed=True)
    names, _, _ = statement.partition(" VALUES ")
    values = tuple(_prepare_values(row, fields))
    return Statement(f"{names} SELECT {', '.join(['%s'] * len(fields))} FROM {source}", values)  # noqa: S608 - no user input


def insert_if_absent(row: Model) -> bool:
    """Insert a row whose primary key is set, unless it violates a unique constraint. Return whether the row was inserted.

    Waits for the end of a concurrent transaction that has inserted a conflicting row."""
    statement, fields = _build_insert(type(row), keyed=True)
    values = _prepare_values(row, fields)
    return execute(f"{statement} ON CONFLICT DO NOTHING", *values) == 1


def lock_rows(model: type[Model], where: str, *values: Any) -> None:
    """Lock the rows that match a condition in SQL until the transaction ends. No effect on SQLite, see `dialect.row_lock`."""
    if lock := dialect.row_lock():
        fetch_all(f"SELECT 1 FROM {model._meta.db_table} WHERE {where} {lock}", *values)  # noqa: S608 - no user input


def lock_key(key: str) -> None:
    """Lock a key until the transaction ends: other transactions that lock the same key wait. Two keys may share a lock.

    Lock a key before any row, or transactions deadlock. No effect on SQLite, where a write transaction is exclusive."""
    if statement := dialect.advisory_lock():
        fetch_all(statement, key)


def fetch_all(statement: str, *values: Any) -> list[Sequence[Any]]:
    """Execute a statement and return its rows, with values as the driver returns them."""
    with connection.cursor() as cursor:
        cursor.execute(statement, [dialect.adapt_value(value) for value in values])
        rows: list[Sequence[Any]] = cursor.fetchall()
    return rows


def fetch_named(statement: str, **values: Any) -> list[Sequence[Any]]:
    """Like fetch_all, with named parameters, "%(name)s". Each value is converted and sent once, however often it is used."""
    with connection.cursor() as cursor:
        cursor.execute(statement, {name: dialect.adapt_value(value) for name, value in values.items()})
        rows: list[Sequence[Any]] = cursor.fetchall()
    return rows


def execute(statement: str, *values: Any) -> int:
    """Execute a statement and return the number of affected rows."""
    with connection.cursor() as cursor:
        cursor.execute(statement, [dialect.adapt_value(value) for value in values])
        return int(cursor.rowcount)


def update(model: type[Model], change: str, *values: Any) -> int:
    """Execute one UPDATE ("a = %s WHERE b = %s") and return the number of changed rows."""
    return execute(f"UPDATE {model._meta.db_table} SET {change}", *values)  # noqa: S608 - no user input


def update_then(model: type[Model], pk: UUID, change: Statement, then: Sequence[Statement]) -> bool:
    """Execute one UPDATE of the row `pk`, and if it changed the row, the statements `then`. Return whether the row was changed.

    `change` begins after SET. The statements `then` read the new row as `changed`. On PostgreSQL all of them are one statement,
    a chain of common table expressions, which saves round trips. SQLite allows only SELECT in such expressions, and executes
    the statements one after the other in a transaction."""
    table = model._meta.db_table
    if dialect.can_chain():
        steps = [("changed", Statement(f"UPDATE {table} SET {change.text} RETURNING {table}.*", change.values))]  # noqa: S608 - no user input
        steps += [(f"then_{number}", statement) for number, statement in enumerate(then)]
        return bool(execute_chain(steps, ["changed"])[0])
    with transaction.atomic(savepoint=False):
        changed = update(model, change.text, *change.values)
        for statement in then if changed else ():
            execute(f"WITH changed AS (SELECT * FROM {table} WHERE id = %s) {statement.text}", pk, *statement.values)  # noqa: S608 - no user input
    return bool(changed)


def insert_then(row: Model, then: Sequence[Statement]) -> None:
    """Insert a row whose primary key is set, and execute the statements `then`, which read the new row as `changed`.

    As one statement on PostgreSQL, like update_then. Call it in a transaction: on SQLite it is several statements."""
    table, insertion = row._meta.db_table, _build_insert_of(row)
    if dialect.can_chain():
        steps = [("changed", Statement(f"{insertion.text} RETURNING {table}.*", insertion.values))]
        execute_chain([*steps, *((f"then_{number}", statement) for number, statement in enumerate(then))], [])
    else:
        execute(insertion.text, *insertion.values)
        for statement in then:
            execute(f"WITH changed AS (SELECT * FROM {table} WHERE id = %s) {statement.text}", row.pk, *statement.values)  # noqa: S608 - no user input
    row._state.adding, row._state.db = False, connection.alias


def build_update(rows: "QuerySet[Any]", **changes: Any) -> Statement:
    """Build the UPDATE that `rows.update(**changes)` executes, for a chain. Raise EmptyResultSet if no row can match."""
    query = cast(UpdateQuery, rows.query.chain(UpdateQuery))
    query.add_update_values(changes)
    text, values = query.get_compiler(connection=connection).as_sql()
    return Statement(text, tuple(values))


def execute_chain(steps: Sequence[tuple[str, Statement]], counted: Sequence[str]) -> Sequence[int]:
    """Execute statements as common table expressions of one statement. Return the number of rows of each name in `counted`.

    `steps` are pairs of name and statement. Every step sees the tables as they were before the chain. A step that depends on
    another step therefore reads the rows that the other one returns, by its name, and is executed after it. The order of
    independent steps is undefined."""
    text = ", ".join(f"{name} AS ({statement.text})" for name, statement in steps)
    counts = ", ".join(f"(SELECT COUNT(*) FROM {name})" for name in counted) or "1"  # noqa: S608 - no user input
    values = [value for _, statement in steps for value in statement.values]
    [row] = fetch_all(f"WITH {text} SELECT {counts}", *values)
    return row


@cache
def _describe_columns(
    model: type[Model], deferred: tuple[str, ...] = ()
) -> tuple[str, list[str], list[tuple[int, Col, Callable[..., Any]]]]:
    """Return the column list of a model, its field names, and the converters of driver values: (index, column, function)."""
    table, fields = model._meta.db_table, [field for field in model._meta.concrete_fields if field.name not in deferred]
    columns: list[Col] = [field.get_col(table) for field in fields]
    casts = [
        (index, column, convert)
        for index, column in enumerate(columns)
        for convert in connection.ops.get_db_converters(column) + column.get_db_converters(connection)
    ]
    return ", ".join(f"{table}.{field.column}" for field in fields), [field.attname for field in fields], casts


def _prepare_values(row: Model, fields: Sequence["Field[Any, Any]"]) -> list[Any]:
    database = connections[DEFAULT_DB_ALIAS]
    return [field.get_db_prep_save(getattr(row, field.attname), database) for field in fields]


@cache
def _build_insert(model: type[Model], *, keyed: bool) -> tuple[str, list["Field[Any, Any]"]]:
    fields = [field for field in model._meta.concrete_fields if not field.generated and (keyed or not field.primary_key)]
    names, placeholders = ", ".join(f'"{field.column}"' for field in fields), ", ".join(["%s"] * len(fields))
    returning = "" if keyed else f" RETURNING {model._meta.pk.column}"
    return f"INSERT INTO {model._meta.db_table} ({names}) VALUES ({placeholders}){returning}", fields  # noqa: S608 - no user input

"""Everything that differs between SQLite and PostgreSQL in hand-written SQL: expressions, locks, parameters, driver values.

The functions for expressions take and return SQL text; values stay parameters. Lists of the HTTP API are JSON documents that
the database builds, because a row becomes text without a model instance. Both databases build the same documents."""

import json
import sqlite3
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime
from typing import Any
from uuid import UUID

from django.db import DEFAULT_DB_ALIAS, Error, IntegrityError, InterfaceError, OperationalError, connections
from django.db.backends.base.base import BaseDatabaseWrapper

UNIQUE_VIOLATION = "23505"  # SQLSTATE: https://www.postgresql.org/docs/current/errcodes-appendix.html
# Extended result codes of a unique index, a primary key and a row id: https://www.sqlite.org/rescode.html
SQLITE_UNIQUE_ERRORS = frozenset(
    {sqlite3.SQLITE_CONSTRAINT_UNIQUE, sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY, sqlite3.SQLITE_CONSTRAINT_ROWID}
)
LOCK_CONFLICTS = frozenset({"55P03", "40P01"})  # lock timeout, deadlock
SQLITE_LOCK_CONFLICTS = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
CONNECTION_EXCEPTIONS = "08"  # class of SQLSTATEs
# The server stops, is started, or has no free connection.
UNAVAILABLE = frozenset({"57P01", "57P02", "57P03", "53300"})


def get_connection() -> BaseDatabaseWrapper:
    """Return this thread's connection. `django.db.connection` looks it up at each access of an attribute."""
    return connections[DEFAULT_DB_ALIAS]


def release_connection() -> None:
    """Lend the PostgreSQL connection of this thread to others until its next statement. No effect in a transaction."""
    connection = get_connection()
    if connection.vendor == "postgresql" and not connection.in_atomic_block:
        connection.close()


def keep_idle_connections() -> None:
    """Let this process keep returned PostgreSQL connections for their next use. For servers, which do not fork.

    A thread closes the kept ones that are not used, and a process with a thread must not fork."""
    if is_postgres():
        type(get_connection()).keeps_idle = True  # type: ignore[attr-defined]  # of the backend of this project


def count_usable_connections() -> int | None:
    """Return how many connections the PostgreSQL server has for users that are no superusers. None on SQLite."""
    if not is_postgres():
        return None
    with get_connection().cursor() as cursor:
        cursor.execute(
            "SELECT current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int"
            " - COALESCE(current_setting('reserved_connections', true)::int, 0)"  # since PostgreSQL 16
        )
        return int(cursor.fetchone()[0])


def is_postgres() -> bool:
    return get_connection().vendor == "postgresql"


# --- statements and locks -----------------------------------------------------------------------------------------
def can_chain() -> bool:
    """Return whether a common table expression may change rows: on PostgreSQL only."""
    return is_postgres()


def row_lock(table: str = "") -> str:
    """Return the clause that locks the rows of a SELECT, or "" on SQLite, where a write transaction is exclusive.

    FOR NO KEY UPDATE does not delay inserts of rows that refer to a locked row. `table` limits the lock to one of the tables
    of a join."""
    return f"FOR NO KEY UPDATE{f' OF {table}' if table else ''}" if is_postgres() else ""


def force_index(name: str) -> str:
    """Return the clause after a table that makes SQLite use an index, or "" on PostgreSQL, whose statistics are never missing.

    Without statistics SQLite prefers an index on a range of times, which contains all rows, to a partial index of few rows."""
    return "" if is_postgres() else f"INDEXED BY {name}"


def fence() -> str:
    """Return the end of a subquery that keeps the conditions of the outer query out of it on PostgreSQL, or "" on SQLite.

    The plan of a prepared statement is made for unknown values: PostgreSQL assumes that a range of times selects 0.5 % of all
    rows, and prefers an index of all times to a partial index of more rows, although the range may contain all."""
    return "OFFSET 0" if is_postgres() else ""


def share_lock() -> str:
    """Return the clause that keeps the rows of a SELECT from being changed or deleted, and lets others lock them in this way.

    "" on SQLite, as in row_lock."""
    return "FOR SHARE" if is_postgres() else ""


def row_lock_or_skip() -> str:
    """Like row_lock, for a SELECT that leaves out the rows that another transaction has locked."""
    return "FOR NO KEY UPDATE SKIP LOCKED" if is_postgres() else ""


def advisory_lock() -> str:
    """Return the statement that locks the key in its parameter until the transaction ends, or "" as in row_lock."""
    return "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))" if is_postgres() else ""


def lock_in_order(table: str, condition: str) -> str:
    """Return a query for the ids of the rows that match a condition, which locks the rows in the order of their ids."""
    return f"SELECT id FROM {table} WHERE {condition} ORDER BY id {row_lock()}"  # noqa: S608 - no user input


def clock_query() -> str:
    """Return the query for the database's present time, or "" on SQLite, which has no clock of its own."""
    return "SELECT clock_timestamp()" if is_postgres() else ""


def statement_timeout(milliseconds: int) -> str:
    """Return the statement that limits the duration of each further statement of the transaction, or "" on SQLite."""
    return f"SET LOCAL statement_timeout = {milliseconds}" if is_postgres() else ""


def set_fillfactor(table: str, percent: int) -> str:
    """Return the statement that leaves room in new pages of a table, or "" on SQLite, which updates rows in place.

    PostgreSQL writes a new version of an updated row into the same page if there is room. If no column of an index has changed,
    the indexes are then left alone (heap-only update, HOT)."""
    return f"ALTER TABLE {table} SET (fillfactor = {percent})" if is_postgres() else ""


# --- parameters and values of the driver --------------------------------------------------------------------------
def adapt_value(value: Any) -> Any:
    """Convert a parameter for the driver. SQLite has no UUID, timestamp or date type."""
    if isinstance(value, datetime):
        return get_connection().ops.adapt_datetimefield_value(value)
    if isinstance(value, date):
        return get_connection().ops.adapt_datefield_value(value)
    if isinstance(value, UUID):
        return value if get_connection().features.has_native_uuid_field else value.hex
    return value


def adapt_list(values: Iterable[Any]) -> Any:
    """Return the parameter of `in_list`. The text of the statement does not depend on the number of values, so that it is
    prepared once."""
    adapted = [adapt_value(value) for value in values]
    return adapted if is_postgres() else json.dumps(adapted)


def to_datetime(value: datetime) -> datetime:
    """Convert a time that the driver returned for a hand-written statement. SQLite stores UTC without a time zone."""
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value


def to_uuid(value: Any) -> UUID:
    """Convert a UUID that the driver returned for a hand-written statement. SQLite stores text."""
    return value if isinstance(value, UUID) else UUID(value)


# --- conditions and arithmetic ------------------------------------------------------------------------------------
def add_duration(moment: str, duration: str) -> str:
    """Return the sum of a time and a DurationField. `moment` occurs several times in the text: it must be a named parameter.

    SQLite stores a time as text, with microseconds if they are not zero, and a duration in microseconds. Django's own function
    for the sum is Python code, which takes longer than the rest of a statement."""
    if is_postgres():
        return f"({moment} + {duration})"
    total = f"({_epoch_second(moment)} * 1000000 + CAST(substr({moment}, 21) AS integer) + {duration})"
    fraction = f"CASE {total} %% 1000000 WHEN 0 THEN '' ELSE printf('.%%06d', {total} %% 1000000) END"
    return f"(datetime({total} / 1000000, 'unixepoch') || {fraction})"


def seconds_between(earlier: str, later: str) -> str:
    """Return the time between two moments in seconds. Django defines the function on each connection to SQLite."""
    if is_postgres():
        return f"EXTRACT(EPOCH FROM {later} - {earlier})::float"
    return f"(django_timestamp_diff({later}, {earlier}) / 1000000.0)"


def epoch_minute(moment: str) -> str:
    """Return the number of whole minutes from 1970 to a time."""
    if is_postgres():
        return f"FLOOR(EXTRACT(EPOCH FROM {moment}) / 60)::integer"
    return f"{_epoch_second(moment)} / 60"


def _epoch_second(moment: str) -> str:
    """Return the whole seconds from 1970 to a time, on SQLite, whose own conversion rounds to the nearest millisecond."""
    return f"CAST(strftime('%%s', substr({moment}, 1, 19)) AS integer)"


def least(first: str, second: str) -> str:
    """Return the smaller of two values that are not NULL."""
    return f"{'LEAST' if is_postgres() else 'MIN'}({first}, {second})"


def list_contains(column: str, value: str) -> str:
    """Return the condition that the JSON list in a column contains a text."""
    if is_postgres():
        return f"{column} @> to_jsonb({value}::text)"
    return f"EXISTS (SELECT 1 FROM json_each({column}) WHERE json_each.value = {value})"  # noqa: S608 - no user input


def in_list(column: str, values: str) -> str:
    """Return the condition that the value of a column is in a list. The list is a parameter, made by `adapt_list`."""
    return f"{column} = ANY({values})" if is_postgres() else f"{column} IN (SELECT value FROM json_each({values}))"  # noqa: S608 - no user input


# --- JSON documents in the formats of the HTTP API ----------------------------------------------------------------
def build_object(members: Mapping[str, str]) -> str:
    """Return a JSON object of expressions by name. The names are not escaped, and must be constants.

    row_to_json takes a sixth less time than json_build_object, which finds out the type of each name and value in each row."""
    if is_postgres():
        columns = ", ".join(f'{value} AS "{name}"' for name, value in members.items())
        return f"(SELECT row_to_json(document) FROM (SELECT {columns}) AS document)"  # noqa: S608 - no user input
    arguments = ", ".join(f"'{name}', {value}" for name, value in members.items())
    return f"json_object({arguments})"


def json_as_text(document: str) -> str:
    """Return a JSON document as text. SQLite stores JSON as text."""
    return f"{document}::text" if is_postgres() else document


def read_json(column: str) -> str:
    """Return a JSONField as a JSON value, not as text."""
    return column if is_postgres() else f"json({column})"


def read_boolean(column: str) -> str:
    """Return a BooleanField as a JSON boolean. SQLite stores 0 or 1."""
    return column if is_postgres() else f"json(iif({column}, 'true', 'false'))"


def format_uuid(column: str) -> str:
    """Return a UUIDField with hyphens. SQLite stores 32 hexadecimal digits."""
    if is_postgres():
        return column
    lengths, start, parts = (8, 4, 4, 4, 12), 1, []
    for length in lengths:
        parts.append(f"substr({column}, {start}, {length})")
        start += length
    return " || '-' || ".join(parts)


def format_timestamp(moment: str) -> str:
    """Return a time in the format of `clock.format_timestamp`: RFC 3339 in UTC, with microseconds if they are not zero."""
    if is_postgres():
        text = f"""to_char({moment} AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')"""
        return f"replace({text}, '.000000Z', 'Z')"
    return f"replace({moment}, ' ', 'T') || 'Z'"


def utc_date(moment: str) -> str:
    """Return the UTC date of a time."""
    return f"({moment} AT TIME ZONE 'UTC')::date" if is_postgres() else f"date({moment})"


def regex_operator() -> str:
    """Return the operator of a case-sensitive match of a regular expression. Django's connections to SQLite have a function."""
    return "~" if is_postgres() else "REGEXP"


def format_seconds(duration: str) -> str:
    """Return a DurationField in whole seconds. SQLite stores microseconds."""
    return f"trunc(extract(epoch FROM {duration}))" if is_postgres() else f"{duration} / 1000000"


def raise_unless_unique(error: IntegrityError) -> None:
    """Raise the error again unless it is the violation of a unique constraint, by a concurrent or an earlier insert.

    A missing column value, a CHECK or a foreign key is a fault of the code or of the schema, such as an older version of the
    code on a newer schema. It must not be answered as a race, which the caller would repeat for ever."""
    cause = error.__cause__
    if getattr(cause, "sqlstate", "") != UNIQUE_VIOLATION and getattr(cause, "sqlite_errorcode", 0) not in SQLITE_UNIQUE_ERRORS:
        raise error


def is_unavailable(error: Error) -> bool:
    """Return whether the database cannot be reached, or the connection was lost. Other errors have a cause of their own."""
    if isinstance(error, InterfaceError) or not isinstance(error, OperationalError):
        return isinstance(error, InterfaceError)
    cause = error.__cause__
    if isinstance(cause, sqlite3.Error):
        return _get_sqlite_error(cause) == sqlite3.SQLITE_CANTOPEN
    state = getattr(cause, "sqlstate", None)  # the driver has none for a connection that could not be made or has broken
    return not state or state.startswith(CONNECTION_EXCEPTIONS) or state in UNAVAILABLE


def is_lock_conflict(error: Error) -> bool:
    """Return whether a statement failed for the locks of other transactions alone: a repetition may succeed."""
    cause = error.__cause__
    if isinstance(cause, sqlite3.Error):
        return _get_sqlite_error(cause) in SQLITE_LOCK_CONFLICTS
    return getattr(cause, "sqlstate", None) in LOCK_CONFLICTS


def _get_sqlite_error(error: sqlite3.Error) -> int:
    """Return the primary result code, without its extension. 0: the driver gives none."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF

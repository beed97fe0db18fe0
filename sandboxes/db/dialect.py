"""SQL expressions that differ between SQLite and PostgreSQL. The functions take and return SQL text; values stay parameters."""

import json
from collections.abc import Iterable
from typing import Any

from django.db import connection

from sandboxes.db import sql


def _on_postgres() -> bool:
    return connection.vendor == "postgresql"


def add_duration(moment: str, duration: str) -> str:
    """Return the sum of a time and a DurationField. Django defines the function on each connection to SQLite."""
    return f"({moment} + {duration})" if _on_postgres() else f"django_format_dtdelta('+', {moment}, {duration})"


def seconds_between(earlier: str, later: str) -> str:
    """Return the time between two moments in seconds. Django defines the function on each connection to SQLite."""
    if _on_postgres():
        return f"EXTRACT(EPOCH FROM {later} - {earlier})::float"
    return f"(django_timestamp_diff({later}, {earlier}) / 1000000.0)"


def least(first: str, second: str) -> str:
    """Return the smaller of two values that are not NULL."""
    return f"{'LEAST' if _on_postgres() else 'MIN'}({first}, {second})"


def epoch_minute(moment: str) -> str:
    """Return the number of whole minutes from 1970 to a time."""
    if _on_postgres():
        return f"FLOOR(EXTRACT(EPOCH FROM {moment}) / 60)::integer"
    return f"CAST(strftime('%%s', {moment}) AS integer) / 60"


def list_contains(column: str, value: str) -> str:
    """Return the condition that the JSON list in a column contains a text."""
    if _on_postgres():
        return f"{column} @> to_jsonb({value}::text)"
    return f"EXISTS (SELECT 1 FROM json_each({column}) WHERE json_each.value = {value})"  # noqa: S608 - no user input


def in_list(column: str) -> str:
    """Return the condition that the value of a column is in a list. The list is one parameter, made by `adapt_list`."""
    return f"{column} = ANY(%s)" if _on_postgres() else f"{column} IN (SELECT value FROM json_each(%s))"  # noqa: S608 - no user input


def adapt_list(values: Iterable[Any]) -> Any:
    """Return the parameter of `in_list`. The text of the statement does not depend on the number of values, so that it is
    prepared once."""
    adapted = [sql.adapt_value(value) for value in values]
    return adapted if _on_postgres() else json.dumps(adapted)


def lock_in_order(table: str, condition: str) -> str:
    """Return a query for the ids of the rows that match a condition, which locks the rows in the order of their ids.

    Without a lock on SQLite, where a write transaction is exclusive."""
    lock = " FOR NO KEY UPDATE" if _on_postgres() else ""
    return f"SELECT id FROM {table} WHERE {condition} ORDER BY id{lock}"  # noqa: S608 - no user input

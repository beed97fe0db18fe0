"""SQL that SQLite and PostgreSQL spell differently. Each function takes and returns SQL text; values stay parameters."""

import json
from collections.abc import Iterable
from typing import Any

from django.db import connection

from sandboxes.db import sql


def _on_postgres() -> bool:
    return connection.vendor == "postgresql"


def add_duration(moment: str, duration: str) -> str:
    """A time plus a DurationField. On SQLite by the function that Django defines on each connection."""
    return f"({moment} + {duration})" if _on_postgres() else f"django_format_dtdelta('+', {moment}, {duration})"


def least(first: str, second: str) -> str:
    """The smaller of two values that are not NULL."""
    return f"{'LEAST' if _on_postgres() else 'MIN'}({first}, {second})"


def epoch_minute(moment: str) -> str:
    """Whole minutes since 1970."""
    if _on_postgres():
        return f"FLOOR(EXTRACT(EPOCH FROM {moment}) / 60)::integer"
    return f"CAST(strftime('%%s', {moment}) AS integer) / 60"


def list_contains(column: str, value: str) -> str:
    """Condition that the JSON list in a column contains a text."""
    if _on_postgres():
        return f"{column} @> to_jsonb({value}::text)"
    return f"EXISTS (SELECT 1 FROM json_each({column}) WHERE json_each.value = {value})"  # noqa: S608 - no user input


def in_list(column: str) -> str:
    """Condition that a column has one of the values of a single parameter, which `adapt_list` makes."""
    return f"{column} = ANY(%s)" if _on_postgres() else f"{column} IN (SELECT value FROM json_each(%s))"  # noqa: S608 - no user input


def adapt_list(values: Iterable[Any]) -> Any:
    """Return the parameter of `in_list`. One parameter for any number of values, so that the statement can be prepared."""
    adapted = [sql.adapt_value(value) for value in values]
    return adapted if _on_postgres() else json.dumps(adapted)


def lock_in_order(table: str, condition: str) -> str:
    """Select the ids of the rows that match a condition, locked in the order of their ids. SQLite has one lock for all rows."""
    lock = " FOR NO KEY UPDATE" if _on_postgres() else ""
    return f"SELECT id FROM {table} WHERE {condition} ORDER BY id{lock}"  # noqa: S608 - no user input

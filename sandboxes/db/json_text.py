"""SQL expressions for JSON documents in the formats of the HTTP API, built by the database.

Lists use them, because a row becomes text without a model instance. The functions take and return SQL text. SQLite and
PostgreSQL build the same documents."""

from collections.abc import Mapping

from django.db import connection


def _on_postgres() -> bool:
    return connection.vendor == "postgresql"


def build_object(members: Mapping[str, str]) -> str:
    """Return a JSON object of expressions by name. The names are not escaped, and must be constants."""
    function = "json_build_object" if _on_postgres() else "json_object"
    arguments = ", ".join(f"'{name}', {value}" for name, value in members.items())
    return f"{function}({arguments})"


def read_json(column: str) -> str:
    """Return a JSONField as a JSON value, not as text."""
    return column if _on_postgres() else f"json({column})"


def read_boolean(column: str) -> str:
    """Return a BooleanField as a JSON boolean. SQLite stores 0 or 1."""
    return column if _on_postgres() else f"json(iif({column}, 'true', 'false'))"


def format_uuid(column: str) -> str:
    """Return a UUIDField with hyphens. SQLite stores 32 hexadecimal digits."""
    if _on_postgres():
        return column
    lengths, start, parts = (8, 4, 4, 4, 12), 1, []
    for length in lengths:
        parts.append(f"substr({column}, {start}, {length})")
        start += length
    return " || '-' || ".join(parts)


def format_timestamp(moment: str) -> str:
    """Return a time in the format of `clock.format_timestamp`: RFC 3339 in UTC, with microseconds if they are not zero."""
    if _on_postgres():
        text = f"""to_char({moment} AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')"""
        return f"replace({text}, '.000000Z', 'Z')"
    return f"replace({moment}, ' ', 'T') || 'Z'"


def format_seconds(duration: str) -> str:
    """Return a DurationField in whole seconds. SQLite stores microseconds."""
    return f"trunc(extract(epoch FROM {duration}))" if _on_postgres() else f"{duration} / 1000000"

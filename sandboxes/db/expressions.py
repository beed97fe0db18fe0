"""Expressions of the ORM for constraints and indexes. Migrations refer to them, so none is moved, renamed or removed.

A schema with a function that only Django's connections to SQLite have cannot be checked, copied or repaired by other tools."""

from typing import Any

from django.db.models import Func, IntegerField


class DayOfMonth(Func):
    """Day of a date column, from 1. Django's own lookup calls Python code on SQLite."""

    arity = 1
    output_field = IntegerField()
    template = "EXTRACT(DAY FROM %(expressions)s)"

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """SQLite stores YYYY-MM-DD."""
        return self.as_sql(compiler, connection, template="CAST(substr(%(expressions)s, 9, 2) AS integer)", **context)

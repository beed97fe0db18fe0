"""Index of a text column for searches by prefix, which are the only queries that need it."""

from typing import Any

from django.db import models
from django.db.models import Q


class PrefixIndex(models.Index):
    """Index for `LIKE 'prefix%'` on PostgreSQL, which cannot use an index in the order of a language for LIKE.

    SQLite uses no index for Django's LIKE, and its planner would choose this one in place of a better one. There the index has
    the same name and no rows. A column that is also compared for equality has an ordinary index with the operator class."""

    def __init__(self, *, fields: list[str], name: str) -> None:
        super().__init__(fields=fields, name=name, opclasses=["varchar_pattern_ops"])

    def deconstruct(self) -> Any:
        path, arguments, options = super().deconstruct()
        del options["opclasses"]
        return path, arguments, options

    def create_sql(self, model: type[models.Model], schema_editor: Any, using: str = "", **options: Any) -> Any:
        if schema_editor.connection.vendor == "postgresql":
            return super().create_sql(model, schema_editor, using, **options)
        empty = models.Index(fields=self.fields, name=self.name, condition=Q(pk__isnull=True))
        return empty.create_sql(model, schema_editor, using, **options)

"""Migration operation that adds an index while other connections write to the table."""

from typing import Any

from django.db import migrations


class AddIndexConcurrently(migrations.AddIndex):
    """Like AddIndex; on PostgreSQL writes do not wait. Only for migrations with `atomic = False`.

    An earlier attempt that was interrupted leaves an invalid index, which is dropped first. Unlike the operation of
    django.contrib.postgres it also runs on SQLite."""

    atomic = False

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        if schema_editor.connection.vendor != "postgresql":
            super().database_forwards(app_label, schema_editor, from_state, to_state)
            return
        model = to_state.apps.get_model(app_label, self.model_name)
        if self.allow_migrate_model(schema_editor.connection.alias, model):
            schema_editor.remove_index(model, self.index, concurrently=True)  # IF EXISTS
            schema_editor.add_index(model, self.index, concurrently=True)

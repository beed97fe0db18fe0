from django.db import migrations
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.state import StateApps

from sandboxes.db import dialect


def set_fillfactor(percent: int):
    def change(apps: StateApps, schema_editor: BaseDatabaseSchemaEditor) -> None:
        if statement := dialect.set_fillfactor("leases_lease", percent):
            schema_editor.execute(statement)

    return change


class Migration(migrations.Migration):
    """Room for the renewals of a lease in its page. Every renewal writes a new version of the row, and changes no index."""

    dependencies = [
        ("leases", "0011_suspend_after"),
    ]

    operations = [
        migrations.RunPython(set_fillfactor(80), set_fillfactor(100)),
    ]

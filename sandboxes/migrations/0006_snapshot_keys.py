"""Where the objects of a snapshot lie was worked out from its row; now the row says it."""

from django.db import migrations


def say_where(apps, schema_editor):
    for snapshot in apps.get_model("sandboxes", "Snapshot").objects.filter(key="").iterator():
        snapshot.key = f"snapshots/{snapshot.holder}/{snapshot.pk}"
        snapshot.save(update_fields=["key"])


class Migration(migrations.Migration):
    dependencies = [("sandboxes", "0005_stored_state")]
    operations = [migrations.RunPython(say_where, migrations.RunPython.noop, elidable=True)]

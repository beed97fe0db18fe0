"""The default pool and the sealed policy."""

from django.db import migrations


def create(apps, schema_editor):
    apps.get_model("sandboxes", "Pool").objects.get_or_create(name="default")
    apps.get_model("sandboxes", "Policy").objects.get_or_create(
        name="sealed", defaults={"description": "No exceptions. Applies wherever no policy is named."}
    )


class Migration(migrations.Migration):
    dependencies = [("sandboxes", "0001_initial")]
    operations = [migrations.RunPython(create, migrations.RunPython.noop)]

from django.db import migrations


def make(apps, schema_editor):
    apps.get_model("sandboxes", "Pool").objects.get_or_create(name="default")


class Migration(migrations.Migration):
    dependencies = [("sandboxes", "0001_initial")]
    operations = [migrations.RunPython(make, migrations.RunPython.noop)]

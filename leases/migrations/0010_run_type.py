from django.db import migrations


def make(apps, schema_editor):
    """What holds for one-shot runs that name no other type; operators edit it. Each asks for the ttl that it needs."""
    apps.get_model("leases", "EnvironmentType").objects.get_or_create(name="run")


class Migration(migrations.Migration):
    dependencies = [("leases", "0009_spend_limit")]
    operations = [migrations.RunPython(make, migrations.RunPython.noop)]

from django.contrib.auth.management import create_permissions
from django.db import migrations

# What each role may do beyond what 0007_call_roles gave it.
ROLES = ("Viewer", "Operator", "Administrator")


def extend(apps, schema_editor):
    # Permissions are otherwise made after all migrations have run, which is too late for us.
    config = apps.get_app_config("sandboxes")
    config.models_module = True
    create_permissions(config, apps=apps, verbosity=0)
    config.models_module = None
    view = apps.get_model("auth", "Permission").objects.get(
        content_type__app_label="sandboxes", codename="view_process"
    )
    for name in ROLES:
        group, _ = apps.get_model("auth", "Group").objects.get_or_create(name=name)
        group.permissions.add(view)


class Migration(migrations.Migration):
    dependencies = [
        ("leases", "0007_call_roles"),
        ("sandboxes", "0009_processes"),
    ]
    operations = [migrations.RunPython(extend, migrations.RunPython.noop)]

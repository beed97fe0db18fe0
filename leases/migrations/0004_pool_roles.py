from django.contrib.auth.management import create_permissions
from django.db import migrations

# What each role may do beyond what 0003_roles gave it.
VIEWER = ["sandboxes.view_quota", "sandboxes.view_snapshot"]
OPERATOR = [*VIEWER, "sandboxes.drain_pool"]
ADMINISTRATOR = [*OPERATOR, "sandboxes.add_quota", "sandboxes.change_quota"]
ROLES = {"Viewer": VIEWER, "Operator": OPERATOR, "Administrator": ADMINISTRATOR}


def extend(apps, schema_editor):
    # Permissions are otherwise made after all migrations have run, which is too late for us.
    config = apps.get_app_config("sandboxes")
    config.models_module = True
    create_permissions(config, apps=apps, verbosity=0)
    config.models_module = None
    permissions = {
        f"sandboxes.{permission.codename}": permission
        for permission in apps.get_model("auth", "Permission").objects.filter(content_type__app_label="sandboxes")
    }
    for name, held in ROLES.items():
        group, _ = apps.get_model("auth", "Group").objects.get_or_create(name=name)
        group.permissions.add(*(permissions[each] for each in held))


class Migration(migrations.Migration):
    dependencies = [
        ("leases", "0003_roles"),
        ("sandboxes", "0003_pool_and_snapshots"),
    ]
    operations = [migrations.RunPython(extend, migrations.RunPython.noop)]

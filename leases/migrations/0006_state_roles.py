from django.contrib.auth.management import create_permissions
from django.db import migrations

# What each role may do beyond what 0004_pool_roles gave it. What an agent keeps is its own: a Viewer sees that it is there.
VIEWER = ["sandboxes.view_agentdata", "sandboxes.view_datafile", "sandboxes.view_dataevent"]
OPERATOR = [*VIEWER, "sandboxes.read_agent_data"]
ROLES = {"Viewer": VIEWER, "Operator": OPERATOR, "Administrator": OPERATOR}


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
        ("leases", "0005_snapshot_excludes"),
        ("sandboxes", "0007_read_agent_data"),
    ]
    operations = [migrations.RunPython(extend, migrations.RunPython.noop)]

from django.contrib.auth.management import create_permissions
from django.db import migrations

# What a role may do beyond the ones before it. Users and groups stay with superusers.
VIEWER = [
    "leases.view_agent", "leases.view_agentkey", "leases.view_environmenttype", "leases.view_lease",
    "leases.view_leaseevent", "leases.view_turn",
    "sandboxes.view_pool", "sandboxes.view_sandbox", "sandboxes.view_transition", "sandboxes.view_run",
    "sandboxes.view_sweep",
]
OPERATOR = [*VIEWER, "leases.end_lease", "sandboxes.act_on_sandbox"]
ADMINISTRATOR = [
    *OPERATOR,
    "leases.add_agent", "leases.change_agent", "leases.add_agentkey", "leases.revoke_key",
    "leases.add_environmenttype", "leases.change_environmenttype",
    "sandboxes.add_pool", "sandboxes.change_pool",
]
ROLES = {"Viewer": VIEWER, "Operator": OPERATOR, "Administrator": ADMINISTRATOR}


def make(apps, schema_editor):
    for label in ("sandboxes", "leases"):
        # Permissions are otherwise made after all migrations have run, which is too late for us.
        config = apps.get_app_config(label)
        config.models_module = True
        create_permissions(config, apps=apps, verbosity=0)
        config.models_module = None
    permissions = {
        f"{permission.content_type.app_label}.{permission.codename}": permission
        for permission in apps.get_model("auth", "Permission").objects.select_related("content_type")
    }
    for name, held in ROLES.items():
        group, _ = apps.get_model("auth", "Group").objects.get_or_create(name=name)
        group.permissions.add(*(permissions[each] for each in held))


class Migration(migrations.Migration):
    dependencies = [
        ("leases", "0002_environment_types"),
        ("sandboxes", "0002_default_pool"),
        ("auth", "0012_alter_user_first_name_max_length"),
        ("contenttypes", "0002_remove_content_type_name"),
    ]
    operations = [migrations.RunPython(make, migrations.RunPython.noop)]

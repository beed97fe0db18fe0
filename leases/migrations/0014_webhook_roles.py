from django.contrib.auth.management import create_permissions
from django.db import migrations

# What each role may do beyond what 0012_rate_roles gave it.
VIEWER = ["view_webhook", "view_event", "view_delivery"]
ROLES = {
    "Viewer": VIEWER,
    "Operator": [*VIEWER, "send_webhook"],
    "Administrator": [*VIEWER, "send_webhook", "manage_webhook"],
}


def extend(apps, schema_editor):
    # Permissions are otherwise made after all migrations have run, which is too late for us.
    config = apps.get_app_config("sandboxes")
    config.models_module = True
    create_permissions(config, apps=apps, verbosity=0)
    config.models_module = None
    permissions = apps.get_model("auth", "Permission").objects.filter(content_type__app_label="sandboxes")
    for name, held in ROLES.items():
        group, _ = apps.get_model("auth", "Group").objects.get_or_create(name=name)
        group.permissions.add(*permissions.filter(codename__in=held))


class Migration(migrations.Migration):

    dependencies = [
        ("leases", "0013_tabs"),
        ("sandboxes", "0016_outbox"),
    ]

    operations = [migrations.RunPython(extend, migrations.RunPython.noop)]

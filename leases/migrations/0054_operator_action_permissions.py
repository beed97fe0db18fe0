"""Permissions of the roles on operator actions."""

from django.contrib.auth.management import create_permissions
from django.db import migrations

VIEW = ["view_operatoraction"]
GRANTED = {"Viewer": VIEW, "Operator": VIEW, "Administrator": VIEW}


def grant(apps, schema_editor):
    # Django creates permissions after all migrations have run, which is too late here.
    config = apps.get_app_config("sandboxes")
    config.models_module = True
    create_permissions(config, apps=apps, verbosity=0)
    config.models_module = None
    permissions = apps.get_model("auth", "Permission").objects.filter(content_type__app_label="sandboxes")
    for name, codenames in GRANTED.items():
        for group in apps.get_model("auth", "Group").objects.filter(name=name):
            group.permissions.add(*permissions.filter(codename__in=codenames))


class Migration(migrations.Migration):

    reasons = {"batches": "Three rows."}
    dependencies = [
        ("leases", "0053_replaced_list_index"),
        ("sandboxes", "0091_operator_actions"),
    ]

    operations = [
        migrations.RunPython(grant, migrations.RunPython.noop),
    ]

"""Permissions of the roles on AT Protocol accounts and records."""

from django.contrib.auth.management import create_permissions
from django.db import migrations

VIEW = ["view_atprotoaccount", "view_atprotorecord"]
GRANTED = {"Viewer": VIEW, "Operator": [*VIEW, "manage_atprotorecord"], "Administrator": [*VIEW, "manage_atprotorecord"]}


def grant(apps, schema_editor):
    # Django creates permissions after all migrations have run, which is too late here.
    config = apps.get_app_config("leases")
    config.models_module = True
    create_permissions(config, apps=apps, verbosity=0)
    config.models_module = None
    permissions = apps.get_model("auth", "Permission").objects.filter(content_type__app_label="leases")
    for name, codenames in GRANTED.items():
        for group in apps.get_model("auth", "Group").objects.filter(name=name):
            group.permissions.add(*permissions.filter(codename__in=codenames))


class Migration(migrations.Migration):
    dependencies = [("leases", "0024_atproto_records")]
    operations = [migrations.RunPython(grant, migrations.RunPython.noop)]

"""Permissions of the roles on hosts."""

from django.contrib.auth.management import create_permissions
from django.db import migrations

GRANTED = {
    "Viewer": ["view_host"],
    "Operator": ["view_host", "declare_host_lost"],
    "Administrator": ["view_host", "declare_host_lost", "change_host"],
}


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
    dependencies = [("leases", "0008_request_claimed_by"), ("sandboxes", "0014_hosts")]
    operations = [migrations.RunPython(grant, migrations.RunPython.noop)]

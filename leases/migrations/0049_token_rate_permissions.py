"""Permissions of the roles on model rates by kind of token."""

from django.contrib.auth.management import create_permissions
from django.db import migrations

GRANTED = {
    "Viewer": ["view_tokenrate"],
    "Operator": ["view_tokenrate"],
    "Administrator": ["view_tokenrate", "add_tokenrate", "change_tokenrate"],
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

    reasons = {"batches": "Six rows."}
    dependencies = [
        ("leases", "0048_repository_defaults"),
        ("sandboxes", "0080_token_rates"),
    ]

    operations = [
        migrations.RunPython(grant, migrations.RunPython.noop),
    ]

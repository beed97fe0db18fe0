"""Permissions of the roles on image templates."""

from django.contrib.auth.management import create_permissions
from django.db import migrations

VIEW = ["view_imagetemplate"]
GRANTED = {
    "Viewer": VIEW, "Operator": [*VIEW, "manage_imagetemplate"], "Administrator": [*VIEW, "manage_imagetemplate"],
}  # fmt: skip


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
    dependencies = [("sandboxes", "0037_image_templates"), ("leases", "0003_roles")]
    operations = [migrations.RunPython(grant, migrations.RunPython.noop)]

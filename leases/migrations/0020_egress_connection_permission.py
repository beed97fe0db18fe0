"""Permission of the roles to view connections of sandboxes."""

from django.contrib.auth.management import create_permissions
from django.db import migrations

ROLES = ["Viewer", "Operator", "Administrator"]


def grant(apps, schema_editor):
    # Django creates permissions after all migrations have run, which is too late here.
    config = apps.get_app_config("sandboxes")
    config.models_module = True
    create_permissions(config, apps=apps, verbosity=0)
    config.models_module = None
    permissions = apps.get_model("auth", "Permission").objects.filter(content_type__app_label="sandboxes")
    for group in apps.get_model("auth", "Group").objects.filter(name__in=ROLES):
        group.permissions.add(*permissions.filter(codename="view_egressconnection"))


class Migration(migrations.Migration):
    dependencies = [("leases", "0019_agent_catalog"), ("sandboxes", "0026_egress_connections")]
    operations = [migrations.RunPython(grant, migrations.RunPython.noop)]

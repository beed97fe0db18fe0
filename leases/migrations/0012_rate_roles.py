from django.db import migrations

from sandboxes.db.roles import gives

# What each role may do beyond what 0011_policy gave it.
ROLES = {
    "Viewer": ["view_modelrate"],
    "Operator": ["view_modelrate"],
    "Administrator": ["view_modelrate", "add_modelrate", "change_modelrate", "delete_modelrate"],
}


class Migration(migrations.Migration):

    dependencies = [
        ("leases", "0011_policy"),
        ("sandboxes", "0012_records"),
    ]

    operations = [gives("sandboxes", ROLES)]

from django.db import migrations

from sandboxes.db.roles import gives

# What each role may do beyond what 0014_webhook_roles gave it.
VIEW = ["view_budget"]
ROLES = {"Viewer": VIEW, "Operator": VIEW, "Administrator": [*VIEW, "add_budget", "change_budget"]}


class Migration(migrations.Migration):

    dependencies = [
        ("leases", "0014_webhook_roles"),
        ("billing", "0003_budgets"),
    ]

    operations = [gives("billing", ROLES)]

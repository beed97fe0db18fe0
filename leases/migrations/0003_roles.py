"""The roles of operators, as groups with permissions. Users and groups are managed by superusers alone."""

from django.contrib.auth.management import create_permissions
from django.db import migrations

VIEWER = [
    "billing.view_account", "billing.view_budget", "billing.view_costrecord", "billing.view_credit",
    "billing.view_membership", "billing.view_rate", "billing.view_statement", "billing.view_statementline",
    "billing.view_usagerecord", "leases.view_agent", "leases.view_agentkey", "leases.view_environmenttype",
    "leases.view_lease", "leases.view_leaseevent", "leases.view_turn", "sandboxes.view_agentdata",
    "sandboxes.view_dataevent", "sandboxes.view_datafile", "sandboxes.view_delivery", "sandboxes.view_event",
    "sandboxes.view_llmcall", "sandboxes.view_mintedtoken", "sandboxes.view_modelrate", "sandboxes.view_policy",
    "sandboxes.view_pool", "sandboxes.view_process", "sandboxes.view_quota", "sandboxes.view_reading",
    "sandboxes.view_run", "sandboxes.view_sandbox", "sandboxes.view_signingkey", "sandboxes.view_snapshot",
    "sandboxes.view_sweep", "sandboxes.view_transition", "sandboxes.view_webhook",
]
OPERATOR = [
    *VIEWER,
    "leases.end_lease", "sandboxes.act_on_sandbox", "sandboxes.drain_pool", "sandboxes.read_agent_data",
    "sandboxes.send_webhook",
]
ADMINISTRATOR = [
    *OPERATOR,
    "billing.add_account", "billing.add_budget", "billing.add_credit", "billing.add_membership", "billing.add_rate",
    "billing.change_account", "billing.change_budget", "billing.change_membership", "billing.change_rate",
    "billing.close_statement", "leases.add_agent", "leases.add_agentkey", "leases.add_environmenttype",
    "leases.change_agent", "leases.change_environmenttype", "leases.revoke_key", "sandboxes.add_modelrate",
    "sandboxes.add_policy", "sandboxes.add_pool", "sandboxes.add_quota", "sandboxes.change_modelrate",
    "sandboxes.change_policy", "sandboxes.change_pool", "sandboxes.change_quota", "sandboxes.delete_modelrate",
    "sandboxes.manage_identity", "sandboxes.manage_webhook",
]
ROLES = {"Viewer": VIEWER, "Operator": OPERATOR, "Administrator": ADMINISTRATOR}


def create(apps, schema_editor):
    for label in ("sandboxes", "billing", "leases"):
        # Django creates permissions after all migrations have run, which is too late here.
        config = apps.get_app_config(label)
        config.models_module = True
        create_permissions(config, apps=apps, verbosity=0)
        config.models_module = None
    permissions = {
        f"{permission.content_type.app_label}.{permission.codename}": permission
        for permission in apps.get_model("auth", "Permission").objects.select_related("content_type")
    }
    for name, granted in ROLES.items():
        group, _ = apps.get_model("auth", "Group").objects.get_or_create(name=name)
        group.permissions.add(*(permissions[each] for each in granted))


class Migration(migrations.Migration):
    dependencies = [
        ("leases", "0002_environment_types"),
        ("sandboxes", "0002_default_rows"),
        ("billing", "0002_default_rows"),
        ("auth", "0012_alter_user_first_name_max_length"),
        ("contenttypes", "0002_remove_content_type_name"),
    ]
    operations = [migrations.RunPython(create, migrations.RunPython.noop)]

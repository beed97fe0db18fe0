"""Participants and outcomes of existing environments.

Existing games go on: their environments and types become open to the project, in which every agent of an earlier version is.
Environments with a coding task, and the types of tasks and of one-shot runs, stay closed."""

from django.contrib.auth.management import create_permissions
from django.db import migrations

ADD_PARTICIPANTS = """
INSERT INTO leases_participant (environment_id, agent_did, added_at, added_by)
SELECT leases_lease.environment_id, leases_lease.agent_did, MIN(leases_lease.leased_at), ''
FROM leases_lease JOIN leases_environment ON leases_environment.id = leases_lease.environment_id
GROUP BY leases_lease.environment_id, leases_lease.agent_did
"""
COPY_OUTCOMES = """
INSERT INTO leases_environmentoutcome (environment_id, ended_at, recorded_at, recorded_by, text)
SELECT id, ended_at, ended_at, '', outcome_text FROM leases_environment WHERE ended_at IS NOT NULL AND outcome_text <> ''
"""
OPEN_TYPES = """
UPDATE leases_environmenttype SET open_to_project = TRUE
WHERE name NOT IN ('coding', 'run') AND NOT EXISTS (
    SELECT 1 FROM leases_codingtask JOIN leases_environment ON leases_environment.id = leases_codingtask.environment_id
    WHERE leases_environment.type_id = leases_environmenttype.name
)
"""
OPEN_ENVIRONMENTS = """
UPDATE leases_environment SET open_to_project = TRUE
WHERE EXISTS (
    SELECT 1 FROM leases_environmenttype WHERE name = leases_environment.type_id AND open_to_project
)
"""
GRANTED = {
    "Viewer": ["view_project"],
    "Operator": ["view_project"],
    "Administrator": ["view_project", "add_project"],
}


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

    dependencies = [
        ('leases', '0033_participants'),
    ]

    operations = [
        migrations.RunSQL(ADD_PARTICIPANTS, migrations.RunSQL.noop),
        migrations.RunSQL(COPY_OUTCOMES, migrations.RunSQL.noop),
        migrations.RunSQL(OPEN_TYPES, migrations.RunSQL.noop),
        migrations.RunSQL(OPEN_ENVIRONMENTS, migrations.RunSQL.noop),
        migrations.RunPython(grant, migrations.RunPython.noop),
    ]

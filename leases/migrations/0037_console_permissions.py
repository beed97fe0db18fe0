"""Permissions of the roles to grant leases, and on repositories, coding tasks, the agent catalog and packs."""

from django.contrib.auth.management import create_permissions
from django.db import migrations, models

VIEW = ["view_repository", "view_codingtask", "view_catalogagent", "view_packversion"]
OPERATE = [*VIEW, "grant_lease", "enable_repository"]
GRANTED = {
    "Viewer": VIEW,
    "Operator": OPERATE,
    "Administrator": [*OPERATE, "add_repository", "change_repository", "add_catalogagent", "change_catalogagent"],
}


def grant(apps, schema_editor):
    # Django creates permissions after all migrations have run, which is too late here.
    labels = ["leases", "sandboxes"]
    for label in labels:
        config = apps.get_app_config(label)
        config.models_module = True
        create_permissions(config, apps=apps, verbosity=0)
        config.models_module = None
    permissions = apps.get_model("auth", "Permission").objects.filter(content_type__app_label__in=labels)
    for name, codenames in GRANTED.items():
        for group in apps.get_model("auth", "Group").objects.filter(name=name):
            group.permissions.add(*permissions.filter(codename__in=codenames))


class Migration(migrations.Migration):

    dependencies = [
        ('leases', '0036_repository_allowed_paths'),
        ('sandboxes', '0025_packs'),
    ]

    operations = [
        migrations.AlterModelOptions(
            name='codingtask',
            options={'default_permissions': ('view',), 'ordering': ['-created_at', '-pk']},
        ),
        migrations.AlterModelOptions(
            name='lease',
            options={'default_permissions': ('view',), 'ordering': ['-leased_at', '-pk'], 'permissions': [('end_lease', 'Can end leases'), ('grant_lease', 'Can grant leases')]},
        ),
        migrations.AlterModelOptions(
            name='repository',
            options={'default_permissions': ('add', 'change', 'view'), 'ordering': ['name'], 'permissions': [('enable_repository', 'Can enable and disable repositories')], 'verbose_name_plural': 'repositories'},
        ),
        migrations.AddIndex(
            model_name='codingtask',
            index=models.Index(fields=['-created_at', '-id'], name='codingtask_newest'),
        ),
        migrations.RunPython(grant, migrations.RunPython.noop),
    ]

"""Projects, with one for the agents, keys, environments and repositories of earlier versions."""

import django.utils.timezone
from django.db import migrations, models


def create(apps, schema_editor):
    apps.get_model("leases", "Project").objects.create(pk=1, name="default")
    if schema_editor.connection.vendor == "postgresql":
        schema_editor.execute("SELECT setval(pg_get_serial_sequence('leases_project', 'id'), 1)")


class Migration(migrations.Migration):

    dependencies = [
        ('leases', '0031_queued_run_attempts'),
    ]

    operations = [
        migrations.RenameField("repository", "project", "forge_project"),
        migrations.CreateModel(
            name='Project',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.SlugField(max_length=63, unique=True)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
            ],
            options={
                'ordering': ['name'],
                'default_permissions': ('add', 'view'),
            },
        ),
        migrations.RunPython(create, migrations.RunPython.noop),
    ]

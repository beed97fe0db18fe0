"""The item of suspended memory, with a rate of 0 for the own providers that suspend sandboxes."""

from datetime import UTC, datetime

from django.db import migrations, models


VALID_FROM = datetime(2020, 1, 1, tzinfo=UTC)  # earlier than any usage
OWN_HOSTS = "Your own machines. Add a rate with your cost per GiB-hour of suspended memory."


def create(apps, schema_editor):
    for provider in ("docker", "memory"):
        apps.get_model("billing", "Rate").objects.create(
            provider=provider, item="suspend", usd=0, valid_from=VALID_FROM, source=OWN_HOSTS
        )


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0005_redundant_indexes'),
    ]

    operations = [
        migrations.AlterField(
            model_name='costrecord',
            name='item',
            field=models.CharField(choices=[('time', 'sandbox-hours'), ('memory', 'GiB-hours of memory'), ('cpu', 'vCPU-minutes'), ('disk', 'GB-hours of disk'), ('suspend', 'GiB-hours of suspended memory'), ('storage', 'GB-months of storage'), ('request', 'requests (runs)'), ('plan', 'months of a plan'), ('llm', 'model calls')], max_length=8),
        ),
        migrations.AlterField(
            model_name='rate',
            name='item',
            field=models.CharField(choices=[('time', 'sandbox-hours'), ('memory', 'GiB-hours of memory'), ('cpu', 'vCPU-minutes'), ('disk', 'GB-hours of disk'), ('suspend', 'GiB-hours of suspended memory'), ('storage', 'GB-months of storage'), ('request', 'requests (runs)'), ('plan', 'months of a plan')], max_length=8),
        ),
        migrations.RunPython(create, migrations.RunPython.noop),
    ]

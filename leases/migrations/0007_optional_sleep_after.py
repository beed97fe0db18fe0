"""sleep_after of an environment type becomes optional, and empty where it is the former default."""

import leases.models
from django.db import migrations, models


def clear_former_default(apps, schema_editor):
    apps.get_model("leases", "EnvironmentType").objects.filter(sleep_after="5m").update(sleep_after="")


class Migration(migrations.Migration):

    dependencies = [
        ('leases', '0006_key_scopes_and_rotation'),
    ]

    operations = [
        migrations.AlterField(
            model_name='environmenttype',
            name='sleep_after',
            field=models.CharField(blank=True, help_text='Idle time before eviction, such as "5m". Empty: SANDBOX_SLEEP_AFTER, else LEASEHOLD_IDLE_TIMEOUT.', max_length=16, validators=[leases.models.check_sleep_after]),
        ),
        migrations.RunPython(clear_former_default, migrations.RunPython.noop),
    ]

"""Time after which waiting sandboxes of an environment type are suspended."""

import leases.models
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('leases', '0010_redundant_indexes'),
    ]

    operations = [
        migrations.AddField(
            model_name='environmenttype',
            name='suspend_after',
            field=models.DurationField(blank=True, help_text='A waiting sandbox is suspended after this time: its processes are frozen and keep their memory. Applies to new sandboxes at providers that can suspend. Empty: never.', null=True, validators=[leases.models.check_suspend_after]),
        ),
    ]

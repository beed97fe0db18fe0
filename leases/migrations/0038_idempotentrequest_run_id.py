"""Ids that callers choose for their runs. The table has the requests of the last day."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('leases', '0037_console_permissions'),
    ]

    operations = [
        migrations.AddField(
            model_name='idempotentrequest',
            name='run_id',
            field=models.UUIDField(help_text='Run that the caller named. It belongs to one key holder.', null=True, unique=True),
        ),
    ]

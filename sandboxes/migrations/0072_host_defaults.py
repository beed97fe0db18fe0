"""Database defaults of hosts: versions before the columns insert rows without them."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("sandboxes", "0071_gatewaytoken_defaults")]

    operations = [
        migrations.AlterField(
            model_name='host',
            name='quotas',
            field=models.JSONField(blank=True, db_default=models.Value([], models.JSONField()), default=list, editable=False),
        ),
        migrations.AlterField(
            model_name='host',
            name='quotas_error',
            field=models.TextField(blank=True, db_default='', default='', editable=False, help_text='Error of the last attempt. Empty: it read the values.'),
        ),
        migrations.AlterField(
            model_name='host',
            name='seal_report',
            field=models.TextField(blank=True, db_default='', default='', editable=False, help_text='Destinations tried, with the outcomes.'),
        ),
        migrations.AlterField(
            model_name='host',
            name='start_error',
            field=models.TextField(blank=True, db_default='', default='', editable=False),
        ),
        migrations.AlterField(
            model_name='host',
            name='start_failures',
            field=models.PositiveIntegerField(db_default=0, default=0, editable=False, help_text='Consecutive starts for which the provider was unavailable.'),
        ),
        migrations.AlterField(
            model_name='host',
            name='start_pauses',
            field=models.PositiveIntegerField(db_default=0, default=0, editable=False, help_text='Consecutive pauses.'),
        ),
        migrations.AlterField(
            model_name='host',
            name='start_probing',
            field=models.BooleanField(db_default=False, default=False, editable=False, help_text='One start has been let through to test the provider.'),
        ),
    ]

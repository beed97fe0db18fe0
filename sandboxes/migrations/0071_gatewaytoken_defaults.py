"""Database defaults of gateway tokens: versions before the columns insert rows without them."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("sandboxes", "0070_sweep_indexes")]

    operations = [
        migrations.AlterField(
            model_name='gatewaytoken',
            name='refused_joins',
            field=models.PositiveIntegerField(db_default=0, default=0, help_text='Attempts to use the token again after the join.'),
        ),
        migrations.AlterField(
            model_name='gatewaytoken',
            name='session_sha256',
            field=models.CharField(blank=True, db_default='', default='', editable=False, help_text='Hash of the secret that the agent chose at its join.', max_length=64),
        ),
    ]

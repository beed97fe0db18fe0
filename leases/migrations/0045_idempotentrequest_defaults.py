"""Database defaults of idempotent requests: versions before the columns insert rows without them."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("leases", "0044_turn_defaults")]

    operations = [
        migrations.AlterField(
            model_name='idempotentrequest',
            name='claimed_by',
            field=models.CharField(blank=True, db_default='', default='', help_text='Control-plane instance that executes the request.', max_length=64),
        ),
    ]

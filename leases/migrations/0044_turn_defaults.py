"""Database defaults of turns: versions before the columns insert rows without them."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("leases", "0043_leaseevent_defaults")]

    operations = [
        migrations.AlterField(
            model_name='turn',
            name='state',
            field=models.TextField(blank=True, db_default='', default='', editable=False, help_text='Input as JSON text. Empty: longer than turns.MAX_STATE_BYTES, or past its retention.'),
        ),
    ]

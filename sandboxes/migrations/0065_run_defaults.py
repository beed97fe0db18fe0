"""Database defaults of runs: versions before the columns insert rows without them."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("sandboxes", "0064_sandbox_defaults")]

    operations = [
        migrations.AlterField(
            model_name='run',
            name='released',
            field=models.BooleanField(db_default=False, default=False, editable=False, help_text='The process that waited for the result is dead.'),
        ),
    ]

"""Database defaults of image templates: versions before the columns insert rows without them."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("sandboxes", "0072_host_defaults")]

    operations = [
        migrations.AlterField(
            model_name='imagetemplate',
            name='build_number',
            field=models.PositiveIntegerField(db_default=1, default=1, help_text='Number of the last requested build, from 1.'),
        ),
    ]

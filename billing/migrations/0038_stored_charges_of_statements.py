"""Mark of the statements whose charges are stored."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("billing", "0037_estimated_tokens_of_lines")]

    operations = [
        migrations.AddField(
            model_name='statement',
            name='has_charges',
            field=models.BooleanField(db_default=False, default=False, editable=False, help_text='The charges of its lines are stored. Not on statements of earlier versions.'),
        ),
    ]

"""Database defaults of repositories: versions before the columns insert rows without them."""

import leases.coding.models
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("leases", "0047_environmenttype_defaults")]

    operations = [
        migrations.AlterField(
            model_name='repository',
            name='allowed_paths',
            field=models.JSONField(blank=True, db_default=models.Value([], models.JSONField()), default=list, help_text='Patterns of built-in protected paths that an agent may change, such as ".github/workflows/docs.yml".', validators=[leases.coding.models.check_path_patterns]),
        ),
    ]

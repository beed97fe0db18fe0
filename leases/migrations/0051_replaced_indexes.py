"""Drop indexes that others with the operator class for prefix searches replace."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("leases", "0050_console_lists")]

    operations = [
        migrations.RemoveIndex(model_name="lease", name="lease_agent"),
        migrations.RemoveIndex(model_name="lease", name="lease_environment"),
    ]

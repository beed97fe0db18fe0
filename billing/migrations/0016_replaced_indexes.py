"""Drop indexes that others with the operator class for prefix searches replace."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("billing", "0015_console_lists")]

    operations = [
        migrations.RemoveIndex(model_name="costrecord", name="cost_agent"),
        migrations.RemoveIndex(model_name="usagerecord", name="usage_agent"),
    ]

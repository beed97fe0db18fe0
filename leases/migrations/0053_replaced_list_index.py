"""Drop an index that another with the operator class for prefix searches replaces."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("leases", "0052_list_searches")]

    operations = [
        migrations.RemoveIndex(model_name="queuedrun", name="queuedrun_agent"),
    ]

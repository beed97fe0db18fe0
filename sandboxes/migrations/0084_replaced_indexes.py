"""Drop indexes that others with the operator class for prefix searches replace."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("sandboxes", "0083_console_lists")]

    operations = [
        migrations.RemoveIndex(model_name="llmcall", name="llmcall_agent"),
    ]

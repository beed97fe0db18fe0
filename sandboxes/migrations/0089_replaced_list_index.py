"""Drop an index that another with the operator class for prefix searches replaces."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("sandboxes", "0088_list_searches")]

    operations = [
        migrations.RemoveIndex(model_name="mintedtoken", name="mintedtoken_agent"),
    ]

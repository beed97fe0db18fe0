"""Index that finds the newest usage record of model calls, created while the table is written."""

from django.db import migrations, models

from sandboxes.db.concurrent_indexes import AddIndexConcurrently


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("billing", "0032_estimated_tokens")]

    operations = [
        AddIndexConcurrently(
            model_name="usagerecord",
            index=models.Index(fields=["id"], condition=models.Q(("item", "tokens")), name="usage_newest_tokens"),
        ),
    ]

"""Index that finds totals by model which lack the estimated tokens, created while the table is written."""

from django.db import migrations, models

from sandboxes.db.concurrent_indexes import AddIndexConcurrently


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("billing", "0035_estimated_tokens_of_totals")]

    operations = [
        AddIndexConcurrently(
            model_name="modeltotal",
            index=models.Index(
                fields=["id"], condition=models.Q(("estimated_tokens__isnull", True)), name="modeltotal_outdated"
            ),
        ),
    ]

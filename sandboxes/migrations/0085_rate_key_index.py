"""The index of rates by their key, in place of the constraint that the next migration drops."""

from django.db import migrations, models

from sandboxes.db.concurrent_indexes import AddIndexConcurrently


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("sandboxes", "0084_replaced_indexes")]

    operations = [
        AddIndexConcurrently(
            model_name="tokenrate",
            index=models.Index(fields=["pattern", "kind", "tokens_from", "tier", "valid_from"], name="tokenrate_key"),
        ),
    ]

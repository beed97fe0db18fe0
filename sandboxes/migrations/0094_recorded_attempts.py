"""Costs of the attempts of a model call that the upstream's records name."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("sandboxes", "0093_operator_orders")]

    operations = [
        migrations.AddField(
            model_name="llmcall",
            name="recorded_attempts",
            field=models.JSONField(
                blank=True, editable=False, help_text="Cost in USD of each attempt of which the upstream has written a record.", null=True
            ),
        ),
    ]

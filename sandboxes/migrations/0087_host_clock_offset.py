"""Difference of each host's clock from the database's, so that a wrong clock of the database is told from one of a host."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("sandboxes", "0086_superseded_rates")]

    operations = [
        migrations.AddField(
            model_name="host",
            name="clock_offset",
            field=models.DurationField(
                blank=True, editable=False, help_text="Clock of the worker's machine minus the database's, at the heartbeat.",
                null=True,
            ),
        ),
    ]

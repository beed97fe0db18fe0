"""A rate with the same start supersedes an earlier one, so that a wrong price can be corrected."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("sandboxes", "0085_rate_key_index")]

    operations = [
        migrations.RemoveConstraint(model_name="tokenrate", name="tokenrate_once"),
    ]

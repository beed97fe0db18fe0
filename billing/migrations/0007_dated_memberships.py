from datetime import date

from django.db import migrations, models


class Migration(migrations.Migration):
    """What there is counts from the beginning, as it did."""

    dependencies = [
        ("billing", "0006_use_and_runs"),
    ]

    operations = [
        migrations.AlterModelOptions(
            name="membership",
            options={"ordering": ["agent_did", "since"]},
        ),
        migrations.AddField(
            model_name="membership",
            name="since",
            field=models.DateField(blank=True, default=date(1970, 1, 1), help_text="The first day, UTC, in no closed month. Empty: of its first account from the beginning, else from today."),
            preserve_default=False,
        ),
        migrations.AlterField(
            model_name="membership",
            name="agent_did",
            field=models.CharField(max_length=255, verbose_name="agent"),
        ),
        migrations.AddConstraint(
            model_name="membership",
            constraint=models.UniqueConstraint(fields=("agent_did", "since"), name="membership_once_a_day", violation_error_message="It has a membership that begins on this day."),
        ),
    ]

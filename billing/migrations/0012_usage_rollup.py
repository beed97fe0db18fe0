from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("billing", "0011_project_budgets")]

    operations = [
        migrations.AlterField(
            model_name="usagerecord",
            name="source",
            field=models.CharField(
                help_text="Recorded fact: a transition, a reading, a snapshot, a lease and model, or the facts of an hour.",
                max_length=320,
            ),
        ),
    ]

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("sandboxes", "0053_snapshot_omitted")]

    operations = [
        migrations.AddField(
            model_name="snapshot",
            name="metered_until",
            field=models.DateTimeField(
                editable=False,
                help_text="Full hour up to which its time is in usage records, while its objects exist.",
                null=True,
            ),
        ),
    ]

"""Tables of the outputs in the object store, and NULL for a moved output in the row of its run."""

import uuid

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("sandboxes", "0060_data_size_retention")]

    operations = [
        migrations.CreateModel(
            name="OutputObject",
            fields=[
                ("id", models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False)),
                ("key", models.CharField(max_length=512, unique=True)),
                ("size_bytes", models.PositiveBigIntegerField()),
                ("at", models.DateTimeField()),
            ],
            options={"default_permissions": ()},
        ),
        migrations.CreateModel(
            name="StoredOutput",
            fields=[
                (
                    "run",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name="stored_output",
                        serialize=False, to="sandboxes.run",
                    ),
                ),
                ("offset", models.PositiveBigIntegerField(help_text="Bytes before stdout in the object.")),
                ("stdout_bytes", models.PositiveIntegerField()),
                ("stderr_bytes", models.PositiveIntegerField()),
                (
                    "stored_in",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT, related_name="outputs", to="sandboxes.outputobject"
                    ),
                ),
            ],
            options={"default_permissions": ()},
        ),
        migrations.AlterField(model_name="run", name="stderr", field=models.BinaryField(default=b"", null=True)),
        migrations.AlterField(
            model_name="run",
            name="stdout",
            field=models.BinaryField(
                default=b"",
                help_text="First bytes, up to LEASEHOLD_RUN_OUTPUT_KEPT_BYTES. NULL: moved to the object store.",
                null=True,
            ),
        ),
    ]  # fmt: skip

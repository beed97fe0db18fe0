"""Database defaults of snapshots: versions before the columns insert rows without them."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("sandboxes", "0065_run_defaults")]

    operations = [
        migrations.AlterField(
            model_name='snapshot',
            name='vendor_digest',
            field=models.CharField(blank=True, db_default='', default='', editable=False, help_text="SHA-256 of the listing of the files in the vendor's snapshot.", max_length=64),
        ),
        migrations.AlterField(
            model_name='snapshot',
            name='vendor_snapshot',
            field=models.CharField(blank=True, db_default='', default='', help_text="Id of the vendor's own snapshot of the same files, from which a wake is faster.", max_length=100),
        ),
    ]

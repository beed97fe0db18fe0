"""Database defaults of lease events: versions before the columns insert rows without them."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("leases", "0042_lease_defaults")]

    operations = [
        migrations.AlterField(
            model_name='leaseevent',
            name='skip_reason',
            field=models.CharField(blank=True, choices=[('draining', 'is draining'), ('full', 'is full'), ('starting_limit', 'starts as many sandboxes as it may at once'), ('circuit_open', 'starts nothing after failed starts'), ('unavailable', 'provider unavailable'), ('rejected', 'provider rejected the sandbox'), ('start_failed', 'start failed'), ('not_configured', 'provider not configured'), ('no_models', 'has no way to models'), ('too_small', 'is too small for the requested resources')], db_default='', default='', editable=False, help_text='Reason for which it was passed over.', max_length=16),
        ),
    ]

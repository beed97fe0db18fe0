import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('leases', '0026_vendor_intervals'),
        ('sandboxes', '0035_placement'),
    ]

    operations = [
        migrations.AddField(
            model_name='environmenttype',
            name='cheapest_pool',
            field=models.BooleanField(default=False, help_text='Try the pools in the order of their hourly price instead of the order of the list.'),
        ),
        migrations.AddField(
            model_name='lease',
            name='pools',
            field=models.JSONField(blank=True, default=list, help_text='Names of the pools that the lease may use: that of its request, or those of the API key. Empty: those of the environment type.'),
        ),
        migrations.AddField(
            model_name='leaseevent',
            name='pool',
            field=models.ForeignKey(blank=True, db_index=False, editable=False, help_text='Pool that was passed over.', null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='sandboxes.pool'),
        ),
        migrations.AddField(
            model_name='leaseevent',
            name='skip_reason',
            field=models.CharField(blank=True, choices=[('draining', 'is draining'), ('full', 'is full'), ('starting_limit', 'starts as many sandboxes as it may at once'), ('circuit_open', 'starts nothing after failed starts'), ('unavailable', 'provider unavailable'), ('rejected', 'provider rejected the sandbox'), ('start_failed', 'start failed'), ('not_configured', 'provider not configured'), ('no_models', 'has no way to models'), ('too_small', 'is too small for the requested resources')], editable=False, help_text='Reason for which it was passed over.', max_length=16),
        ),
        migrations.AlterField(
            model_name='lease',
            name='pool',
            field=models.ForeignKey(help_text="Pool of the lease's sandbox, or of the last one; before the first one, the first pool that is tried.", on_delete=django.db.models.deletion.PROTECT, related_name='leases', to='sandboxes.pool'),
        ),
        migrations.CreateModel(
            name='AlternativePool',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('position', models.PositiveSmallIntegerField(default=0, help_text='Lower positions are tried first.')),
                ('environment_type', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.CASCADE, related_name='alternative_pools', to='leases.environmenttype')),
                ('pool', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='sandboxes.pool')),
            ],
            options={
                'ordering': ['position', 'pk'],
                'default_permissions': (),
                'constraints': [models.UniqueConstraint(fields=('environment_type', 'pool'), name='alternative_pool_once', violation_error_message='A pool may be listed once.')],
            },
        ),
    ]

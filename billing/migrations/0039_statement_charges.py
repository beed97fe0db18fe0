"""Charges of statement lines by day and lease."""

import django.db.models.deletion
from decimal import Decimal
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0038_stored_charges_of_statements'),
    ]

    operations = [
        migrations.CreateModel(
            name='StatementCharge',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('day', models.DateField()),
                ('environment_id', models.CharField(blank=True, max_length=200)),
                ('environment_type', models.CharField(blank=True, max_length=63)),
                ('holder', models.UUIDField(blank=True, help_text='Lease id. Empty for sandboxes without a lease and for plans.', null=True)),
                ('project', models.CharField(blank=True, max_length=63)),
                ('quantity', models.DecimalField(decimal_places=9, help_text='In units of the item.', max_digits=18)),
                ('free', models.DecimalField(decimal_places=9, default=Decimal('0'), help_text='Part of the quantity within the allowance.', max_digits=18)),
                ('usd', models.DecimalField(decimal_places=9, max_digits=18, verbose_name='USD')),
                ('unpriced', models.BigIntegerField(default=0, help_text='Number of model calls without a price.')),
                ('estimated_usd', models.DecimalField(decimal_places=9, default=Decimal('0'), help_text='Estimated part of the cost.', max_digits=18, verbose_name='estimated, USD')),
                ('input_tokens', models.BigIntegerField(default=0, help_text='Includes tokens read from and written to the cache.')),
                ('cached_tokens', models.BigIntegerField(default=0)),
                ('cache_written_tokens', models.BigIntegerField(default=0)),
                ('output_tokens', models.BigIntegerField(default=0)),
                ('estimated_tokens', models.BigIntegerField(default=0, help_text='Estimated tokens, beside those that the upstreams reported.')),
                ('line', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='charges', to='billing.statementline')),
            ],
            options={
                'default_permissions': (),
            },
        ),
    ]

"""Totals of model calls by model."""

import django.db.models.deletion
import django.db.models.functions.comparison
import uuid
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0025_statementline_models'),
    ]

    operations = [
        migrations.CreateModel(
            name='ModelTotal',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('period', models.CharField(choices=[('lday', 'day of one lease'), ('day', 'day of all agents'), ('aday', 'day of one agent'), ('amonth', 'month of one agent')], max_length=8)),
                ('day', models.DateField(help_text='First day of the period.')),
                ('account', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='billing.account')),
                ('provider', models.CharField(blank=True, max_length=32)),
                ('model', models.CharField(blank=True, max_length=200)),
                ('agent_did', models.CharField(blank=True, help_text='Empty: all agents, or none.', max_length=255, verbose_name='agent')),
                ('environment_id', models.CharField(blank=True, help_text='Only of the day of one lease.', max_length=200)),
                ('holder', models.UUIDField(blank=True, help_text='Lease id, only of the day of one lease.', null=True)),
                ('records', models.PositiveBigIntegerField(help_text='Number of usage records in the total.')),
                ('calls', models.BigIntegerField()),
                ('unpriced', models.BigIntegerField(help_text='Number of model calls with unknown cost.')),
                ('usd', models.BigIntegerField(help_text='In billionths.', verbose_name='USD')),
                ('estimated_usd', models.BigIntegerField(help_text='Estimated part of the cost, in billionths.', verbose_name='estimated, USD')),
                ('input_tokens', models.BigIntegerField(help_text='Includes tokens read from and written to the cache.')),
                ('cached_tokens', models.BigIntegerField(help_text='Part of the input that was read from the cache.')),
                ('cache_written_tokens', models.BigIntegerField(help_text='Part of the input that was written to the cache.')),
                ('output_tokens', models.BigIntegerField()),
            ],
            options={
                'default_permissions': (),
                'indexes': [
                    models.Index(fields=['agent_did', 'period', 'day'], name='modeltotal_agent'),
                    models.Index(condition=models.Q(('period', 'lday')), fields=['holder', 'day'], name='modeltotal_holder'),
                    models.Index(condition=models.Q(('period', 'lday')), fields=['environment_id'], name='modeltotal_environment'),
                ],
                'constraints': [
                    models.UniqueConstraint(models.F('period'), models.F('day'), models.F('account'), models.F('provider'), models.F('model'), models.F('agent_did'), models.F('environment_id'), django.db.models.functions.comparison.Coalesce('holder', models.Value(uuid.UUID('00000000-0000-0000-0000-000000000000'), models.UUIDField())), name='modeltotal_once'),
                    models.CheckConstraint(condition=models.Q(('cache_written_tokens__gte', 0), ('cached_tokens__gte', 0), ('calls__gte', 0), ('estimated_usd__gte', 0), ('estimated_usd__lte', models.F('usd')), ('input_tokens__gte', 0), ('output_tokens__gte', 0), ('records__gt', 0), ('unpriced__gte', 0), ('usd__gte', 0)), name='modeltotal_positive'),
                ],
            },
        ),
    ]

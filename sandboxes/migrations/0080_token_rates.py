"""Prices of tokens are rows by model and kind, and a call refers to the rows that its price was calculated from."""

from decimal import Decimal

import django.core.validators
import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('sandboxes', '0079_model_call_usage'),
    ]

    operations = [
        migrations.CreateModel(
            name='TokenRate',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('pattern', models.CharField(help_text='Model name or pattern: "gpt-4o-mini", "claude-*", "*".', max_length=200)),
                ('is_pattern', models.GeneratedField(db_persist=True, expression=models.Case(models.When(models.Q(('pattern__contains', '*'), ('pattern__contains', '?'), ('pattern__contains', '['), _connector='OR'), then=models.Value(True)), default=models.Value(False)), output_field=models.BooleanField())),
                ('kind', models.CharField(choices=[('input', 'input'), ('cache_read', 'cached input'), ('cache_write_5m', 'cache write, 5 minutes'), ('cache_write_1h', 'cache write, 1 hour'), ('audio_input', 'audio input'), ('image_input', 'image input'), ('output', 'output'), ('reasoning', 'reasoning'), ('audio_output', 'audio output'), ('image_output', 'image output'), ('web_search', 'web search')], max_length=16)),
                ('tokens_from', models.PositiveBigIntegerField(default=0, help_text='Applies to calls with at least as many input tokens of all kinds. 0: to all calls.')),
                ('tier', models.CharField(blank=True, default='', help_text='Service tier, such as "priority" or "flex". Empty: all tiers without a rate of their own.', max_length=32)),
                ('usd_per_million', models.DecimalField(decimal_places=9, help_text='USD per million tokens, or per million web searches.', max_digits=15, validators=[django.core.validators.MinValueValidator(Decimal('0'))], verbose_name='USD per million')),
                ('valid_from', models.DateTimeField(help_text='Start of validity, by the start time of the call.')),
                ('source', models.CharField(blank=True, help_text='Page or file that states the price.', max_length=300)),
                ('note', models.CharField(blank=True, max_length=300)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
            ],
            options={
                'verbose_name': 'model rate',
                'ordering': ['pattern', 'kind', 'tier', 'tokens_from', '-valid_from'],
                'default_permissions': ('add', 'change', 'view'),
                'constraints': [
                    models.UniqueConstraint(fields=('pattern', 'kind', 'tokens_from', 'tier', 'valid_from'), name='tokenrate_once'),
                    models.CheckConstraint(condition=models.Q(('usd_per_million__gte', 0)), name='tokenrate_positive', violation_error_message='A rate may not be negative.'),
                ],
                'indexes': [models.Index(condition=models.Q(('is_pattern', True)), fields=['valid_from'], name='tokenrate_patterns')],
            },
        ),
        migrations.AddField(
            model_name='llmcall',
            name='rate_ids',
            field=models.JSONField(blank=True, help_text='Ids of the model rates that the price was calculated from.', null=True),
        ),
    ]

"""Tokens written to the cache, of usage records."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0023_budget_estimates'),
    ]

    operations = [
        migrations.AddField(
            model_name='usagerecord',
            name='cache_written_tokens',
            field=models.PositiveBigIntegerField(db_default=0, default=0, help_text='Part of the input that was written to the cache.'),
        ),
    ]

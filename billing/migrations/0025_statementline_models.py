"""Model and tokens of lines of statements."""

import django.db.models.functions.comparison
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0024_cache_written_tokens'),
    ]

    reasons = {"check": "A statement has few lines, written when a month is closed, and each old line stays unique."}

    operations = [
        migrations.AlterModelOptions(
            name='statementline',
            options={'default_permissions': ('view',), 'ordering': ['-for_month', 'agent_did', 'provider', 'item', 'model', 'rate_id']},
        ),
        migrations.RemoveConstraint(
            model_name='statementline',
            name='statement_line_once',
        ),
        migrations.AddField(
            model_name='statementline',
            name='cache_written_tokens',
            field=models.BigIntegerField(db_default=0, default=0),
        ),
        migrations.AddField(
            model_name='statementline',
            name='cached_tokens',
            field=models.BigIntegerField(db_default=0, default=0),
        ),
        migrations.AddField(
            model_name='statementline',
            name='input_tokens',
            field=models.BigIntegerField(db_default=0, default=0, help_text='Includes tokens read from and written to the cache.'),
        ),
        migrations.AddField(
            model_name='statementline',
            name='model',
            field=models.CharField(blank=True, db_default='', default='', help_text='Of model calls. Empty: a line of all models, as on statements closed before lines had a model.', max_length=200),
        ),
        migrations.AddField(
            model_name='statementline',
            name='output_tokens',
            field=models.BigIntegerField(db_default=0, default=0),
        ),
        migrations.AddConstraint(
            model_name='statementline',
            constraint=models.UniqueConstraint(models.F('statement'), models.F('for_month'), models.F('agent_did'), models.F('provider'), models.F('item'), models.F('model'), django.db.models.functions.comparison.Coalesce('rate', models.Value(0), output_field=models.BigIntegerField()), name='statement_line_once'),
        ),
    ]

"""Estimated part of the amount, and number of model calls without a price, of lines of statements."""

from decimal import Decimal
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0021_statement_estimates'),
    ]

    operations = [
        migrations.AddField(
            model_name='statementline',
            name='estimated_usd',
            field=models.DecimalField(db_default=Decimal('0'), decimal_places=2, default=Decimal('0'), help_text='Estimated part of the amount.', max_digits=15, verbose_name='estimated, USD'),
        ),
        migrations.AddField(
            model_name='statementline',
            name='unpriced',
            field=models.BigIntegerField(db_default=0, default=0, help_text='Number of model calls without a price.'),
        ),
    ]

"""Estimated part of the amount, and number of model calls without a price, of usage records."""

from decimal import Decimal
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0018_model_call_budgets'),
    ]

    operations = [
        migrations.AddField(
            model_name='usagerecord',
            name='estimated',
            field=models.PositiveBigIntegerField(db_default=0, default=0, help_text='Number of model calls with an estimated cost.'),
        ),
        migrations.AddField(
            model_name='usagerecord',
            name='estimated_usd',
            field=models.DecimalField(db_default=Decimal('0'), decimal_places=9, default=Decimal('0'), help_text='Estimated part of the cost.', max_digits=18, verbose_name='estimated, USD'),
        ),
    ]

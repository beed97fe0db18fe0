"""Estimated part of the amount, and number of model calls without a price, of budgets."""

from decimal import Decimal
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0022_statementline_estimates'),
    ]

    operations = [
        migrations.AddField(
            model_name='budget',
            name='estimated_usd',
            field=models.DecimalField(db_default=Decimal('0'), decimal_places=9, default=Decimal('0'), editable=False, help_text='Estimated part of the amount spent.', max_digits=18),
        ),
        migrations.AddField(
            model_name='budget',
            name='unpriced',
            field=models.PositiveBigIntegerField(db_default=0, default=0, editable=False, help_text='Number of model calls without a price, which the amount spent does not include.'),
        ),
    ]

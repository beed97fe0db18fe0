"""Estimated part of the amount, and number of model calls without a price, of statements."""

from decimal import Decimal
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0020_costrecord_estimates'),
    ]

    operations = [
        migrations.AddField(
            model_name='statement',
            name='estimated_usd',
            field=models.DecimalField(db_default=Decimal('0'), decimal_places=2, default=Decimal('0'), help_text="Estimated part of the month's usage.", max_digits=15, verbose_name='estimated, USD'),
        ),
        migrations.AddField(
            model_name='statement',
            name='unpriced',
            field=models.BigIntegerField(db_default=0, default=0, help_text="Number of the month's model calls without a price."),
        ),
    ]

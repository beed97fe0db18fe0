"""Estimated part of the amount, and number of model calls without a price, of cost records and their totals."""

from decimal import Decimal
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0019_usagerecord_estimates'),
    ]

    operations = [
        migrations.AddField(
            model_name='costrecord',
            name='estimated_usd',
            field=models.DecimalField(db_default=Decimal('0'), decimal_places=9, default=Decimal('0'), help_text='Estimated part of the cost.', max_digits=18, verbose_name='estimated, USD'),
        ),
        migrations.AddField(
            model_name='costrecord',
            name='unpriced',
            field=models.PositiveBigIntegerField(db_default=0, default=0, help_text='Number of model calls with unknown cost.'),
        ),
        migrations.AddField(
            model_name='periodtotal',
            name='estimated_usd',
            field=models.BigIntegerField(db_default=0, default=0, help_text='Estimated part of the cost, in billionths.', verbose_name='estimated, USD'),
        ),
        migrations.AddField(
            model_name='periodtotal',
            name='unpriced',
            field=models.BigIntegerField(db_default=0, default=0, help_text='Number of model calls with unknown cost.'),
        ),
    ]

"""Budgets keep the parts of their spending that admit a model call."""

from decimal import Decimal
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0017_period_totals'),
    ]

    operations = [
        migrations.AddField(
            model_name='budget',
            name='calls_before',
            field=models.DecimalField(db_default=Decimal('0'), decimal_places=9, default=Decimal('0'), editable=False, help_text='Cost of the model calls of the period before the day `calls_day`.', max_digits=18),
        ),
        migrations.AddField(
            model_name='budget',
            name='calls_day',
            field=models.DateField(blank=True, editable=False, null=True),
        ),
        migrations.AddField(
            model_name='budget',
            name='calls_spent',
            field=models.DecimalField(db_default=Decimal('0'), decimal_places=9, default=Decimal('0'), editable=False, help_text='Part of the amount spent that is model calls.', max_digits=18),
        ),
        migrations.AddField(
            model_name='budget',
            name='reserved',
            field=models.DecimalField(db_default=Decimal('0'), decimal_places=9, default=Decimal('0'), editable=False, help_text='Reservation of the running sandboxes at the last update.', max_digits=18),
        ),
    ]

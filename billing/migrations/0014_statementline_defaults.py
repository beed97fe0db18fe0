"""Database defaults of statement lines: versions before the columns insert rows without them."""

from decimal import Decimal
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("billing", "0013_statement_month_check")]

    operations = [
        migrations.AlterField(
            model_name='statementline',
            name='free',
            field=models.DecimalField(db_default=Decimal('0'), decimal_places=9, default=Decimal('0'), help_text='Part of the quantity within the allowance.', max_digits=18),
        ),
    ]

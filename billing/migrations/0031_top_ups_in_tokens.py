"""Top-ups of as many digits as the amounts of budgets."""

from decimal import Decimal

from django.core.validators import MinValueValidator
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [("billing", "0030_budgets_in_tokens")]
    reasons = {"type": "A few rows, and numbers of more digits."}

    operations = [
        migrations.AlterField(
            model_name="budgettopup",
            name="amount",
            field=models.DecimalField(decimal_places=6, editable=False, max_digits=18, validators=[MinValueValidator(Decimal("0.000001"))]),
        ),
    ]

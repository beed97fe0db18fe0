"""Top-ups of budgets."""

import django.core.validators
import django.db.models.deletion
import uuid
from decimal import Decimal
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0028_carry_warn_percent'),
    ]

    operations = [
        migrations.CreateModel(
            name='BudgetTopUp',
            fields=[
                ('id', models.UUIDField(default=uuid.uuid4, editable=False, help_text='Also identifies a repeated request.', primary_key=True, serialize=False)),
                ('period_began', models.DateTimeField(editable=False, help_text='Start of the period that the amount is added to.')),
                ('amount', models.DecimalField(decimal_places=6, editable=False, max_digits=15, validators=[django.core.validators.MinValueValidator(Decimal('0.000001'))])),
                ('note', models.CharField(blank=True, editable=False, max_length=300)),
                ('actor', models.CharField(editable=False, max_length=200)),
                ('created_at', models.DateTimeField(editable=False)),
            ],
            options={
                'verbose_name': 'top-up',
                'ordering': ['-created_at', '-pk'],
                'default_permissions': (),
            },
        ),
        migrations.AddField(
            model_name='budgettopup',
            name='budget',
            field=models.ForeignKey(editable=False, on_delete=django.db.models.deletion.CASCADE, related_name='top_ups', to='billing.budget'),
        ),
        migrations.AddConstraint(
            model_name='budgettopup',
            constraint=models.CheckConstraint(condition=models.Q(('amount__gt', 0)), name='topup_positive'),
        ),
    ]

"""Budgets by model, in weeks, in a time zone, with several warnings and top-ups."""

import billing.models.budgets
from decimal import Decimal
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0026_modeltotal'),
    ]
    reasons = {
        "check": "A few rows, and wider than the conditions before, or of columns that no row has yet.",
        "index": "A few rows.",
    }

    operations = [
        migrations.RemoveConstraint(model_name='budget', name='budget_known'),
        migrations.RemoveConstraint(model_name='budget', name='budget_warns_in_time'),
        migrations.AlterField(
            model_name='budget',
            name='warn_percent',
            field=models.PositiveSmallIntegerField(db_default=80, default=80, help_text='Send a warning at this percentage.', validators=[MinValueValidator(1), MaxValueValidator(100)]),
        ),
        migrations.AddField(
            model_name='budget',
            name='model',
            field=models.CharField(blank=True, db_default='', default='', help_text='Only model calls of this model or pattern, such as claude-opus*. Empty: sandboxes and all model calls.', max_length=200, validators=[billing.models.budgets.validate_model_pattern]),
        ),
        migrations.AddField(
            model_name='budget',
            name='request_id',
            field=models.UUIDField(blank=True, editable=False, help_text='API request that created the budget, if one did.', null=True, unique=True),
        ),
        migrations.AddField(
            model_name='budget',
            name='time_zone',
            field=models.CharField(db_default='UTC', default='UTC', help_text='IANA name of the time zone in which days, weeks and months begin, such as Europe/Berlin.', max_length=63, validators=[billing.models.budgets.validate_time_zone]),
        ),
        migrations.AddField(
            model_name='budget',
            name='topped_up',
            field=models.DecimalField(db_default=Decimal('0'), decimal_places=6, default=Decimal('0'), editable=False, help_text='Sum of the top-ups of the period that began at `topped_up_for`.', max_digits=15),
        ),
        migrations.AddField(
            model_name='budget',
            name='topped_up_for',
            field=models.DateTimeField(blank=True, editable=False, null=True),
        ),
        migrations.AddField(
            model_name='budget',
            name='warn_percents',
            field=models.JSONField(blank=True, db_default=models.Value([50, 80, 100], models.JSONField()), default=billing.models.budgets.get_default_warn_percents, help_text='Send a warning at these percentages, in ascending order.', validators=[billing.models.budgets.validate_warn_percents]),
        ),
        migrations.AddField(
            model_name='budget',
            name='warned_percent',
            field=models.PositiveSmallIntegerField(blank=True, editable=False, help_text='Highest percentage of which a warning was sent in that period.', null=True),
        ),
        migrations.AlterField(
            model_name='budget',
            name='period',
            field=models.CharField(choices=[('hour', 'Hour'), ('day', 'Day'), ('week', 'Week'), ('month', 'Month'), ('ever', 'Ever')], max_length=5),
        ),
        migrations.AddConstraint(
            model_name='budget',
            constraint=models.CheckConstraint(condition=models.Q(('period__in', ['hour', 'day', 'week', 'month', 'ever']), ('scope__in', ['all', 'agent', 'key', 'environment_type', 'account', 'project']), ('unit__in', ['usd', 'hours'])), name='budget_known'),
        ),
        migrations.AddConstraint(
            model_name='budget',
            constraint=models.CheckConstraint(condition=models.Q(('model', ''), ('unit', 'usd'), _connector='OR'), name='budget_of_model_in_usd', violation_error_message='A budget for a model has an amount in USD: model calls have no sandbox-hours.'),
        ),
    ]

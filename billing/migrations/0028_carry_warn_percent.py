"""Each budget keeps its own warning. The next version drops the column, which the version before still uses."""

from django.db import migrations
from django.db.models import Q

from sandboxes.db.migration_operations import ChangeRowsInBatches

DEFAULT = [50, 80, 100]


def carry_over(budgets):
    for budget in budgets:
        budget.warn_percents = [budget.warn_percent]
        budget.warned_percent = budget.warn_percent if budget.warned_for else None
        budget.save(update_fields=['warn_percents', 'warned_percent'])


class Migration(migrations.Migration):

    atomic = False
    dependencies = [
        ('billing', '0027_budget_scopes'),
    ]

    operations = [
        ChangeRowsInBatches('budget', carry_over, Q(warn_percents=DEFAULT)),
        migrations.SeparateDatabaseAndState(state_operations=[migrations.RemoveField(model_name='budget', name='warn_percent')]),
    ]

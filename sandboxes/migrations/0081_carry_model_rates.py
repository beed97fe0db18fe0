"""Each model rate becomes rows of token rates. The next version drops its table, which the version before still uses."""

from django.db import migrations
from django.db.models import Q

from sandboxes.db.migration_operations import ChangeRowsInBatches

COLUMNS = {'input': 'input_usd', 'cache_read': 'cached_usd', 'output': 'output_usd'}


def carry_over(rates):
    token_rates = rates.model._meta.apps.get_model('sandboxes', 'TokenRate').objects.using(rates.db)
    token_rates.bulk_create(
        [
            token_rates.model(pattern=rate.pattern, kind=kind, usd_per_million=usd, valid_from=rate.valid_from)
            for rate in rates
            for kind, column in COLUMNS.items()
            if (usd := getattr(rate, column)) is not None
        ],
        ignore_conflicts=True,  # a repetition after a crash
    )


class Migration(migrations.Migration):

    atomic = False
    dependencies = [
        ('sandboxes', '0080_token_rates'),
    ]

    operations = [
        ChangeRowsInBatches('modelrate', carry_over, Q()),
        migrations.SeparateDatabaseAndState(state_operations=[migrations.DeleteModel(name='ModelRate')]),
    ]

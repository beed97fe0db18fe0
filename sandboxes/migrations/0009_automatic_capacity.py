"""Automatic capacity, for the default pool unless an operator has set another capacity."""

from django.conf import settings
from django.db import migrations, models

FORMER_DEFAULT_CAPACITY = 1000


def select_default_pool(apps, schema_editor):
    unedited = {FORMER_DEFAULT_CAPACITY, settings.MAX_SANDBOXES or FORMER_DEFAULT_CAPACITY}
    apps.get_model("sandboxes", "Pool").objects.filter(name="default", capacity__in=unedited).update(automatic_capacity=True)


class Migration(migrations.Migration):

    dependencies = [
        ('sandboxes', '0008_llm_blocked_at'),
    ]

    operations = [
        migrations.AddField(
            model_name='pool',
            name='automatic_capacity',
            field=models.BooleanField(default=False, help_text="Set the capacity to LEASEHOLD_MAX_SANDBOXES, or if that is unset by the engine's memory."),
        ),
        migrations.RunPython(select_default_pool, migrations.RunPython.noop),
    ]

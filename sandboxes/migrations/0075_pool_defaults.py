"""Database defaults of pools: versions before the columns insert rows without them."""

import sandboxes.models.resource_limits
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("sandboxes", "0074_policy_defaults")]

    operations = [
        migrations.AlterField(
            model_name='pool',
            name='allowed_gpu_types',
            field=models.JSONField(blank=True, db_default=models.Value([], models.JSONField()), default=list, help_text='GPU types that a lease may request, in capitals. Empty: every type of the provider.', validators=[sandboxes.models.resource_limits.validate_gpu_types]),
        ),
        migrations.AlterField(
            model_name='pool',
            name='allowed_images',
            field=models.JSONField(blank=True, db_default=models.Value([], models.JSONField()), default=list, help_text='Further images that a lease may request, such as those of image templates: a list of names.', validators=[sandboxes.models.resource_limits.validate_images]),
        ),
        migrations.AlterField(
            model_name='pool',
            name='allowed_sizes',
            field=models.JSONField(blank=True, db_default=models.Value([], models.JSONField()), default=list, help_text='Names of the instance types that a lease may request, which then may state no other memory or CPU. Empty: every size within the limits.', validators=[sandboxes.models.resource_limits.validate_sizes]),
        ),
        migrations.AlterField(
            model_name='pool',
            name='automatic_capacity',
            field=models.BooleanField(db_default=False, default=False, help_text="Set the capacity to LEASEHOLD_MAX_SANDBOXES, or if that is unset by the engine's memory."),
        ),
        migrations.AlterField(
            model_name='pool',
            name='capacity_origin',
            field=models.CharField(blank=True, db_default='', default='', editable=False, help_text='Origin of an automatic capacity. Empty: not derived yet.', max_length=255),
        ),
        migrations.AlterField(
            model_name='pool',
            name='restricted',
            field=models.BooleanField(db_default=False, default=False, help_text='Only API keys that list this pool, and environment types that set it, may use it.'),
        ),
        migrations.AlterField(
            model_name='pool',
            name='woken_vendor',
            field=models.PositiveBigIntegerField(db_default=0, default=0, editable=False),
        ),
    ]

"""Database defaults of API keys: versions before the columns insert rows without them."""

import leases.models
import sandboxes.models.resource_limits
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("leases", "0045_idempotentrequest_defaults")]

    operations = [
        migrations.AlterField(
            model_name='agentkey',
            name='allowed_environment_types',
            field=models.JSONField(blank=True, db_default=models.Value([], models.JSONField()), default=list, help_text='Environment types of new leases. Empty: every environment type that is not restricted.'),
        ),
        migrations.AlterField(
            model_name='agentkey',
            name='allowed_gpu_types',
            field=models.JSONField(blank=True, db_default=models.Value([], models.JSONField()), default=list, help_text='GPU types that a lease may request, in capitals. Empty: every type of the provider.', validators=[sandboxes.models.resource_limits.validate_gpu_types]),
        ),
        migrations.AlterField(
            model_name='agentkey',
            name='allowed_images',
            field=models.JSONField(blank=True, db_default=models.Value([], models.JSONField()), default=list, help_text='Images that a lease may request. Empty: every image that the pool allows.', validators=[sandboxes.models.resource_limits.validate_images]),
        ),
        migrations.AlterField(
            model_name='agentkey',
            name='allowed_pools',
            field=models.JSONField(blank=True, db_default=models.Value([], models.JSONField()), default=list, help_text='Pools of new leases. Empty: every pool that is not restricted, and the pool that the environment type sets.'),
        ),
        migrations.AlterField(
            model_name='agentkey',
            name='allowed_sizes',
            field=models.JSONField(blank=True, db_default=models.Value([], models.JSONField()), default=list, help_text='Names of the instance types that a lease may request, which then may state no other memory or CPU. Empty: every size within the limits.', validators=[sandboxes.models.resource_limits.validate_sizes]),
        ),
        migrations.AlterField(
            model_name='agentkey',
            name='first_digest',
            field=models.CharField(db_default='', default='', editable=False, help_text='Digest of the first secret, for run ids of repeated requests. Empty: `digest` is the first one.', max_length=64),
        ),
        migrations.AlterField(
            model_name='agentkey',
            name='previous_digest',
            field=models.CharField(blank=True, db_default='', default='', editable=False, max_length=64),
        ),
        migrations.AlterField(
            model_name='agentkey',
            name='scopes',
            field=models.JSONField(db_default=models.Value(['leases', 'costs'], models.JSONField()), default=leases.models.default_key_scopes, help_text='Requests that the key permits.'),
        ),
    ]

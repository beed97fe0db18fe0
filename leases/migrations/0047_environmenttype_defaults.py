"""Database defaults of environment types: versions before the columns insert rows without them."""

import django.core.validators
import sandboxes.models.resource_limits
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("leases", "0046_agentkey_defaults")]

    operations = [
        migrations.AlterField(
            model_name='environmenttype',
            name='allowed_gpu_types',
            field=models.JSONField(blank=True, db_default=models.Value([], models.JSONField()), default=list, help_text='GPU types that a lease may request, in capitals. Empty: every type of the provider.', validators=[sandboxes.models.resource_limits.validate_gpu_types]),
        ),
        migrations.AlterField(
            model_name='environmenttype',
            name='allowed_images',
            field=models.JSONField(blank=True, db_default=models.Value([], models.JSONField()), default=list, help_text='Images that a lease may request. Empty: every image that the pool allows.', validators=[sandboxes.models.resource_limits.validate_images]),
        ),
        migrations.AlterField(
            model_name='environmenttype',
            name='allowed_sizes',
            field=models.JSONField(blank=True, db_default=models.Value([], models.JSONField()), default=list, help_text='Names of the instance types that a lease may request, which then may state no other memory or CPU. Empty: every size within the limits.', validators=[sandboxes.models.resource_limits.validate_sizes]),
        ),
        migrations.AlterField(
            model_name='environmenttype',
            name='cheapest_pool',
            field=models.BooleanField(db_default=False, default=False, help_text='Try the pools in the order of their hourly price instead of the order of the list.'),
        ),
        migrations.AlterField(
            model_name='environmenttype',
            name='restricted',
            field=models.BooleanField(db_default=False, default=False, help_text='Only API keys that list this environment type may acquire leases of it.'),
        ),
        migrations.AlterField(
            model_name='environmenttype',
            name='turn_collection',
            field=models.CharField(blank=True, db_default='', default='', help_text="Collection of the agent's AT Protocol repository in which a record of each action is created: an NSID that the policy lists. Empty: no records.", max_length=317, validators=[django.core.validators.RegexValidator('\\A(?=[A-Za-z])[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(\\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)+\\.[A-Za-z][A-Za-z0-9]{0,62}\\Z', 'Not an NSID such as com.atproto.sync.subscribeRepos.')]),
        ),
    ]

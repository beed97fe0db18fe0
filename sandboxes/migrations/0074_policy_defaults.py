"""Database defaults of policies: versions before the columns insert rows without them."""

import django.core.validators
import sandboxes.egress.allow_list.domains
import sandboxes.models.policies
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("sandboxes", "0073_imagetemplate_defaults")]

    operations = [
        migrations.AlterField(
            model_name='policy',
            name='agent_denied_commands',
            field=models.JSONField(blank=True, db_default=models.Value([], models.JSONField()), default=list, help_text='Shell commands that interrupt an agent CLI: patterns such as "git push*" or "rm -rf *".', validators=[sandboxes.models.policies.check_models]),
        ),
        migrations.AlterField(
            model_name='policy',
            name='agent_tools',
            field=models.JSONField(blank=True, db_default=models.Value([], models.JSONField()), default=list, help_text='Tools that agent CLIs may use, such as "Read" and "Bash". Empty: all.', validators=[sandboxes.models.policies.check_models]),
        ),
        migrations.AlterField(
            model_name='policy',
            name='allowed_domains',
            field=models.JSONField(blank=True, db_default=models.Value([], models.JSONField()), default=list, help_text='Domains that the sandbox reaches through the proxy: "pypi.org", "*.example.org" (names below it) or "git.example.org:8443"; ports 443 and 80 unless stated. Empty: no network.', validators=[sandboxes.egress.allow_list.domains.check_allowed_domains]),
        ),
        migrations.AlterField(
            model_name='policy',
            name='max_connection_mib',
            field=models.PositiveIntegerField(db_default=1024, default=1024, help_text='Maximum bytes of one connection in both directions, MiB.', validators=[django.core.validators.MinValueValidator(1)]),
        ),
        migrations.AlterField(
            model_name='policy',
            name='max_connections',
            field=models.PositiveIntegerField(db_default=16, default=16, help_text='Maximum number of concurrent connections of one sandbox to these domains.', validators=[django.core.validators.MinValueValidator(1), django.core.validators.MaxValueValidator(64)]),
        ),
        migrations.AlterField(
            model_name='policy',
            name='max_lease_mib',
            field=models.PositiveIntegerField(db_default=10240, default=10240, help_text='Maximum bytes of all connections of one lease in both directions, MiB.', validators=[django.core.validators.MinValueValidator(1)]),
        ),
        migrations.AlterField(
            model_name='policy',
            name='mcp_tools',
            field=models.JSONField(blank=True, db_default=models.Value([], models.JSONField()), default=list, help_text='Tools of the control plane that programs in the sandbox may call: lease_status, budget, put_artifact, get_artifact, post_condition, service_token, create_record. Empty: none.', validators=[sandboxes.models.policies.check_mcp_tools]),
        ),
        migrations.AlterField(
            model_name='policy',
            name='previews',
            field=models.BooleanField(db_default=False, default=False, help_text='Preview URLs: programs that listen on a TCP port in the sandbox can be reached from outside by signed URLs.'),
        ),
        migrations.AlterField(
            model_name='policy',
            name='record_collections',
            field=models.JSONField(blank=True, db_default=models.Value([], models.JSONField()), default=list, help_text='Collections of the agent\'s AT Protocol repository in which records are created: NSIDs such as "org.example.game.action". Empty: none.', validators=[sandboxes.models.policies.check_collections]),
        ),
    ]

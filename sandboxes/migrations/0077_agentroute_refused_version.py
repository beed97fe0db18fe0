"""Version of the protocol of an agent that no gateway speaks with, for the processes that look the agent up."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('sandboxes', '0076_process_defaults'),
    ]

    operations = [
        migrations.AddField(
            model_name='agentroute',
            name='refused_version',
            field=models.IntegerField(help_text="Version of the agent's protocol, if the last connection ended because the gateway does not speak it.", null=True),
        ),
    ]

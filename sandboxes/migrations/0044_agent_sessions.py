
import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('sandboxes', '0040_allowed_images'),
    ]

    operations = [
        migrations.CreateModel(
            name='AgentRoute',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('ref', models.CharField(help_text="Provider's name of the incarnation that is connected.", max_length=255, unique=True)),
                ('number', models.PositiveBigIntegerField(help_text='Increases with each connection. Earlier connections are closed.')),
                ('address', models.CharField(blank=True, db_index=True, help_text='Internal address of the gateway. Empty: not connected.', max_length=255)),
                ('opened_at', models.DateTimeField()),
                ('seen_at', models.DateTimeField(help_text='Last time at which the gateway confirmed the connection.')),
            ],
        ),
        migrations.AddField(
            model_name='gatewaytoken',
            name='joined_at',
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name='gatewaytoken',
            name='refused_at',
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name='gatewaytoken',
            name='refused_joins',
            field=models.PositiveIntegerField(default=0, help_text='Attempts to use the token again after the join.'),
        ),
        migrations.AddField(
            model_name='gatewaytoken',
            name='session_sha256',
            field=models.CharField(blank=True, default='', editable=False, help_text='Hash of the secret that the agent chose at its join.', max_length=64),
        ),
        migrations.AddConstraint(
            model_name='gatewaytoken',
            constraint=models.UniqueConstraint(condition=models.Q(('session_sha256', ''), _negated=True), fields=('session_sha256',), name='gateway_token_session'),
        ),
        migrations.AddField(
            model_name='agentroute',
            name='sandbox',
            field=models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, related_name='agent_route', to='sandboxes.sandbox'),
        ),
    ]

import django.core.validators
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('sandboxes', '0034_adopted_reason'),
    ]

    operations = [
        migrations.AddField(
            model_name='host',
            name='start_error',
            field=models.TextField(blank=True, editable=False),
        ),
        migrations.AddField(
            model_name='host',
            name='start_failures',
            field=models.PositiveIntegerField(default=0, editable=False, help_text='Consecutive starts for which the provider was unavailable.'),
        ),
        migrations.AddField(
            model_name='host',
            name='start_pauses',
            field=models.PositiveIntegerField(default=0, editable=False, help_text='Consecutive pauses.'),
        ),
        migrations.AddField(
            model_name='host',
            name='start_probing',
            field=models.BooleanField(default=False, editable=False, help_text='One start has been let through to test the provider.'),
        ),
        migrations.AddField(
            model_name='host',
            name='starts_paused_until',
            field=models.DateTimeField(blank=True, editable=False, help_text='Starts are refused until then.', null=True),
        ),
        migrations.AddField(
            model_name='pool',
            name='max_starting',
            field=models.PositiveIntegerField(blank=True, help_text='Maximum number of sandboxes that start or wake at the same time. Empty: no limit.', null=True, validators=[django.core.validators.MinValueValidator(1)]),
        ),
        migrations.AlterField(
            model_name='transition',
            name='code',
            field=models.CharField(choices=[('requested', 'requested'), ('prewarmed', 'started ahead of demand'), ('ready', 'ready'), ('claimed', 'claimed'), ('run_started', 'run started'), ('run_ended', 'run ended'), ('idle', 'idle'), ('capacity', 'place needed'), ('budget', 'budget spent'), ('restore', 'earlier snapshot restored'), ('resumed', 'resumed'), ('suspend_failed', 'could not be suspended'), ('agent_unresponsive', 'agent does not respond'), ('restart_requested', 'restart requested'), ('agent_restarted', 'restarted'), ('restart_failed', 'could not be restarted'), ('persist_failed', 'state could not be stored'), ('persisted', 'stored'), ('nothing_unsaved', 'nothing unsaved was in it'), ('woken', 'woken'), ('lease_ended', 'lease ended'), ('operator', 'operator'), ('discarded', 'discarded by an operator'), ('start_failed', 'start failed'), ('start_stalled', 'stalled while starting'), ('state_lost', 'stored state is lost'), ('surplus', 'surplus of the pool'), ('provider_lost', 'lost by the provider'), ('host_lost', 'host lost'), ('eviction_stalled', 'process could not be destroyed'), ('cold_ttl', 'cold for too long'), ('moved', 'moved to another pool'), ('confirmed_gone', 'confirmed gone'), ('no_process', 'no process to destroy')], max_length=32),
        ),
    ]

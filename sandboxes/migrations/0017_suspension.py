"""The state suspended, and processes that keep their sandbox awake."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('sandboxes', '0016_redundant_indexes'),
    ]

    operations = [
        migrations.RemoveConstraint(
            model_name='sandbox',
            name='sandbox_state_known',
        ),
        migrations.AddField(
            model_name='process',
            name='keep_awake',
            field=models.BooleanField(default=False, help_text='The sandbox is not suspended while the process runs.'),
        ),
        migrations.AddField(
            model_name='sandbox',
            name='frozen',
            field=models.BooleanField(default=False, editable=False, help_text='Its processes may be frozen: they are resumed before the next use.'),
        ),
        migrations.AddField(
            model_name='sandbox',
            name='suspend_after',
            field=models.DurationField(blank=True, help_text='Time in waiting after which the sandbox is suspended. Empty: never.', null=True),
        ),
        migrations.AlterField(
            model_name='sandbox',
            name='state',
            field=models.CharField(choices=[('warming', 'Warming'), ('warm', 'Warm'), ('running', 'Running'), ('waiting', 'Waiting'), ('suspended', 'Suspended'), ('evicting', 'Evicting'), ('cold', 'Cold'), ('destroying', 'Destroying'), ('destroyed', 'Destroyed')], default='warming', max_length=16),
        ),
        # Django cannot alter a generated column. PostgreSQL rewrites the table; its rows are few.
        migrations.RemoveIndex(model_name='sandbox', name='sandbox_eviction_order'),
        migrations.RemoveField(model_name='sandbox', name='tier'),
        migrations.AddField(
            model_name='sandbox',
            name='tier',
            field=models.GeneratedField(db_persist=True, expression=models.Case(models.When(state='cold', then=models.Value(0)), models.When(state='warm', then=models.Value(1)), models.When(state__in=['waiting', 'suspended'], then=models.Value(2)), default=models.Value(None)), help_text='Eviction order. Empty: never evicted.', output_field=models.SmallIntegerField(null=True)),
        ),
        migrations.AddIndex(
            model_name='sandbox',
            index=models.Index(condition=models.Q(('tier__isnull', False)), fields=['pool', 'tier', 'last_used_at'], name='sandbox_eviction_order'),
        ),
        migrations.AlterField(
            model_name='transition',
            name='code',
            field=models.CharField(choices=[('requested', 'requested'), ('prewarmed', 'started ahead of demand'), ('ready', 'ready'), ('claimed', 'claimed'), ('run_started', 'run started'), ('run_ended', 'run ended'), ('idle', 'idle'), ('capacity', 'place needed'), ('budget', 'budget spent'), ('restore', 'earlier snapshot restored'), ('resumed', 'resumed'), ('suspend_failed', 'could not be suspended'), ('persist_failed', 'state could not be stored'), ('persisted', 'stored'), ('nothing_unsaved', 'nothing unsaved was in it'), ('woken', 'woken'), ('lease_ended', 'lease ended'), ('operator', 'operator'), ('discarded', 'discarded by an operator'), ('start_failed', 'start failed'), ('start_stalled', 'stalled while starting'), ('state_lost', 'stored state is lost'), ('surplus', 'surplus of the pool'), ('provider_lost', 'lost by the provider'), ('host_lost', 'host lost'), ('eviction_stalled', 'process could not be destroyed'), ('cold_ttl', 'cold for too long'), ('confirmed_gone', 'confirmed gone'), ('no_process', 'no process to destroy')], max_length=32),
        ),
        migrations.AlterField(
            model_name='transition',
            name='to',
            field=models.CharField(choices=[('warming', 'Warming'), ('warm', 'Warm'), ('running', 'Running'), ('waiting', 'Waiting'), ('suspended', 'Suspended'), ('evicting', 'Evicting'), ('cold', 'Cold'), ('destroying', 'Destroying'), ('destroyed', 'Destroyed')], max_length=16),
        ),
        migrations.AddConstraint(
            model_name='sandbox',
            constraint=models.CheckConstraint(condition=models.Q(('state__in', ['warming', 'warm', 'running', 'waiting', 'suspended', 'evicting', 'cold', 'destroying', 'destroyed'])), name='sandbox_state_known'),
        ),
        migrations.AddConstraint(
            model_name='sandbox',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('state', 'suspended'), _negated=True), ('frozen', True), _connector='OR'), name='sandbox_suspended_is_frozen'),
        ),
    ]

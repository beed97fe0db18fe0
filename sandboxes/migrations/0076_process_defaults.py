"""Database defaults of processes: versions before the columns insert rows without them."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("sandboxes", "0075_pool_defaults")]

    operations = [
        migrations.AlterField(
            model_name='process',
            name='has_stdin',
            field=models.BooleanField(db_default=False, default=False),
        ),
        migrations.AlterField(
            model_name='process',
            name='is_terminal',
            field=models.BooleanField(db_default=False, default=False, help_text='The program has a terminal, to which clients connect.'),
        ),
        migrations.AlterField(
            model_name='process',
            name='keep_awake',
            field=models.BooleanField(db_default=False, default=False, help_text='The sandbox is not suspended while the process runs.'),
        ),
        migrations.AlterField(
            model_name='process',
            name='max_restarts',
            field=models.PositiveIntegerField(db_default=5, default=5, help_text='Maximum number of restarts in the window.'),
        ),
        migrations.AlterField(
            model_name='process',
            name='restart',
            field=models.CharField(choices=[('never', 'Never'), ('on_failure', 'On Failure'), ('always', 'Always')], db_default='never', default='never', max_length=16, verbose_name='restart policy'),
        ),
        migrations.AlterField(
            model_name='process',
            name='restart_after_wake',
            field=models.BooleanField(db_default=False, default=False, help_text='Started again after a wake of its sandbox.'),
        ),
        migrations.AlterField(
            model_name='process',
            name='restart_window_seconds',
            field=models.PositiveIntegerField(db_default=600, default=600, verbose_name='restart window, seconds'),
        ),
        migrations.AlterField(
            model_name='process',
            name='restarts',
            field=models.PositiveIntegerField(db_default=0, default=0, help_text='Restarts so far, after exits and wakes.'),
        ),
        migrations.AlterField(
            model_name='process',
            name='start_confirmed',
            field=models.BooleanField(db_default=True, default=True, help_text='The provider has confirmed the last restart.'),
        ),
        migrations.AlterField(
            model_name='process',
            name='wake_pending',
            field=models.BooleanField(db_default=False, default=False, help_text='To be restarted by the next wake.'),
        ),
        migrations.AlterField(
            model_name='process',
            name='window_restarts',
            field=models.PositiveIntegerField(db_default=0, default=0, help_text='Restarts in the current window.'),
        ),
    ]

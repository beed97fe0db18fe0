"""Database defaults of sandboxes: versions before the columns insert rows without them."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("sandboxes", "0063_webhook_failures")]

    operations = [
        migrations.AlterField(
            model_name='sandbox',
            name='final_persist',
            field=models.CharField(choices=[('all', 'All'), ('data', '/data only'), ('none', 'None')], db_default='all', default='all', editable=False, help_text='Unsaved state that is stored before the sandbox is destroyed.', max_length=8),
        ),
        migrations.AlterField(
            model_name='sandbox',
            name='frozen',
            field=models.BooleanField(db_default=False, default=False, editable=False, help_text='Its processes may be frozen: they are resumed before the next use.'),
        ),
        migrations.AlterField(
            model_name='sandbox',
            name='gpu_type',
            field=models.CharField(blank=True, db_default='', default='', help_text='Empty: any type, or no GPU.', max_length=32),
        ),
        migrations.AlterField(
            model_name='sandbox',
            name='gpus',
            field=models.PositiveSmallIntegerField(db_default=0, default=0),
        ),
        migrations.AlterField(
            model_name='sandbox',
            name='measure_seconds',
            field=models.FloatField(db_default=0, default=0, editable=False, help_text='Duration of the last measurement.'),
        ),
        migrations.AlterField(
            model_name='sandbox',
            name='network',
            field=models.CharField(choices=[('sealed', 'sealed'), ('gateway', 'gateway'), ('open', 'open')], db_default='open', default='open', help_text='Destinations that the current incarnation reaches.', max_length=16),
        ),
        migrations.AlterField(
            model_name='sandbox',
            name='persist_failures',
            field=models.PositiveIntegerField(db_default=0, default=0, help_text='Failed attempts in a row to store the state. A run resets the count.'),
        ),
        migrations.AlterField(
            model_name='sandbox',
            name='persisted',
            field=models.BooleanField(db_default=False, default=False, editable=False, help_text='The state of this incarnation is stored, and no run has begun since.'),
        ),
        migrations.AlterField(
            model_name='sandbox',
            name='pod_end_cause',
            field=models.CharField(blank=True, db_default='', default='', editable=False, help_text="FailureCause of this Pod's end, as a watch has seen it. Empty: not known.", max_length=32),
        ),
        migrations.AlterField(
            model_name='sandbox',
            name='pod_end_message',
            field=models.TextField(blank=True, db_default='', default='', editable=False),
        ),
        migrations.AlterField(
            model_name='sandbox',
            name='pod_uid',
            field=models.CharField(blank=True, db_default='', default='', editable=False, help_text="Identity of the current incarnation's Pod: another Pod of the same name is not this sandbox.", max_length=64),
        ),
        migrations.AlterField(
            model_name='sandbox',
            name='sized',
            field=models.BooleanField(db_default=False, default=False, editable=False, help_text='Memory, CPU or disk was requested for this sandbox.'),
        ),
        migrations.AlterField(
            model_name='sandbox',
            name='unreadable_tries',
            field=models.PositiveIntegerField(db_default=0, default=0, editable=False, help_text='Failed attempts in a row to read the state, with the sandbox as the cause.'),
        ),
        migrations.AlterField(
            model_name='sandbox',
            name='woken_vendor',
            field=models.PositiveIntegerField(db_default=0, default=0),
        ),
    ]

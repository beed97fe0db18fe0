"""Indexes for the sweep that deletes expired rows, and for open turns."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('leases', '0040_queued_agent_runs'),
        ('sandboxes', '0055_retention_indexes'),
    ]

    operations = [
        migrations.AddIndex(
            model_name='environment',
            index=models.Index(condition=models.Q(('ended_at__isnull', False)), fields=['ended_at'], name='environment_ended'),
        ),
        migrations.AddIndex(
            model_name='lease',
            index=models.Index(condition=models.Q(('status', 'destroyed')), fields=['ended_at'], name='lease_destroyed'),
        ),
        migrations.AddIndex(
            model_name='lease',
            index=models.Index(condition=models.Q(('forked_from__isnull', False)), fields=['forked_from'], name='lease_fork'),
        ),
        migrations.AddIndex(
            model_name='queuedrun',
            index=models.Index(condition=models.Q(('ended_at__isnull', False)), fields=['ended_at'], name='queuedrun_ended'),
        ),
        migrations.AddIndex(
            model_name='turn',
            index=models.Index(condition=models.Q(('ended_at__isnull', True)), fields=['deadline_at'], name='turn_open'),
        ),
    ]

"""Mark the agent runs of queued runs: the limits of runs in progress count each once."""

import uuid

from django.db import migrations, models


def mark_open(apps, schema_editor):
    agent_runs = apps.get_model("leases", "AgentRun")
    started = apps.get_model("leases", "QueuedRun").objects.filter(state="started")
    for pk, attempt in started.values_list("pk", "attempt"):
        agent_runs.objects.filter(pk=uuid.uuid5(pk, str(attempt)), ended_at__isnull=True).update(queued=True)


class Migration(migrations.Migration):

    dependencies = [
        ('leases', '0039_lease_llm_enabled'),
    ]

    operations = [
        migrations.AddField(
            model_name='agentrun',
            name='queued',
            field=models.BooleanField(db_default=False, default=False, editable=False, help_text='Started by the queue, which counts the run as a queued run.'),
        ),
        migrations.RunPython(mark_open, migrations.RunPython.noop),
    ]

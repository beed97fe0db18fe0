import re

import django.db.models.deletion
from django.db import migrations, models

FORK_RE = re.compile(r"^from lease ([0-9a-f-]{36}),")


def copy_from_events(apps, schema_editor):
    """Fill both columns from the events of leases that ended, or were forked, before the columns existed."""
    Lease, LeaseEvent = apps.get_model("leases", "Lease"), apps.get_model("leases", "LeaseEvent")
    for event in LeaseEvent.objects.filter(kind="ended", reason__contains=": ").order_by("pk").iterator():
        Lease.objects.filter(pk=event.lease_id).update(end_detail=event.reason.partition(": ")[2])
    for event in LeaseEvent.objects.filter(kind="forked", reason__startswith="from lease ").order_by("pk").iterator():
        if origin := FORK_RE.match(event.reason):
            Lease.objects.filter(pk=event.lease_id).update(forked_from=origin[1])


class Migration(migrations.Migration):

    dependencies = [
        ('leases', '0015_budget_roles'),
    ]

    operations = [
        migrations.AddField(
            model_name='lease',
            name='end_detail',
            field=models.CharField(blank=True, help_text='More about end_reason: a budget, an error message.', max_length=500),
        ),
        migrations.AddField(
            model_name='lease',
            name='forked_from',
            field=models.ForeignKey(blank=True, db_index=False, help_text='The lease whose workspace it started with.', null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='leases.lease'),
        ),
        migrations.RunPython(copy_from_events, migrations.RunPython.noop, elidable=True),
    ]

from django.db import migrations

BATCH = 500


def open_tabs(apps, schema_editor):
    """What billing knows of leases, for those that were granted before it knew. By which key is not known."""
    Tab = apps.get_model("billing", "Tab")
    leases = apps.get_model("leases", "Lease").objects.order_by("pk")
    rows = leases.values_list("pk", "agent_did", "environment_type_id", "leased_at", "ended_at")
    tabs = [
        Tab(holder=pk, agent_did=agent, environment_type=kind, opened_at=opened, closed_at=ended)
        for pk, agent, kind, opened, ended in rows.iterator(chunk_size=BATCH)
    ]
    Tab.objects.bulk_create(tabs, batch_size=BATCH, ignore_conflicts=True)


class Migration(migrations.Migration):

    dependencies = [
        ("leases", "0012_rate_roles"),
        ("billing", "0003_budgets"),
    ]

    operations = [migrations.RunPython(open_tabs, migrations.RunPython.noop)]

"""The environment types that ship with the project."""

from django.db import migrations

CONDITIONS = {
    "rpg": ["agent.death", "game.finished", "campaign.ended"],
    "catan": ["game.finished"],
    "coding": ["task.complete", "pr.merged"],
    "run": [],  # one-shot runs
}


def create(apps, schema_editor):
    types = apps.get_model("leases", "EnvironmentType").objects
    for name, conditions in CONDITIONS.items():
        types.get_or_create(name=name, defaults={"expiry_conditions": conditions})


class Migration(migrations.Migration):
    dependencies = [("leases", "0001_initial")]
    operations = [migrations.RunPython(create, migrations.RunPython.noop)]

from django.db import migrations

CONDITIONS = {
    "rpg": ["agent.death", "game.finished", "campaign.ended"],
    "catan": ["game.finished"],
    "coding": ["task.complete", "pr.merged"],
}


def make(apps, schema_editor):
    kinds = apps.get_model("leases", "EnvironmentType").objects
    for name, conditions in CONDITIONS.items():
        kinds.get_or_create(name=name, defaults={"expiry_conditions": conditions})


class Migration(migrations.Migration):
    dependencies = [("leases", "0001_initial")]
    operations = [migrations.RunPython(make, migrations.RunPython.noop)]

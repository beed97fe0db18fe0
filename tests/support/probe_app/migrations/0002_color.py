from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("probe_app", "0001_initial")]
    operations = [migrations.AddField("box", "color", models.TextField(null=True))]

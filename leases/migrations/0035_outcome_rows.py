from django.db import migrations


class Migration(migrations.Migration):

    dependencies = [
        ('leases', '0034_existing_participants'),
    ]

    operations = [
        migrations.RemoveField(
            model_name='environment',
            name='outcome_text',
        ),
    ]

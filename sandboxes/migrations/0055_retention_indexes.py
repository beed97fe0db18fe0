"""Indexes for the sweep that deletes expired rows."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('sandboxes', '0054_snapshot_metered_until'),
    ]

    operations = [
        migrations.AddIndex(
            model_name='dataevent',
            index=models.Index(fields=['-at', '-id'], name='dataevent_newest'),
        ),
        migrations.AddIndex(
            model_name='snapshot',
            index=models.Index(condition=models.Q(('forgotten_at__isnull', False)), fields=['forgotten_at'], name='snapshot_forgotten'),
        ),
    ]

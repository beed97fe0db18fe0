from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('leases', '0027_placement'),
    ]

    operations = [
        migrations.AddField(
            model_name='lease',
            name='memory_mib',
            field=models.PositiveIntegerField(blank=True, help_text='Memory of its sandboxes, MiB, as requested. Empty: that of the pool.', null=True),
        ),
        migrations.AddField(
            model_name='lease',
            name='millicpus',
            field=models.PositiveIntegerField(blank=True, help_text='CPU of its sandboxes, millicores, as requested. Empty: that of the pool.', null=True),
        ),
    ]

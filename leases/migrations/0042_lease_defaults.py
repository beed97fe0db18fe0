"""Database defaults of leases: versions before the columns insert rows without them."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("leases", "0041_retention_indexes")]

    operations = [
        migrations.AlterField(
            model_name='lease',
            name='gpu_type',
            field=models.CharField(blank=True, db_default='', default='', help_text='Type of its GPUs, as requested. Empty: any.', max_length=32),
        ),
        migrations.AlterField(
            model_name='lease',
            name='gpus',
            field=models.PositiveSmallIntegerField(db_default=0, default=0, help_text='Number of GPUs of its sandboxes, as requested.'),
        ),
        migrations.AlterField(
            model_name='lease',
            name='image',
            field=models.CharField(blank=True, db_default='', default='', help_text='Image of its sandboxes, as requested. Empty: that of the pool.', max_length=255),
        ),
        migrations.AlterField(
            model_name='lease',
            name='pools',
            field=models.JSONField(blank=True, db_default=models.Value([], models.JSONField()), default=list, help_text='Names of the pools that the lease may use: that of its request, or those of the API key. Empty: those of the environment type.'),
        ),
        migrations.AlterField(
            model_name='lease',
            name='size',
            field=models.CharField(blank=True, db_default='', default='', help_text='Instance type whose memory and CPU were requested. Empty: none was named.', max_length=32),
        ),
    ]

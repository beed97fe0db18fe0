import django.core.validators
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('sandboxes', '0035_placement'),
    ]

    operations = [
        migrations.AddField(
            model_name='pool',
            name='max_memory_mib',
            field=models.PositiveIntegerField(blank=True, help_text='Maximum memory that a lease may request, MiB. Empty: the memory above.', null=True, validators=[django.core.validators.MinValueValidator(16)]),
        ),
        migrations.AddField(
            model_name='pool',
            name='max_millicpus',
            field=models.PositiveIntegerField(blank=True, help_text='Maximum CPU that a lease may request, millicores. Empty: the CPU above.', null=True, validators=[django.core.validators.MinValueValidator(50)]),
        ),
    ]

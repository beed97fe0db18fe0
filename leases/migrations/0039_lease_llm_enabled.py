from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('leases', '0038_idempotentrequest_run_id'),
    ]

    operations = [
        migrations.AddField(
            model_name='lease',
            name='llm_enabled',
            field=models.BooleanField(db_default=True, default=True, editable=False, help_text='Model calls of its sandboxes are answered, within policy and limits.', verbose_name='model proxy'),
        ),
    ]

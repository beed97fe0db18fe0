from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('sandboxes', '0051_unreadable_tries'),
    ]

    operations = [
        migrations.AddField(
            model_name='sandbox',
            name='llm_enabled',
            field=models.BooleanField(db_default=True, default=True, editable=False, help_text='Its model calls are answered, within policy and limits.'),
        ),
    ]

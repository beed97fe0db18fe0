"""Model calls keep the reported usage, the requested model, an estimate and the server that forwards them."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('sandboxes', '0078_host_start_error_code'),
    ]

    operations = [
        migrations.AddField(
            model_name='llmcall',
            name='metered_cost',
            field=models.DecimalField(blank=True, decimal_places=9, editable=False, help_text='Part of the cost that is included in a usage record.', max_digits=18, null=True),
        ),
        migrations.AddField(
            model_name='llmcall',
            name='requested_model',
            field=models.CharField(blank=True, db_default='', default='', help_text='Name in the request.', max_length=200),
        ),
        migrations.AddField(
            model_name='llmcall',
            name='reserved',
            field=models.DecimalField(blank=True, decimal_places=9, help_text='Estimated USD of the call, reserved until the call is settled. Empty for models without a rate.', max_digits=18, null=True),
        ),
        migrations.AddField(
            model_name='llmcall',
            name='server',
            field=models.CharField(blank=True, db_default='', default='', help_text='Egress server process that forwards the call.', max_length=100),
        ),
        migrations.AddField(
            model_name='llmcall',
            name='service_tier',
            field=models.CharField(blank=True, db_default='', default='', help_text='Tier of the upstream.', max_length=32),
        ),
        migrations.AddField(
            model_name='llmcall',
            name='token_counts',
            field=models.JSONField(blank=True, help_text='Tokens by kind, derived from the reported usage.', null=True),
        ),
        migrations.AddField(
            model_name='llmcall',
            name='usage',
            field=models.JSONField(blank=True, help_text='Usage as the upstream reported it.', null=True),
        ),
        migrations.AlterField(
            model_name='llmcall',
            name='priced',
            field=models.CharField(blank=True, choices=[('', 'unpriced'), ('upstream', 'by the upstream'), ('record', "by the upstream's records"), ('rate', 'by rate'), ('free', 'free of charge'), ('estimate', 'estimated')], default='', max_length=8),
        ),
    ]

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('sandboxes', '0042_template_builds'),
    ]

    operations = [
        migrations.AddField(
            model_name='pool',
            name='woken_vendor',
            field=models.PositiveBigIntegerField(default=0, editable=False),
        ),
        migrations.AddField(
            model_name='sandbox',
            name='woken_vendor',
            field=models.PositiveIntegerField(default=0),
        ),
        migrations.AddField(
            model_name='snapshot',
            name='vendor_digest',
            field=models.CharField(blank=True, editable=False, help_text="SHA-256 of the listing of the files in the vendor's snapshot.", max_length=64),
        ),
        migrations.AddField(
            model_name='snapshot',
            name='vendor_expires_at',
            field=models.DateTimeField(blank=True, help_text='Time at which the vendor deletes its snapshot.', null=True),
        ),
        migrations.AddField(
            model_name='snapshot',
            name='vendor_host',
            field=models.ForeignKey(blank=True, help_text="Account at the vendor that has the vendor's snapshot.", null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='sandboxes.host'),
        ),
        migrations.AddField(
            model_name='snapshot',
            name='vendor_snapshot',
            field=models.CharField(blank=True, help_text="Id of the vendor's own snapshot of the same files, from which a wake is faster.", max_length=100),
        ),
        migrations.AlterField(
            model_name='sandbox',
            name='source',
            field=models.CharField(blank=True, choices=[('local', 'local'), ('cloud', 'cloud'), ('vendor', 'vendor'), ('fresh', 'fresh')], help_text="Source of the current incarnation's state.", max_length=8),
        ),
        migrations.AddIndex(
            model_name='snapshot',
            index=models.Index(condition=models.Q(('vendor_snapshot', ''), _negated=True), fields=['at'], name='snapshot_at_vendor'),
        ),
    ]

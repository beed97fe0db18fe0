"""Built-in protected paths are code. Rows keep the patterns that operators added."""

import leases.coding.models
from django.db import migrations, models

FORMER_DEFAULTS = {
    ".github/*", ".gitea/*", ".forgejo/*", ".gitlab/*", ".gitlab-ci.yml", ".circleci/*", ".woodpecker*", "Jenkinsfile",
}


def remove_former_defaults(apps, schema_editor):
    repositories = apps.get_model("leases", "Repository")
    for row in repositories.objects.only("pk", "protected_paths"):
        added = [pattern for pattern in row.protected_paths if pattern not in FORMER_DEFAULTS]
        if added != row.protected_paths:
            repositories.objects.filter(pk=row.pk).update(protected_paths=added)


class Migration(migrations.Migration):

    dependencies = [
        ('leases', '0035_outcome_rows'),
    ]

    operations = [
        migrations.AddField(
            model_name='repository',
            name='allowed_paths',
            field=models.JSONField(blank=True, default=list, help_text='Patterns of built-in protected paths that an agent may change, such as ".github/workflows/docs.yml".', validators=[leases.coding.models.check_path_patterns]),
        ),
        migrations.RunPython(remove_former_defaults, migrations.RunPython.noop),
        migrations.AlterField(
            model_name='repository',
            name='protected_paths',
            field=models.JSONField(blank=True, default=list, help_text='Patterns of paths that an agent may not change, beside the built-in ones, such as "deploy/*".', validators=[leases.coding.models.check_path_patterns]),
        ),
    ]

from django.db import migrations

from sandboxes.db.roles import gives

VIEWER = [
    "view_account", "view_costrecord", "view_credit", "view_membership", "view_rate", "view_statement", "view_statementline",
    "view_usagerecord",
]
ROLES = {
    "Viewer": VIEWER,
    "Operator": VIEWER,
    "Administrator": [
        *VIEWER, "add_rate", "change_rate", "add_account", "change_account", "add_membership", "change_membership", "add_credit",
        "close_statement",
    ],
}


class Migration(migrations.Migration):

    dependencies = [
        ("billing", "0004_statements"),
        ("auth", "0012_alter_user_first_name_max_length"),
        ("contenttypes", "0002_remove_content_type_name"),
    ]

    operations = [gives("billing", ROLES)]

"""Check of a statement's month without a function that only Django's connections to SQLite have."""

from django.db import migrations, models
from django.db.models.lookups import Exact

from sandboxes.db.expressions import DayOfMonth


class Migration(migrations.Migration):
    dependencies = [("billing", "0012_usage_rollup")]
    reasons = {"check": "A statement an account and month, with the same condition as before."}

    operations = [
        migrations.RemoveConstraint(model_name="statement", name="statement_of_a_month"),
        migrations.AddConstraint(
            model_name="statement",
            constraint=models.CheckConstraint(condition=Exact(DayOfMonth("month"), 1), name="statement_of_a_month"),
        ),
    ]

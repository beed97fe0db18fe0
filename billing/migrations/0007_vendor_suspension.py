"""Rates of suspended sandboxes at the vendors that stop them, to be set by the operator."""

from datetime import UTC, datetime

from django.db import migrations

VALID_FROM = datetime(2020, 1, 1, tzinfo=UTC)  # earlier than any usage
VENDORS = "Enter the price of a stopped sandbox from the provider's price page, per GiB of the memory given."


def create(apps, schema_editor):
    rates = apps.get_model("billing", "Rate").objects
    for provider in ("daytona", "langsmith", "runloop"):
        rates.get_or_create(
            provider=provider, item="suspend", instance_type="", valid_from=VALID_FROM,
            defaults={"usd": 0, "source": VENDORS, "own": True},
        )


class Migration(migrations.Migration):
    dependencies = [("billing", "0006_suspended_memory")]
    operations = [migrations.RunPython(create, migrations.RunPython.noop)]

"""The house account and the rates known at release.

Cloudflare bills memory and disk as provisioned and CPU as used. Source of its figures: the pricing page named in each rate."""

from datetime import UTC, datetime
from decimal import Decimal

from django.db import migrations

VALID_FROM = datetime(2020, 1, 1, tzinfo=UTC)  # earlier than any usage
PAGE = "https://developers.cloudflare.com/containers/pricing/"
CLOUDFLARE = {  # item: USD per unit, monthly allowance, source
    "memory": ("0.009", "25", PAGE),
    "cpu": ("0.0012", "375", PAGE),
    "disk": ("0.00025", "200", PAGE),
    "plan": ("5", "0", f"{PAGE} (Workers Paid)"),
}
OWN_HOSTS = "Your own machines. Add a rate with your cost per sandbox-hour."
VENDORS = "Enter the price from the provider's price page."


def create(apps, schema_editor):
    apps.get_model("billing", "Account").objects.create(name="house", title="Agents without an account")
    rates = apps.get_model("billing", "Rate").objects
    for item, (usd, allowance, source) in CLOUDFLARE.items():
        rates.create(
            provider="cloudflare", item=item, usd=Decimal(usd), allowance=Decimal(allowance), valid_from=VALID_FROM,
            source=source, by_use=item == "cpu",
        )
    for provider in ("docker", "process", "memory"):
        rates.create(provider=provider, item="time", usd=0, valid_from=VALID_FROM, source=OWN_HOSTS)
    for provider in ("daytona", "modal", "runloop", "langsmith", "kubernetes"):
        rates.create(provider=provider, item="time", usd=0, valid_from=VALID_FROM, source=VENDORS, own=True)


class Migration(migrations.Migration):
    dependencies = [("billing", "0001_initial")]
    operations = [migrations.RunPython(create, migrations.RunPython.noop)]

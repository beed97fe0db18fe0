"""Date at which Cloudflare's prices were read, and the page on which each other vendor publishes its prices."""

from django.db import migrations
from django.db.models import Value
from django.db.models.functions import Concat

READ = ", read in November 2026"
PRICE_PAGES = {
    "daytona": "https://www.daytona.io/pricing",
    "langsmith": "https://www.langchain.com/pricing",
    "modal": "https://modal.com/pricing",
    "runloop": "https://runloop.ai/pricing",
}


def update(apps, schema_editor):
    rates = apps.get_model("billing", "Rate").objects
    page = "https://developers.cloudflare.com/containers/pricing/"
    rates.filter(provider="cloudflare", source__startswith=page, valid_from__year=2020).update(source=Concat("source", Value(READ)))
    for provider, page in PRICE_PAGES.items():
        source = f"No price is shipped. Enter the prices that {page} states on the day."
        rates.filter(provider=provider, own=True, usd=0).update(source=source)


class Migration(migrations.Migration):
    dependencies = [("billing", "0007_vendor_suspension")]
    operations = [migrations.RunPython(update, migrations.RunPython.noop)]

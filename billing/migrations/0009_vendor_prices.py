"""Prices of Daytona, LangSmith, Modal and Runloop.

The vendors' price pages could not be read. Each price is the one that several independent public repositories quote from the
page, with the date at which they read it. An installation in which an operator has set a rate of the vendor keeps that alone."""

from datetime import UTC, datetime
from decimal import Decimal

from django.db import migrations
from django.utils import timezone

VALID_FROM = datetime(2020, 1, 1, tzinfo=UTC)  # earlier than any usage
NOT_READ = "not read at the vendor"
SOURCES = {
    "daytona": "https://www.daytona.io/pricing, as quoted on 2026-09-28",
    "langsmith": "https://www.langchain.com/pricing, as quoted on 2026-08-21, with 1.50 USD per LCU and 1.00 USD per LSU",
    "modal": "https://modal.com/pricing, as quoted on 2026-10-08",
    "runloop": "https://www.runloop.ai/pricing, as quoted on 2026-09-28",
}
PRICES = {  # provider, item: USD per unit of the item, price as stated
    ("daytona", "cpu"): ("0.00084", "0.0504 per vCPU-hour"),
    ("daytona", "memory"): ("0.0162", "0.0162 per GiB-hour"),
    ("daytona", "disk"): ("0.000100582838", "0.000108 per GiB-hour beyond 5 GiB"),
    ("daytona", "suspend"): ("0", "a stopped sandbox costs its disk only"),
    ("langsmith", "cpu"): ("0.00096", "0.0384 LCU per vCPU-hour"),
    ("langsmith", "memory"): ("0.01845", "0.0123 LCU per GiB-hour"),
    ("langsmith", "disk"): ("0.000114552677", "0.000123 LSU per GiB-hour"),
    ("modal", "cpu"): ("0.0011826", "0.00003942 per core-second of a sandbox"),
    ("modal", "memory"): ("0.024012", "0.00000667 per GiB-second of a sandbox"),
    ("runloop", "cpu"): ("0.0018", "0.108 per CPU-hour"),
    ("runloop", "memory"): ("0.0252", "0.0252 per GB-hour"),
    ("runloop", "disk"): ("0.00034236", "0.00034236 per GB-hour"),
    ("runloop", "suspend"): ("0", "a suspended devbox costs its disk only"),
}


def create(apps, schema_editor):
    rates, usage = apps.get_model("billing", "Rate").objects, apps.get_model("billing", "UsageRecord").objects
    for provider, source in SOURCES.items():
        if rates.filter(provider=provider, own=False).exclude(item="storage").exists():
            continue
        prices = {item: price for (name, item), price in PRICES.items() if name == provider}
        is_used = usage.filter(provider=provider).exists()  # its costs keep the placeholder
        if not is_used:
            rates.filter(provider=provider, own=True, item__in=["time", *prices]).delete()
        for item, (usd, stated) in prices.items():
            rates.create(
                provider=provider, item=item, usd=Decimal(usd), valid_from=timezone.now() if is_used else VALID_FROM,
                source=f"{source}: {stated}; {NOT_READ}",
            )


class Migration(migrations.Migration):
    dependencies = [("billing", "0008_vendor_price_pages")]
    operations = [migrations.RunPython(create, migrations.RunPython.noop)]

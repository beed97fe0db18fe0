"""manage.py rate: list rates, add a price in the vendor's own unit, import price files of models, price model calls again."""

from argparse import ArgumentParser
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError
from django.db import transaction
from django.utils.dateparse import parse_datetime

from billing.estimate import list_priced_providers
from billing.instance_types import INSTANCE_SIZES
from billing.management import model_rates
from billing.management.options import format_table
from billing.models import BillableItem, Rate
from billing.pricing import format_decimal
from billing.source_units import SOURCE_UNITS, convert_price
from sandboxes import audit
from sandboxes.db import database_time
from sandboxes.formatting import suggest_match
from sandboxes.models import TokenKind
from sandboxes.providers.registry import PROVIDERS

START_DELAY = timedelta(minutes=1)  # of a rate without --from: a rate begins in the future
ALL_MODELS = ""
AUDITED_COLUMNS = ("usd", "allowance", "by_use", "source")
MODEL_OPTIONS = (*(f"{kind}_usd" for kind in TokenKind), "above_tokens", "tier", "note")
OPTIONS = {"usd": "price", "valid_from": "--from", "instance_type": "--instance", "source": "--source", "by_use": "--by-use"}


class Command(BaseCommand):
    help = "List rates, add a price in the unit in which the vendor states it, import prices of models, or price calls again."

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        listing = actions.add_parser("list", help="print the rates, the newest of each item first")
        listing.add_argument("--provider", help="only of this provider")
        listing.add_argument(
            "--models", nargs="?", const=ALL_MODELS, metavar="MODEL", help="prices of models; only those that price MODEL now"
        )
        add = actions.add_parser("add", help="add a rate; earlier usage keeps its price")
        add.add_argument("provider", nargs="?", help="provider, such as daytona")
        add.add_argument("price", nargs="?", help="USD per unit, as the vendor states it")
        add.add_argument("unit", nargs="?", choices=sorted(SOURCE_UNITS), help="unit of the price; a core is two vCPUs")
        add.add_argument("--source", required=True, help="page that states the price, and the day on which it was read")
        add.add_argument("--instance", default="", metavar="TYPE", help="only for this instance type, or this type of GPU")
        add.add_argument("--allowance", default="0", metavar="N", help="free units of the rate per account and month")
        add.add_argument("--by-use", action="store_true", help="CPU and memory: charge measured use where available")
        add.add_argument(
            "--from", dest="valid_from", metavar="TIME",
            help="start, such as 2026-12-01T00:00Z; default: in a minute, of a model's prices now",
        )  # fmt: skip
        model_rates.add_price_options(add)
        model_rates.add_import_options(actions.add_parser("import", help="compare a price file of models with the rates"))
        model_rates.add_reprice_options(actions.add_parser("reprice", help="price model calls again by the present rates"))

    def handle(self, *args: Any, action: str, **options: Any) -> None:
        if action == "list" and options["models"] is not None:
            self.stdout.write(model_rates.format_model_rates(None if options["models"] == ALL_MODELS else options["models"]))
        elif action == "list":
            self._list(options["provider"])
        elif action == "import":
            self.stdout.write("\n".join(model_rates.import_prices(options, _parse_model_start(options["valid_from"]))))
        elif action == "reprice":
            lines = model_rates.reprice(_parse_start(options["valid_from"]), options, now=database_time.now())
            self.stdout.write("\n".join(lines))
        elif options["model"] is not None:
            self._add_model(options)
        else:
            self._add(options)

    def _list(self, provider: str | None) -> None:
        rates = Rate.objects.filter(provider=provider) if provider else Rate.objects.all()
        rows = [
            [
                f"{rate.provider} {rate.instance_type}".strip(), BillableItem(rate.item).label,
                "not set" if rate.own else format_decimal(rate.usd), f"{rate.valid_from:%Y-%m-%d}", rate.source,
            ]
            for rate in rates
        ]  # fmt: skip
        self.stdout.write(format_table(["provider", "unit", "USD", "from", "source"], rows))

    def _add_model(self, options: dict[str, Any]) -> None:
        if options["provider"] is not None:
            raise CommandError("--model: A model's prices are options, such as --input 3, without provider, price and unit.")
        lines = model_rates.add_model_rates(options, _parse_model_start(options["valid_from"]), _parse_decimal)
        self.stdout.write("\n".join(lines))

    def _add(self, options: dict[str, Any]) -> None:
        if options["unit"] is None:
            raise CommandError("State provider, price and unit, or --model with its prices.")
        if stated := [name for name in MODEL_OPTIONS if options[name] not in (None, "")]:
            raise CommandError(f"--{stated[0].removesuffix('_usd').replace('_', '-')}: Only with --model.")
        price = _parse_decimal("price", options["price"])
        item, usd = convert_price(price, options["unit"])
        _require_names(options["provider"], "" if item == BillableItem.GPU else options["instance"])
        rate = Rate(
            provider=options["provider"], instance_type=options["instance"], item=item, usd=usd, by_use=options["by_use"],
            allowance=_parse_decimal("--allowance", options["allowance"]), valid_from=_parse_start(options["valid_from"]),
            source=f"{options['source']}: {format_decimal(price)} USD per {options['unit']}",
        )  # fmt: skip
        try:
            with transaction.atomic():
                rate.save()
                detail = f"{audit.describe_values(rate, AUDITED_COLUMNS)}, from {rate.valid_from:%Y-%m-%d %H:%M} UTC"
                audit.record(rate, "Add rate", detail, actor=audit.COMMAND_LINE, now=database_time.now())
        except ValidationError as error:
            name, messages = next(iter(error.message_dict.items()))
            raise CommandError(f"{OPTIONS.get(name, name)}: {messages[0]}") from None
        self.stdout.write(f"added: {rate}: {format_decimal(usd)} USD, {item.label}, from {rate.valid_from:%Y-%m-%d %H:%M} UTC")


def _require_names(provider: str, instance: str) -> None:
    """Raise CommandError for an unknown provider or instance type: a rate under such a name would price nothing."""
    known = {*PROVIDERS, *list_priced_providers(Rate.objects.all())}
    if provider not in known:
        raise CommandError(f"provider: There is no provider {provider}.{suggest_match(provider, sorted(known))}")
    sizes = INSTANCE_SIZES.get(provider, {})
    if instance and instance not in sizes:
        raise CommandError(f"--instance: {provider} has no instance type {instance}.{suggest_match(instance, sizes)}")


def _parse_decimal(option: str, text: str) -> Decimal:
    try:
        number = Decimal(text)
    except InvalidOperation:
        number = Decimal("NaN")
    if not number.is_finite() or number < 0:
        raise CommandError(f"{option}: Not a number of 0 or more.")
    return number


def _parse_model_start(text: str | None) -> datetime:
    return model_rates.default_start() if text is None else _parse_start(text)


def _parse_start(text: str | None) -> datetime:
    if text is None:
        return database_time.now() + START_DELAY
    try:
        start = parse_datetime(text)
    except ValueError:
        start = None
    if start is None:
        raise CommandError("--from: Not a time such as 2026-12-01T00:00Z.")
    return start if start.tzinfo else start.replace(tzinfo=UTC)

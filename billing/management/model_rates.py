"""manage.py rate, for prices of models: add, list and import rates by kind of token, and price calls again."""

from argparse import ArgumentParser
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import CommandError

from billing import horizon
from billing.management.options import format_table
from billing.pricing import format_decimal
from sandboxes import audit
from sandboxes.audit import COMMAND_LINE
from sandboxes.db import database_time
from sandboxes.egress.model_pricing import find_candidate_names, load_rates
from sandboxes.egress.prices import changes, files
from sandboxes.egress.prices.additions import add_rates
from sandboxes.egress.repricing import RepricedModel, Repricing, reprice_calls
from sandboxes.models import TokenKind, TokenRate
from sandboxes.models.token_rates import MILLION, find_present, find_superseded, get_unit

PUBLIC_PRICES = "public"
PUBLIC_PRICE_FILE = Path(files.__file__).with_name("public.toml")
MAX_LISTED_CHANGES = 500
MAX_LISTED_PROBLEMS = 50


def add_price_options(parser: ArgumentParser) -> None:
    """Add the options of a model's prices to `rate add`."""
    prices = parser.add_argument_group("prices of a model, in USD per million tokens, or per 1,000 web searches")
    prices.add_argument("--model", metavar="PATTERN", help="model or pattern, such as gpt-4o or 'claude-*'")
    for kind in TokenKind:
        prices.add_argument(f"--{kind.replace('_', '-')}", dest=f"{kind}_usd", metavar="USD", help=kind.label)
    prices.add_argument("--above-tokens", type=int, default=None, metavar="N", help="only for calls with more input tokens")
    prices.add_argument("--tier", default="", help="only for this service tier, such as priority or flex")
    prices.add_argument("--note", default="", help="text kept with the rates")


def add_import_options(parser: ArgumentParser) -> None:
    parser.add_argument("file", help=f"price file, own format or LiteLLM's; {PUBLIC_PRICES}: the list prices of this release")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="only models that match; repeatable")
    parser.add_argument("--from", dest="valid_from", metavar="TIME", help="start, such as 2026-12-01T00:00Z; default: now")
    parser.add_argument("--apply", action="store_true", help="add the rates; without this the changes are only shown")
    parser.add_argument("--skip-invalid", action="store_true", help="apply the other prices of a file with invalid entries")


def add_reprice_options(parser: ArgumentParser) -> None:
    parser.add_argument("--from", dest="valid_from", required=True, metavar="TIME", help="start of the first call")
    parser.add_argument("--model", metavar="NAME", help="only calls of this model, or of models that match this pattern")
    parser.add_argument("--stated", action="store_true", help="also calls whose cost the upstream or its record states")
    parser.add_argument("--apply", action="store_true", help="change the prices; without this the totals are only shown")


def reprice(since: datetime, options: Mapping[str, Any], *, now: datetime) -> list[str]:
    """Price the calls since a time again with --apply. Return a table by model. Usage before the horizon is final."""
    final = horizon.get_horizon()
    if since < final:
        raise CommandError(f"--from: Usage before {final:%Y-%m-%d %H:%M} UTC is final.")
    result = _reprice(since, options, now=now)
    rows = [_format_repriced(name, totals) for name, totals in sorted(result.models.items())]
    rows.append(_format_repriced("total", result.total))
    lines = [format_table(["model", "calls", "changed", "old USD", "new USD", "difference"], rows).rstrip("\n")]
    if kept := result.total.without_rate:
        lines.append(f"{kept:,} calls keep their price: no rate prices their usage, or the price is out of range")
    if result.estimates:
        lines.append(f"{result.estimates:,} estimated calls keep their price: their usage is unknown")
    return lines if options["apply"] else [*lines, "Nothing was changed: add --apply."]


def _reprice(since: datetime, options: Mapping[str, Any], *, now: datetime) -> Repricing:
    """Compute the prices. With --apply also store them, as a recorded order: each batch of calls is a transaction."""
    selection = {"model": options["model"], "stated": options["stated"]}
    if not options["apply"]:
        return reprice_calls(since, now=now, **selection)
    of_model = f", model {options['model']}" if options["model"] else ""
    detail = f"calls from {since:%Y-%m-%d %H:%M} UTC{of_model}{', stated prices too' if options['stated'] else ''}"
    row = audit.get_installation_row()
    with audit.record_order(row, "Price calls again", detail, actor=COMMAND_LINE, now=now) as order:
        result = reprice_calls(since, now=now, apply=True, **selection)
        total = result.total
        order.result = f"{total.changed} of {total.calls} calls, {format_decimal(total.old)} → {format_decimal(total.new)} USD"
    return result


def _format_repriced(name: str, totals: RepricedModel) -> list[str]:
    usd = [format_decimal(amount) for amount in (totals.old, totals.new, totals.new - totals.old)]
    return [name, f"{totals.calls}", f"{totals.changed}", *usd]


def build_model_rates(options: Mapping[str, Any], valid_from: datetime, parse: Any) -> list[TokenRate]:
    """Return the rates of `rate add --model`, unsaved. `parse` parses a price: option and text."""
    above = options["above_tokens"]
    if above is not None and above < 0:
        raise CommandError("--above-tokens: Not a number of 0 or more.")
    rates = [
        TokenRate(
            pattern=options["model"], kind=kind, tokens_from=0 if above is None else above + 1, tier=options["tier"],
            usd_per_million=parse(f"--{kind.replace('_', '-')}", text) * MILLION / get_unit(kind)[0], valid_from=valid_from,
            source=options["source"], note=options["note"],
        )
        for kind in TokenKind
        if (text := options[f"{kind}_usd"]) is not None
    ]  # fmt: skip
    if not rates:
        raise CommandError("State at least one price, such as --input 3 --output 15.")
    return rates


def add_model_rates(options: Mapping[str, Any], valid_from: datetime, parse: Any) -> list[str]:
    """Save the rates of `rate add --model`. Return lines about them."""
    rates = build_model_rates(options, valid_from, parse)
    present = find_present(rates)
    try:
        add_rates(rates, actor=COMMAND_LINE, now=database_time.now())
    except ValidationError as error:
        raise CommandError(_describe_error(error)) from None
    lines = [f"added: {describe_rate(rate)}, from {valid_from:%Y-%m-%d %H:%M} UTC" for rate in rates]
    lines += [
        f"superseded: {describe_rate(present[rate.key])}. Calls that have a price keep it: see manage.py rate reprice"
        for rate in rates
        if rate.key in present
    ]
    kinds = set(TokenRate.objects.filter(pattern=options["model"]).values_list("kind", flat=True))
    if missing := [str(kind.label) for kind in (TokenKind.INPUT, TokenKind.OUTPUT) if kind not in kinds]:
        lines.append(f"warning: {options['model']} has no price of {' and '.join(missing)}")
    return lines


def describe_rate(rate: TokenRate) -> str:
    return f"{rate}: {format_decimal(rate.stated_usd)} USD per {rate.unit_name}"


def format_model_rates(model: str | None) -> str:
    """Return a table of rates. `model` is a model's name: only the rates that price it now, by the rule of names."""
    now = database_time.now()
    rates = [*TokenRate.objects.all()] if model is None else load_rates(find_candidate_names(model), at=now).list_current()
    superseded = set(find_superseded().values_list("pk", flat=True)) if model is None else set()
    rows = [
        [
            rate.pattern, rate.get_kind_display(), rate.tier, f">= {rate.tokens_from}" if rate.tokens_from else "",
            format_decimal(rate.stated_usd), rate.unit_name, f"{rate.valid_from:%Y-%m-%d %H:%M}",
            "superseded" if rate.pk in superseded else "", rate.source,
        ]
        for rate in rates
    ]  # fmt: skip
    return format_table(["model", "kind", "tier", "input tokens", "USD", "per", "from", "state", "source"], rows)


def import_prices(options: Mapping[str, Any], valid_from: datetime) -> list[str]:
    """Compare a price file with the rates in force, and add new and changed prices with --apply. Return lines about them."""
    path = PUBLIC_PRICE_FILE if options["file"] == PUBLIC_PRICES else Path(options["file"])
    try:
        with path.open("rb") as file:
            found = files.parse_price_file(file.read(files.MAX_FILE_BYTES + 1), only=options["only"])
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}") from None
    except files.PriceFileInvalid as error:
        raise CommandError(f"{path}: {error}") from None
    compared = changes.compare(found, at=valid_from)
    changed = [change for change in compared if change.is_change]
    lines = _list_changes(changed) + _list_rest(found)
    new = sum(change.present is None for change in changed)
    counts = f"{new} new, {len(changed) - new} changed, {len(compared) - len(changed)} unchanged, {len(found.problems)} invalid"
    if not options["apply"]:
        return [*lines, f"{counts}. Nothing was changed: add --apply."]
    if found.problems and not options["skip_invalid"]:
        raise CommandError("\n".join([*lines, f"{counts}. Nothing was changed: correct the file, or add --skip-invalid."]))
    try:
        added = changes.apply_changes(
            compared, found, valid_from=valid_from, note=f"imported from {path.name}", actor=COMMAND_LINE,
            now=database_time.now(),
        )  # fmt: skip
    except ValidationError as error:
        raise CommandError(_describe_error(error)) from None
    return [*lines, f"{counts}. {added} rates added, from {valid_from:%Y-%m-%d %H:%M} UTC."]


def _list_changes(changed: list[changes.PriceChange]) -> list[str]:
    rows = []
    for change in changed[:MAX_LISTED_CHANGES]:
        price, size = change.price, get_unit(change.price.kind)[0]
        present = "" if change.present is None else format_decimal(change.present * size / MILLION)
        above = f">= {price.tokens_from}" if price.tokens_from else ""
        stated = format_decimal(price.usd_per_million * size / MILLION)
        label = "changed" if present else "new"
        rows.append([label, price.model, TokenKind(price.kind).label, price.tier, above, present, stated])
    table = format_table(["", "model", "kind", "tier", "input tokens", "present USD", "USD"], rows)
    further = len(changed) - len(rows)
    return [table.rstrip("\n")] * bool(rows) + [f"… and {further:,} more"] * bool(further)


def _list_rest(found: files.PriceFile) -> list[str]:
    """List invalid entries, and prices of units that rates do not have."""
    lines = [f"invalid: {problem}" for problem in found.problems[:MAX_LISTED_PROBLEMS]]
    if len(found.problems) > len(lines):
        lines.append(f"invalid: … and {len(found.problems) - len(lines):,} more")
    names = ", ".join(f"{name} ({models})" for name, models in found.unread.most_common(5))
    return lines + [f"not read, of {len(found.unread)} names: {names}"] * bool(names)


def _describe_error(error: ValidationError) -> str:
    if not hasattr(error, "error_dict"):
        return error.messages[0]
    name, messages = next(iter(error.message_dict.items()))
    return f"{name}: {messages[0]}"


def default_start() -> datetime:
    """Return now, without a fraction of a second."""
    return database_time.now().astimezone(UTC).replace(microsecond=0)

"""manage.py estimate: price of a month for a scenario, also compared between providers, or a forecast of this month."""

import json as encoding
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from billing.api.estimates import (
    ALL_PROVIDERS,
    EstimateQuerySerializer,
    ForecastQuerySerializer,
    compare_providers,
    render_comparison,
    render_estimate,
    render_forecast,
)
from billing.estimate import Estimate, EstimateError, ProviderEstimate, Scenario, estimate
from billing.forecast import FORECAST_WINDOW_DAYS, forecast
from billing.management.options import format_table, validate_options
from billing.models import BillableItem, Rate
from sandboxes.db import database_time

NO_RATE = "no rate"


class Command(BaseCommand):
    help = "Price a month of a number of agents by the current rates, or forecast this month's costs with --forecast."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--agents", help="number of agents, each with one sandbox")
        parser.add_argument("--hours-per-day", metavar="HOURS", help="hours for which each sandbox exists, idle time included")
        parser.add_argument("--always-on", action="store_true", help="the same as --hours-per-day 24")
        parser.add_argument("--days", help="days of the month, 1 to 31 (default: 30)")
        parser.add_argument("--instance", metavar="TYPE", help="size of the sandboxes, such as basic or SMALL (default: basic)")
        parser.add_argument(
            "--cpu-utilisation", metavar="PART", help="fraction of its CPU that a sandbox uses, 0 to 1 (default: 1)"
        )
        parser.add_argument(
            "--suspended-hours-per-day", metavar="HOURS", help="further hours for which each sandbox is suspended (default: 0)"
        )
        parser.add_argument("--disk-mib", metavar="MIB", help="disk of each sandbox (default: that of the size)")
        parser.add_argument("--gpus", metavar="NUMBER", help="GPUs of each sandbox (default: 0)")
        parser.add_argument("--gpu-type", metavar="TYPE", help="type of the GPUs, such as H100 (default: the rate of any type)")
        parser.add_argument(
            "--provider",
            action="append",
            help=f"provider (default: cloudflare), repeated to compare several; {ALL_PROVIDERS}: every provider with a rate; "
            "with --forecast: only at this provider",
        )
        parser.add_argument("--forecast", action="store_true", help="forecast this month from the average of the last days")
        parser.add_argument(
            "--last", metavar="DAYS", help=f"with --forecast: number of days to average (default: {FORECAST_WINDOW_DAYS})"
        )
        parser.add_argument(
            "--budget", metavar="USD", help="with --forecast: also show the day on which costs since the 1st reach this amount"
        )
        for name in ("agent", "account", "environment"):
            parser.add_argument(f"--{name}", metavar=name.upper(), help=f"with --forecast: only of this {name}")
        parser.add_argument("--json", action="store_true", help="one line of JSON")

    def handle(self, *args: Any, always_on: bool, json: bool, provider: list[str] | None, **options: Any) -> None:
        providers = provider or []
        compared = len(providers) > 1 or ALL_PROVIDERS in providers
        if options["forecast"] and compared:
            raise CommandError("--provider: a forecast is of one provider, or of all without this option.")
        options["provider"] = None if compared or not providers else providers[0]
        if options["forecast"]:
            self._forecast(json, options)
            return
        if always_on and options["hours_per_day"] is not None:
            raise CommandError("--always-on: equals 24 hours a day, so omit --hours-per-day.")
        scenario = validate_options(EstimateQuerySerializer, options)
        if compared:
            self._compare(json, scenario, providers)
            return
        try:
            result = estimate(Scenario(**scenario), Rate.objects.all(), now=database_time.now())
        except EstimateError as error:
            raise CommandError(f"--{error.field}: {error}") from None
        self.stdout.write(encoding.dumps(render_estimate(result)) if json else _format_estimate(result))

    def _compare(self, json: bool, scenario: dict[str, Any], providers: list[str]) -> None:
        try:
            results = compare_providers(scenario, providers)
        except EstimateError as error:
            raise CommandError(f"--{error.field.removesuffix('s')}: {error}") from None
        self.stdout.write(encoding.dumps(render_comparison(results)) if json else _format_comparison(results))

    def _forecast(self, json: bool, options: dict[str, Any]) -> None:
        result = forecast(now=database_time.now(), **validate_options(ForecastQuerySerializer, options))
        rendered = render_forecast(result)
        if json:
            self.stdout.write(encoding.dumps(rendered))
            return
        pace = (
            f"{rendered['a_day_usd']} USD a day, days averaged: {rendered['days']}"
            if rendered["a_day_usd"]
            else "no full day yet"
        )
        self.stdout.write(
            f"this month: {rendered['spent_usd']} USD so far, {rendered['month_usd']} USD expected in total ({pace})"
        )
        if uncertainty := str(result.uncertainty):
            self.stdout.write(f"of this month: {uncertainty}")
        if rendered["budget_usd"]:
            when = f"on {rendered['runs_out']}" if rendered["runs_out"] else "never at this pace"
            self.stdout.write(f"{rendered['budget_usd']} USD reached {when}")


def _format_estimate(result: Estimate) -> str:
    rendered = render_estimate(result)
    columns = ("unit", "quantity", "free", "rate_usd", "usd")
    rows = [[line[name] for name in columns] for line in rendered["lines"]]
    rows += [["total", "", "", "", rendered["total_usd"]], ["per agent", "", "", "", rendered["per_agent_usd"]]]
    gaps = [f"no rate: {_name_items(result.unpriced)}"] if result.unpriced else []
    return "\n".join([format_table(["", "quantity", "free", "rate", "USD"], rows), *gaps])


def _format_comparison(results: list[ProviderEstimate]) -> str:
    """Format one column a provider and one row an item, in USD, then the costs that the totals leave out."""
    priced = [each.estimate for each in results if each.estimate]
    items = [item for item in BillableItem.values if any(line.item == item for each in priced for line in each.lines)]
    rows = [[_name_items([item]), *(_format_amount(each.estimate, item) for each in results)] for item in items]
    rows.append(["total", *(str(each.estimate.total) if each.estimate else NO_RATE for each in results)])
    rows.append(["per agent", *(str(each.estimate.per_agent) if each.estimate else NO_RATE for each in results)])
    gaps = [f"{each.provider}: {text}" for each in results if (text := _describe_gaps(each))]
    return "\n".join([format_table(["USD a month", *(each.provider for each in results)], rows), *gaps])


def _format_amount(result: Estimate | None, item: str) -> str:
    if result is None:
        return NO_RATE
    return next((str(line.usd) for line in result.lines if line.item == item), "-")


def _describe_gaps(result: ProviderEstimate) -> str:
    """Name the costs that are not part of the total, or return an empty string."""
    if result.estimate is None:
        return "no rate is known. Add its prices with manage.py rate add."
    unpriced = f"no rate of {_name_items(result.estimate.unpriced)}" if result.estimate.unpriced else ""
    excluded = f"not covered: {result.excluded}" if result.excluded else ""
    return "; ".join(filter(None, [unpriced, excluded]))


def _name_items(items: list[str]) -> str:
    return ", ".join(BillableItem(item).label for item in items)

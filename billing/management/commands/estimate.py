"""manage.py estimate: what a month would cost, and what this one will."""

import json as encoding
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone

from billing.api.estimates import EstimateQuerySerializer, ForecastQuerySerializer, render_estimate, render_forecast
from billing.estimate import FORECAST_WINDOW_DAYS, Estimate, EstimateError, Scenario, estimate, forecast
from billing.management.options import format_table, validate_options
from billing.models import Rate


class Command(BaseCommand):
    help = "What so many agents would cost in a month by the rates there are; or, with --forecast, what this month will cost."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--agents", help="how many, each with a sandbox of its own")
        parser.add_argument("--hours-per-day", metavar="HOURS", help="that each sandbox is there, idle time included")
        parser.add_argument("--always-on", action="store_true", help="the same as --hours-per-day 24")
        parser.add_argument("--days", help="on which it is, 1 to 31 of one month; 30 if not given")
        parser.add_argument("--instance", metavar="TYPE", help="lite, basic or standard-1 to standard-4; basic if not given")
        parser.add_argument("--cpu-utilisation", metavar="PART", help="of its CPU that a sandbox uses, 0 to 1; 1 if not given")
        parser.add_argument("--provider", help="cloudflare if not given; with --forecast: at this provider only")
        parser.add_argument("--forecast", action="store_true", help="this month, if the days to come are like the last ones")
        parser.add_argument(
            "--last", metavar="DAYS", help=f"with --forecast: how many those are; {FORECAST_WINDOW_DAYS} if not given"
        )
        parser.add_argument("--budget", metavar="USD", help="with --forecast: on which day so much is spent, from the 1st on")
        for name in ("agent", "account", "environment"):
            parser.add_argument(f"--{name}", metavar=name.upper(), help=f"with --forecast: of this {name} only")
        parser.add_argument("--json", action="store_true", help="one line of JSON")

    def handle(self, *args: Any, always_on: bool, json: bool, **given: Any) -> None:
        if given["forecast"]:
            self._forecast(json, given)
            return
        if always_on and given["hours_per_day"] is not None:
            raise CommandError("--always-on: it is 24 hours a day; leave --hours-per-day out.")
        said = validate_options(EstimateQuerySerializer, given)
        try:
            found = estimate(Scenario(**said), Rate.objects.all(), now=timezone.now())
        except EstimateError as wrong:
            raise CommandError(f"--{wrong.field}: {wrong}") from None
        self.stdout.write(encoding.dumps(render_estimate(found)) if json else _format_estimate(found))

    def _forecast(self, json: bool, given: dict[str, Any]) -> None:
        shown = render_forecast(forecast(now=timezone.now(), **validate_options(ForecastQuerySerializer, given)))
        if json:
            self.stdout.write(encoding.dumps(shown))
            return
        a_day = f"{shown['a_day_usd']} USD a day, by the last {shown['days']}" if shown["a_day_usd"] else "no day is over yet"
        self.stdout.write(f"this month: {shown['spent_usd']} USD so far, {shown['month_usd']} USD in all ({a_day})")
        if shown["budget_usd"]:
            when = f"on {shown['runs_out']}" if shown["runs_out"] else "never at this rate"
            self.stdout.write(f"{shown['budget_usd']} USD are spent {when}")


def _format_estimate(found: Estimate) -> str:
    shown = render_estimate(found)
    columns = ("unit", "quantity", "free", "rate_usd", "usd")
    rows = [[line[name] for name in columns] for line in shown["lines"]]
    rows += [["total", "", "", "", shown["total_usd"]], ["an agent", "", "", "", shown["per_agent_usd"]]]
    return format_table(["", "quantity", "free", "rate", "USD"], rows)

"""manage.py costs: usage and costs, by agent or another group."""

import json as encoding
from argparse import ArgumentParser
from decimal import Decimal
from fractions import Fraction
from typing import Any

from django.core.management.base import BaseCommand

from billing.api.costs import ZERO_USD, CostQuerySerializer, format_hours, render_cost_total, render_costs_csv
from billing.api.views import format_day
from billing.management.options import format_table, validate_options
from billing.pricing import CENT_PLACES, format_decimal, round_half_up
from billing.totals import GROUP_BY_COLUMNS, CostTotal, sum_costs


class Command(BaseCommand):
    help = "Show usage and costs, as of the last run of `meter` or its sweep."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--by", choices=[*GROUP_BY_COLUMNS], default="agent", help="group costs by this (default: agent)")
        parser.add_argument("--since", metavar="DAY", help="first day (UTC), such as 2026-11-01")
        parser.add_argument("--until", metavar="DAY", help="day after the last one (UTC)")
        for name in ("agent", "lease", "environment", "provider", "account"):
            parser.add_argument(f"--{name}", metavar=name.upper(), help=f"only of this {name}")
        output = parser.add_mutually_exclusive_group()
        output.add_argument("--csv", action="store_true", help="CSV, with quantities by item")
        output.add_argument("--json", action="store_true", help="one line of JSON, with quantities and free quantities by item")

    def handle(self, *args: Any, csv: bool, json: bool, **options: Any) -> None:
        filters = validate_options(CostQuerySerializer, options)
        by, since, until = filters.pop("by"), filters.pop("since", None), filters.pop("until", None)
        del filters["limit"]  # the command prints all groups
        totals = sum_costs(by, since=since, until=until, **filters)
        total = sum((each.usd for each in totals), ZERO_USD)
        if csv:
            self.stdout.write(render_costs_csv(by, totals), ending="")
        elif json:
            header = {"by": by, "since": format_day(since), "until": format_day(until), "total_usd": format_decimal(total)}
            self.stdout.write(encoding.dumps(header | {"results": [render_cost_total(each) for each in totals]}))
        else:
            self.stdout.write(
                format_table([by, "hours", "USD"], [*map(_format_row, totals), ["total", "", _format_usd(total)]])
            )


def _format_row(total: CostTotal) -> list[str]:
    return [total.key or "(none)", format_hours(total) or "", _format_usd(total.usd)]


def _format_usd(amount: Decimal) -> str:
    """Format an amount with all its decimal places, and at least two."""
    return max(format_decimal(amount), str(round_half_up(Fraction(amount), CENT_PLACES)), key=len)

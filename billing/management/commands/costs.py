"""manage.py costs: what was used and what it cost."""

import json as encoding
from argparse import ArgumentParser
from decimal import Decimal
from fractions import Fraction
from typing import Any

from django.core.management.base import BaseCommand

from billing.api.costs import ZERO_USD, CostQuerySerializer, format_hours, render_cost_total, render_costs_csv
from billing.api.views import format_day
from billing.costs import GROUP_BY_COLUMNS, CostTotal, sum_costs
from billing.management.options import format_table, validate_options
from billing.pricing import CENT_PLACES, format_decimal, round_half_up


class Command(BaseCommand):
    help = "What was used and what it cost, up to when `meter` or its sweep last ran."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--by", choices=[*GROUP_BY_COLUMNS], default="agent", help="what costs are added up by; agent if not given"
        )
        parser.add_argument("--since", metavar="DAY", help="the first day, UTC, such as 2026-11-01")
        parser.add_argument("--until", metavar="DAY", help="the day after the last one")
        for name in ("agent", "lease", "environment", "provider", "account"):
            parser.add_argument(f"--{name}", metavar=name.upper(), help=f"of this {name} only")
        shape = parser.add_mutually_exclusive_group()
        shape.add_argument("--csv", action="store_true", help="quantities by item, too")
        shape.add_argument("--json", action="store_true", help="one line of JSON, with quantities and what was free of them")

    def handle(self, *args: Any, csv: bool, json: bool, **given: Any) -> None:
        said = validate_options(CostQuerySerializer, given)
        by, since, until = said.pop("by"), said.pop("since", None), said.pop("until", None)
        del said["limit"]
        found = sum_costs(by, since=since, until=until, **said)
        total = sum((each.usd for each in found), ZERO_USD)
        if csv:
            self.stdout.write(render_costs_csv(by, found), ending="")
        elif json:
            shown = {"by": by, "since": format_day(since), "until": format_day(until), "total_usd": format_decimal(total)}
            self.stdout.write(encoding.dumps(shown | {"results": [render_cost_total(each) for each in found]}))
        else:
            self.stdout.write(format_table([by, "hours", "USD"], [*map(_format_row, found), ["total", "", _format_usd(total)]]))


def _format_row(total: CostTotal) -> list[str]:
    return [total.key or "(none)", format_hours(total) or "", _format_usd(total.usd)]


def _format_usd(amount: Decimal) -> str:
    """With all it has, and at least cents."""
    return max(format_decimal(amount), str(round_half_up(Fraction(amount), CENT_PLACES)), key=len)

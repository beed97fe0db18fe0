"""manage.py costs: usage and costs, by agent or another group."""

import json as encoding
from argparse import ArgumentParser
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from billing.api.costs import ZERO_USD, CostQuerySerializer, format_hours, render_cost_total, render_costs_csv, render_sums
from billing.api.views import format_day
from billing.errors import TotalsPending
from billing.grouping import GROUP_BY_COLUMNS
from billing.management.options import format_table, validate_options
from billing.model_sums import TokenCounts
from billing.models import BillableItem
from billing.pricing import CENT_PLACES, format_decimal, round_half_up
from billing.totals import CostTotal, sum_costs
from billing.uncertainty import Uncertainty


class Command(BaseCommand):
    help = "Show usage and costs, as of the last run of `meter` or its sweep."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--by", choices=[*GROUP_BY_COLUMNS], default="agent", help="group costs by this (default: agent)")
        parser.add_argument("--since", metavar="DAY", help="first day (UTC), such as 2026-11-01")
        parser.add_argument("--until", metavar="DAY", help="day after the last one (UTC)")
        for name in ("agent", "lease", "environment", "provider", "account", "project", "model"):
            parser.add_argument(f"--{name}", metavar=name.upper(), help=f"only of this {name}")
        output = parser.add_mutually_exclusive_group()
        output.add_argument("--csv", action="store_true", help="CSV, with quantities by item")
        output.add_argument("--json", action="store_true", help="one line of JSON, with quantities and free quantities by item")

    def handle(self, *args: Any, csv: bool, json: bool, **options: Any) -> None:
        filters = validate_options(CostQuerySerializer, options)
        by, since, until = filters.pop("by"), filters.pop("since", None), filters.pop("until", None)
        del filters["limit"]  # the command prints all groups
        try:
            totals = sum_costs(by, since=since, until=until, **filters)
        except TotalsPending as error:
            raise CommandError(str(error)) from None
        if csv:
            self.stdout.write(render_costs_csv(by, totals), ending="")
        elif json:
            header = {"by": by, "since": format_day(since), "until": format_day(until)} | render_sums(totals)
            self.stdout.write(encoding.dumps(header | {"results": [render_cost_total(each) for each in totals]}))
        else:
            self.stdout.write(_format_totals(by, totals))


def _format_totals(by: str, totals: Sequence[CostTotal]) -> str:
    """Format the groups and their total as a table. Columns of estimates, unpriced calls and tokens are left out if empty."""
    usd, uncertainty = sum((each.usd for each in totals), ZERO_USD), Uncertainty.sum(totals)
    rows = [[each.key or "(none)", format_hours(each) or "", _format_usd(each.usd)] for each in totals]
    header, rows = [by, "hours", "USD"], [*rows, ["total", "", _format_usd(usd)]]
    if uncertainty != Uncertainty():
        header += ["USD estimated", "unpriced calls"]
        parts: list[CostTotal | Uncertainty] = [*totals, uncertainty]
        for row, each in zip(rows, parts, strict=True):
            row += [_format_usd(each.estimated_usd) if each.estimated_usd else "", f"{each.unpriced or ''}"]
    tokens = [each.tokens or TokenCounts() for each in totals]
    if any(map(any, tokens)):
        header += ["calls", *(f"{kind.replace('_', ' ')} tokens" for kind in TokenCounts._fields)]
        calls = [int(each.quantities.get(BillableItem.LLM, 0)) for each in totals]
        for row, number, counts in zip(rows, [*calls, sum(calls)], [*tokens, TokenCounts.sum(tokens)], strict=True):
            row += [f"{count or ''}" for count in (number, *counts)]
    return format_table(header, rows)


def _format_usd(amount: Decimal) -> str:
    """Format an amount with all its decimal places, and at least two."""
    return max(format_decimal(amount), str(round_half_up(Fraction(amount), CENT_PLACES)), key=len)

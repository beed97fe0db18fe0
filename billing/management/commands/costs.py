"""manage.py costs: what was used and what it cost."""

import json as encoding
from argparse import ArgumentParser
from decimal import Decimal
from fractions import Fraction
from typing import Any

from django.core.management.base import BaseCommand

from billing.api.serializers import NOTHING, CostsAsked, cost_shown, day_shown, hours_shown, to_csv
from billing.costs import BY, Total, costs
from billing.management.options import checked, table
from billing.pricing import CENTS, plain, rounded


class Command(BaseCommand):
    help = "What was used and what it cost, up to when `meter` or its sweep last ran."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--by", choices=[*BY], default="agent", help="what costs are added up by; agent if not given")
        parser.add_argument("--since", metavar="DAY", help="the first day, UTC, such as 2026-11-01")
        parser.add_argument("--until", metavar="DAY", help="the day after the last one")
        for name in ("agent", "lease", "environment", "provider", "account"):
            parser.add_argument(f"--{name}", metavar=name.upper(), help=f"of this {name} only")
        shape = parser.add_mutually_exclusive_group()
        shape.add_argument("--csv", action="store_true", help="quantities by item, too")
        shape.add_argument("--json", action="store_true", help="one line of JSON, with quantities and what was free of them")

    def handle(self, *args: Any, csv: bool, json: bool, **given: Any) -> None:
        said = checked(CostsAsked, given)
        by, since, until = said.pop("by"), said.pop("since", None), said.pop("until", None)
        del said["limit"]
        found = costs(by, since=since, until=until, **said)
        total = sum((each.usd for each in found), NOTHING)
        if csv:
            self.stdout.write(to_csv(by, found), ending="")
        elif json:
            shown = {"by": by, "since": day_shown(since), "until": day_shown(until), "total_usd": plain(total)}
            self.stdout.write(encoding.dumps(shown | {"results": [cost_shown(each) for each in found]}))
        else:
            self.stdout.write(table([by, "hours", "USD"], [*map(_line, found), ["total", "", _usd(total)]]))


def _line(total: Total) -> list[str]:
    return [total.key or "(none)", hours_shown(total) or "", _usd(total.usd)]


def _usd(amount: Decimal) -> str:
    """With all it has, and at least cents."""
    return max(plain(amount), str(rounded(Fraction(amount), CENTS)), key=len)

"""manage.py meter: derive usage and costs up to now."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from billing import derivation
from billing.horizon import get_horizon
from sandboxes import audit
from sandboxes.db import database_time


class Command(BaseCommand):
    help = "Derive usage from recorded facts, and costs from usage and rates. Safe to repeat and to run during the sweeps."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--again", action="store_true",
            help="delete usage and costs first and rebuild them; closed statements, and usage whose facts have expired, stay",
        )  # fmt: skip

    def handle(self, *args: Any, again: bool, **options: Any) -> None:
        now = database_time.now()
        if again:
            row = audit.get_installation_row()
            with audit.record_order(row, "Derive usage and costs again", actor=audit.COMMAND_LINE, now=now) as order:
                derivation.reset_usage_and_costs()
                usage, costs = derivation.derive_usage_and_costs(now=database_time.now())
                order.result = f"usage: {format_counts(usage)}; costs: {format_counts(costs)}"
        else:
            usage, costs = derivation.derive_usage_and_costs(now=now)
        self.stdout.write(f"usage: {format_counts(usage)}")
        self.stdout.write(f"costs: {format_counts(costs)}")
        self.stdout.write(f"horizon: usage of days before {get_horizon().date()} is final")


def format_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items())) or "nothing to do"

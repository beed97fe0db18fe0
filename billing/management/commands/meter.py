"""manage.py meter: usage and costs, up to now."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand
from django.utils import timezone

from billing import derivation


class Command(BaseCommand):
    help = "Derive usage from what happened, and costs from usage and rates, up to now. Safe to repeat, and beside the sweeps."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--again", action="store_true", help="throw all of both away first; they become what they were")

    def handle(self, *args: Any, again: bool, **options: Any) -> None:
        if again:
            derivation.reset_usage_and_costs()
        usage, money = derivation.derive_usage_and_costs(now=timezone.now())
        self.stdout.write(f"usage: {format_counts(usage)}")
        self.stdout.write(f"costs: {format_counts(money)}")


def format_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{times} {what}" for what, times in sorted(counts.items())) or "nothing to do"

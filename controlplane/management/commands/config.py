"""manage.py config: every variable, its value, and where it came from."""

import json
from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any

from django.core.management.base import BaseCommand

from controlplane import env


class Command(BaseCommand):
    help = "Print every variable, its value and where it came from. Secrets are not shown."
    requires_system_checks = []  # what is in force is wanted most when the checks fail

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="one JSON document")

    def handle(self, *args: Any, json: bool, **options: Any) -> None:
        self.stdout.write(render_json() if json else "\n".join(render_table()))
        for warning in env.find_unknown_variables():
            self.stderr.write(f"warning: {warning}")


def build_rows() -> list[dict[str, str]]:
    return [
        {
            "name": knob.name,
            "value": knob.default if knob.source == "default" else knob.shown,  # a default is no secret
            "default": knob.default,
            "source": knob.source,
            "accepts": knob.accepts,
            "help": knob.help,
        }
        for knob in env.ENV_VARIABLES.values()
    ]


def render_json() -> str:
    return json.dumps({"variables": build_rows(), "warnings": env.find_unknown_variables()}, indent=2)


def render_table() -> Iterator[str]:
    """Two lines for each variable: what it is now, and what it means."""
    heads = {"name": "VARIABLE", "value": "VALUE", "source": "SOURCE", "default": "DEFAULT"}
    found = build_rows()
    widths = {column: max(len(row[column]) for row in [heads, *found]) for column in heads}
    for row in [heads, *found]:
        yield "  ".join(row[column].ljust(widths[column]) for column in heads).rstrip()
        if row is not heads:
            yield f"    {row['help']}. Takes {row['accepts']}."

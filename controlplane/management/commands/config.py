"""manage.py config: print environment variables with value, source and meaning."""

import json
from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from controlplane import env
from sandboxes.hosts.capacity import try_derive_capacity


class Command(BaseCommand):
    help = "Print every variable with its value and source. Secrets are masked."
    requires_system_checks = []  # must work while the checks fail

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print one JSON document")

    def handle(self, *args: Any, json: bool, **options: Any) -> None:
        self.stdout.write(render_json() if json else "\n".join(render_table()))
        for warning in env.find_unknown_variables():
            self.stderr.write(f"warning: {warning}")


def build_rows() -> list[dict[str, str]]:
    """Return a row for each variable. LEASEHOLD_MAX_SANDBOXES shows the derived capacity if it is unset."""
    rows = [
        {
            "name": variable.name,
            "value": variable.default if variable.source == "default" else variable.display_value,  # a default is not secret
            "default": variable.default,
            "source": variable.source,
            "accepts": variable.accepts,
            "help": variable.help,
        }
        for variable in env.ENV_VARIABLES.values()
    ]
    if settings.MAX_SANDBOXES is None and (derived := try_derive_capacity("", settings.SANDBOX_MEMORY_MIB)):
        row = next(row for row in rows if row["name"] == "LEASEHOLD_MAX_SANDBOXES")
        row |= {"value": str(derived.places), "source": "derived"}
    return rows


def render_json() -> str:
    return json.dumps({"variables": build_rows(), "warnings": [str(each) for each in env.find_unknown_variables()]}, indent=2)


def render_table() -> Iterator[str]:
    """Yield two lines per variable: value, source and default, then the meaning."""
    headings = {"name": "VARIABLE", "value": "VALUE", "source": "SOURCE", "default": "DEFAULT"}
    rows = build_rows()
    widths = {column: max(len(row[column]) for row in [headings, *rows]) for column in headings}
    for row in [headings, *rows]:
        yield "  ".join(row[column].ljust(widths[column]) for column in headings).rstrip()
        if row is not headings:
            yield f"    {row['help']}. Takes {row['accepts']}."

"""manage.py rotate_key: give an API key a new secret."""

import json as encoding
from argparse import ArgumentParser
from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from leases import api_keys
from leases.management.base import parse_duration, report_errors
from sandboxes.audit import COMMAND_LINE
from sandboxes.db import database_time


class Command(BaseCommand):
    help = (
        "Give an API key a new secret and print the key. It cannot be shown again. Agents, limits and budgets of the key stay."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("prefix", help="prefix of the key, as the console shows it")
        parser.add_argument(
            "--overlap", default="24h", metavar="DURATION",
            help="time for which the previous secret is accepted, by default 24h; 0 ends all earlier secrets at once",
        )  # fmt: skip
        parser.add_argument("--json", action="store_true", help="one line of JSON: key, prefix, previous_valid_until")

    def handle(self, *args: Any, prefix: str, overlap: str, json: bool, **options: Any) -> None:
        duration = timedelta(0) if overlap == "0" else parse_duration("--overlap", overlap)
        now = database_time.now()
        with report_errors(options["verbosity"]):
            row = api_keys.find_by_prefix(prefix)
            if row is None:
                raise CommandError(f"There is no API key {prefix[:12]!r}.")
            key = api_keys.rotate_key(row.pk, overlap=duration, now=now, actor=COMMAND_LINE)
            until = (now + duration).replace(microsecond=0).isoformat()
            as_json = encoding.dumps({"key": key, "prefix": row.prefix, "previous_valid_until": until})
            self.stdout.write(as_json if json else f"{key} (previous secret accepted until {until}; not shown again)")

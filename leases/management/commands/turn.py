"""manage.py turn: play one turn of a lease, as the HTTP API does."""

import json
import sys
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from leases import turns
from leases.management.base import parse_lease_id, report_errors
from sandboxes.audit import COMMAND_LINE
from sandboxes.db import database_time

MAX_STATE_BYTES = 1 << 20


class Command(BaseCommand):
    help = "Play one turn of a lease and print the action as JSON. A number that was played before prints the stored action."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("lease", metavar="LEASE_ID")
        parser.add_argument("number", metavar="NUMBER", type=int)
        parser.add_argument("--state", default="{}", help="JSON object, or - to read it from stdin; default: %(default)s")

    def handle(self, *args: Any, lease: str, number: int, state: str, verbosity: int, **options: Any) -> None:
        if not 0 <= number < 1 << 62:
            raise CommandError("NUMBER: must be from 0 to 2^62 - 1.")
        content = _parse_state(sys.stdin.read(MAX_STATE_BYTES + 1) if state == "-" else state)
        with report_errors(verbosity):
            turn = turns.take_turn(parse_lease_id(lease), number, content, now=database_time.now(), actor=COMMAND_LINE)
            self.stdout.write(json.dumps(turn.action))
        if turn.skipped:
            sys.exit(1)


def _parse_state(text: str) -> dict[str, Any]:
    if len(text) > MAX_STATE_BYTES:
        raise CommandError(f"--state: longer than {MAX_STATE_BYTES} bytes.")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"--state: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise CommandError("--state: not a JSON object.")
    return content

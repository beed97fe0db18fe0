"""manage.py condition: post a condition to an environment, as the HTTP API does."""

import re
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from leases import conditions
from leases.environments import lifecycle
from leases.errors import InvalidRequest
from leases.management.base import parse_did, parse_environment_id, report_errors
from leases.models import CONDITION_DESCRIPTION, CONDITION_PATTERN
from leases.tasks import enqueue_reclaim
from sandboxes.audit import COMMAND_LINE
from sandboxes.db import database_time
from sandboxes.formatting import pluralize


class Command(BaseCommand):
    help = "End the active leases in an environment that list a condition. The last one ends the environment."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("environment", metavar="ENVIRONMENT_ID")
        parser.add_argument("condition", metavar="NAME", help="such as game.finished")
        parser.add_argument("--agent", action="append", metavar="DID", help="only leases of this agent; may be repeated")
        parser.add_argument("--outcome", help="text, stored if the environment ends")

    def handle(self, *args: Any, environment: str, condition: str, verbosity: int, **options: Any) -> None:
        with report_errors(verbosity):
            if not re.fullmatch(CONDITION_PATTERN, condition, re.ASCII):
                raise InvalidRequest("condition", f"{condition[:80]!r} is not {CONDITION_DESCRIPTION}.")
            agents = [parse_did(did) for did in options["agent"]] if options["agent"] else None
            outcome = lifecycle.NOTHING if options["outcome"] is None else options["outcome"]
            ended = conditions.post_condition(
                parse_environment_id(environment), condition, now=database_time.now(), agents=agents, outcome=outcome,
                actor=COMMAND_LINE,
            )  # fmt: skip
            if ended:
                enqueue_reclaim()
            self.stdout.write(f"{environment}: {pluralize(len(ended), 'lease', 'leases')} ended")

"""manage.py create_key: issue an API key."""

import json as encoding
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from leases import api_keys
from leases.management.base import parse_duration, report_errors
from leases.management.limit_options import add_limit_options, parse_limits
from leases.models import KeyScope
from sandboxes.audit import COMMAND_LINE
from sandboxes.db import database_time


class Command(BaseCommand):
    help = "Create an API key for agents or for an operator and print it. It cannot be shown again."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--agent", action="append", default=[], metavar="DID", help="may be repeated")
        parser.add_argument("--operator", action="store_true", help="the key may act for all agents")
        parser.add_argument("--name", default="", help="purpose of the key")
        parser.add_argument(
            "--type", action="append", default=[], metavar="NAME",
            help="environment type that the key may use; may be repeated. Default: all that are not restricted",
        )  # fmt: skip
        parser.add_argument(
            "--pool", action="append", default=[], metavar="NAME",
            help="pool that the key may use; may be repeated. Default: all that are not restricted",
        )  # fmt: skip
        parser.add_argument(
            "--scope", action="append", choices=KeyScope.values,
            help="requests that the key permits; may be repeated. Default: leases and costs, which permit everything",
        )  # fmt: skip
        parser.add_argument("--project", default="", help="project of the agents; default: the default project")
        add_limit_options(parser)
        parser.add_argument("--expires-in", metavar="DURATION", help='time after which the key expires, such as "90d"')
        parser.add_argument("--json", action="store_true", help="one line of JSON: key, prefix")

    def handle(self, *args: Any, agent: list[str], operator: bool, json: bool, **options: Any) -> None:
        now = database_time.now()
        lifetime = parse_duration("--expires-in", options["expires_in"]) if options["expires_in"] is not None else None
        with report_errors(options["verbosity"]):
            row, key = api_keys.issue_key(
                agent,
                operator=operator,
                name=options["name"],
                scopes=options["scope"],
                environment_types=options["type"],
                pools=options["pool"],
                limits=parse_limits(options),
                expires_at=now + lifetime if lifetime else None,
                project=options["project"],
                now=now,
                actor=COMMAND_LINE,
            )
            agents = "all agents" if operator else ", ".join(row.dids)
            as_json = encoding.dumps({"key": key, "prefix": row.prefix})
            self.stdout.write(as_json if json else f"{key} (for {agents}; not shown again)")

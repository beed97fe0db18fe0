"""manage.py run_agent: run an agent CLI in a lease's sandbox, and print its messages as they arrive."""

import json
import shlex
import sys
from argparse import ArgumentParser
from decimal import Decimal, InvalidOperation
from typing import Any
from uuid import uuid4

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from leases import leasing, shells
from leases.agent_runs import lifecycle
from leases.agent_runs.clis.base import PERMISSION_MODES, AgentOptions
from leases.agent_runs.clis.registry import CLIS
from leases.agent_runs.lifecycle import AgentRequest
from leases.agent_runs.models import AgentRunState
from leases.agent_runs.policy import AgentPolicy
from leases.management.base import parse_duration, parse_lease_id, report_errors
from sandboxes.audit import COMMAND_LINE
from sandboxes.db import database_time


class Command(BaseCommand):
    help = (
        "Run an agent CLI in a lease's sandbox, with the prompt from stdin. Prints one JSON message a line, and the result to "
        "stderr. Exits with 0 if the run is completed, else with 1."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("lease", metavar="LEASE_ID")
        parser.add_argument("--cli", choices=sorted(CLIS), default="claude-code", help="agent CLI; default: %(default)s")
        parser.add_argument("--model", default="", help="default: that of the CLI")
        parser.add_argument("--permission-mode", choices=PERMISSION_MODES, default="default")
        parser.add_argument("--max-turns", type=int, help="interrupt the run above this number of model answers")
        parser.add_argument("--max-cost", help="interrupt the run above this cost of model calls, USD")
        parser.add_argument("--resume", action="store_true", help="resume the session of the lease's last run of this CLI")
        parser.add_argument("--shell", metavar="NAME", help="shell of the lease whose variables and working directory apply")
        parser.add_argument("--timeout", help='seconds, or "5m"; default: LEASEHOLD_EXEC_TIMEOUT_MOST')
        parser.add_argument(
            "--program", default="", help="with --cli program: its command line, split into words as in a shell"
        )

    def handle(self, *args: Any, lease: str, **options: Any) -> None:
        with report_errors(options["verbosity"]):
            pk = parse_lease_id(lease)
            now = database_time.now()
            policy = lifecycle.get_policy(leasing.require_active(pk, now=now))
            cli = options["cli"]
            agent_options = AgentOptions(
                sys.stdin.read(),
                model=options["model"],
                permission_mode=options["permission_mode"],
                session_id=lifecycle.find_last_session(pk, cli) if options["resume"] else "",
                argv=tuple(shlex.split(options["program"])),
                policy=AgentPolicy(max_turns=options["max_turns"], max_cost=_parse_cost(options["max_cost"])).restrict(policy),
            )
            timeout = parse_duration("--timeout", options["timeout"]) if options["timeout"] else settings.EXEC_TIMEOUT_MOST
            context = shells.build_context(pk, options["shell"], cwd=None, env={})
            request = AgentRequest(cli, agent_options, context.env, context.cwd, timeout)
            row = lifecycle.create(pk, request, run_id=uuid4(), now=now, actor=COMMAND_LINE)
            lifecycle.execute(row, request, on_message=self._print, now=database_time.now(), actor=COMMAND_LINE)
            row.refresh_from_db()
            self.stderr.write(f"{row.state}: {row.violation or row.result or row.note}")
            sys.exit(row.state != AgentRunState.COMPLETED)

    def _print(self, message: dict[str, Any]) -> None:
        self.stdout.write(json.dumps(message))
        self.stdout.flush()


def _parse_cost(text: str | None) -> Decimal | None:
    if text is None:
        return None
    try:
        return Decimal(text)
    except InvalidOperation:
        raise CommandError(f"--max-cost: not an amount: {text[:40]}") from None

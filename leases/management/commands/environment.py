"""manage.py environment: list, show, create, start and end environments, as the HTTP API does."""

import json
from argparse import ArgumentParser, BooleanOptionalAction
from typing import Any

from django.core.management.base import BaseCommand

from leases import placement
from leases.environments import lifecycle, play
from leases.environments.models import Environment
from leases.management.base import parse_environment_id, report_errors
from leases.models import Lease
from leases.tasks import enqueue_reclaim
from sandboxes.db import database_time
from sandboxes.formatting import pluralize


class Command(BaseCommand):
    help = "Show, create, start and end environments."

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        listing = actions.add_parser("list", help="list environments, newest first")
        listing.add_argument("--open", action="store_true", help="only those that have not ended")
        listing.add_argument("--limit", type=int, default=50, help="maximum number of rows; default: %(default)s")
        show = actions.add_parser("show", help="print an environment with its members and costs")
        create = actions.add_parser("create", help="create an environment before its first lease")
        create.add_argument("--type", required=True, help="environment type, such as catan")
        create.add_argument("--phase", default="", help="phase, such as combat")
        start = actions.add_parser("start", help="record the start")
        phase = actions.add_parser("phase", help="set the phase")
        end = actions.add_parser("end", help="end an environment and its active leases")
        end.add_argument("--outcome", help="text, stored with the end")
        for parser_ in (show, create, start, phase, end):
            parser_.add_argument("environment", metavar="ENVIRONMENT_ID")
        phase.add_argument("phase", metavar="PHASE")
        pools = actions.add_parser("pools", help="print or set the pools of an environment type, the first one tried first")
        pools.add_argument("type", metavar="TYPE")
        pools.add_argument("pools", nargs="*", metavar="POOL", help="new list; empty: print the list")
        pools.add_argument("--cheapest", action=BooleanOptionalAction, help="try the pools by their hourly price")

    def handle(self, *args: Any, action: str, verbosity: int, **options: Any) -> None:
        with report_errors(verbosity):
            if "environment" in options:
                options["environment"] = parse_environment_id(options["environment"])
            getattr(self, f"_{action}")(options)

    def _list(self, options: dict[str, Any]) -> None:
        rows = Environment.objects.filter(ended_at__isnull=True) if options["open"] else Environment.objects.all()
        for row in rows[: max(options["limit"], 0)]:
            self._print(row)

    def _show(self, options: dict[str, Any]) -> None:
        row = lifecycle.find(options["environment"])
        self._print(row)
        members = play.list_members(Lease.objects.all(), row.pk)
        counts, costs = play.count_turns(members), play.calculate_costs(members)
        for lease in members:
            turns = counts.get(lease.pk, play.TurnTotals())
            self.stdout.write(
                f"  {lease.agent_did} {lease.pk} {lease.status} {lease.end_reason} "
                f"{turns.turns} turns, {turns.skipped} skipped, "
                f"{costs[lease.pk].total.normalize():f} USD"
            )
        if row.outcome_text:
            self.stdout.write(f"  outcome: {json.dumps(row.outcome)}")

    def _create(self, options: dict[str, Any]) -> None:
        row, is_new = lifecycle.create(
            options["environment"], options["type"], phase=options["phase"], now=database_time.now(), actor="command line"
        )
        self.stdout.write(f"{row.pk} {'created' if is_new else 'exists'}")

    def _start(self, options: dict[str, Any]) -> None:
        started = lifecycle.start(options["environment"], now=database_time.now(), actor="command line")
        self.stdout.write(f"{options['environment']} {'started' if started else 'had started'}")

    def _phase(self, options: dict[str, Any]) -> None:
        changed = lifecycle.set_phase(options["environment"], options["phase"], actor="command line")
        self.stdout.write(f"{options['environment']} phase {'set' if changed else 'unchanged'}")

    def _end(self, options: dict[str, Any]) -> None:
        outcome = lifecycle.NOTHING if options["outcome"] is None else options["outcome"]
        ended = lifecycle.end(options["environment"], outcome=outcome, now=database_time.now(), actor="command line")
        if ended:
            enqueue_reclaim()
        self.stdout.write(f"{options['environment']} ended: {pluralize(len(ended), 'lease', 'leases')}")

    def _pools(self, options: dict[str, Any]) -> None:
        environment_type = placement.find_type(options["type"])
        if options["pools"] or options["cheapest"] is not None:
            placement.set_pools(environment_type, options["pools"] or None, cheapest=options["cheapest"])
        names = " ".join(pool.name for pool in placement.list_pools(environment_type))
        self.stdout.write(f"{environment_type}: {names}{' (cheapest first)' if environment_type.cheapest_pool else ''}")

    def _print(self, row: Environment) -> None:
        self.stdout.write(f"{row.pk} {row.type_id} {row.status} {row.phase or '-'} {row.created_at:%Y-%m-%dT%H:%M:%SZ}")

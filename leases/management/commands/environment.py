"""manage.py environment: list, show, create, start and end environments, as the HTTP API does."""

from argparse import ArgumentParser, BooleanOptionalAction
from typing import Any

from django.core.management.base import BaseCommand

from leases import placement
from leases.environments import lifecycle, participants, play
from leases.environments.models import Environment
from leases.management.base import parse_did, parse_environment_id, report_errors
from leases.models import Lease
from leases.tasks import enqueue_reclaim
from sandboxes.audit import COMMAND_LINE
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
        create.add_argument("--project", default="", help="project of its agents; default: the default project")
        create.add_argument("--agent", action="append", default=[], metavar="DID", help="participant; may be repeated")
        create.add_argument(
            "--open-to-project",
            action=BooleanOptionalAction,
            help="every agent of the project may enter; default: as the type says",
        )
        create.add_argument("--reopen", action="store_true", help="open an environment again that has ended")
        start = actions.add_parser("start", help="record the start")
        phase = actions.add_parser("phase", help="set the phase")
        add = actions.add_parser("add", help="let agents enter the environment")
        remove = actions.add_parser("remove", help="remove a participant and end its lease")
        access = actions.add_parser("access", help="set who may enter: every agent of the project, or participants only")
        end = actions.add_parser("end", help="end an environment and its active leases")
        end.add_argument("--outcome", help="text, stored with the end")
        for parser_ in (show, create, start, phase, end, add, remove, access):
            parser_.add_argument("environment", metavar="ENVIRONMENT_ID")
        access.add_argument("access", choices=["project", "participants"])
        add.add_argument("agents", nargs="+", metavar="DID")
        remove.add_argument("agent", metavar="DID")
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
        rows = Environment.objects.select_related("project")
        if options["open"]:
            rows = rows.filter(ended_at__isnull=True)
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
        for did in row.participants.values_list("agent_did", flat=True):
            self.stdout.write(f"  participant: {did}")
        for outcome in row.outcomes.all():
            self.stdout.write(f"  outcome of {outcome.ended_at:%Y-%m-%dT%H:%M:%SZ}: {outcome.text}")

    def _create(self, options: dict[str, Any]) -> None:
        request = lifecycle.NewEnvironment(
            options["environment"], options["type"], phase=options["phase"], project=options["project"],
            agents=[parse_did(did) for did in options["agent"]], open_to_project=options["open_to_project"],
            reopen=options["reopen"],
        )  # fmt: skip
        row, is_new = lifecycle.create(request, now=database_time.now(), actor=COMMAND_LINE)
        self.stdout.write(f"{row.pk} {'created' if is_new else 'exists'}")

    def _start(self, options: dict[str, Any]) -> None:
        started = lifecycle.start(options["environment"], now=database_time.now(), actor=COMMAND_LINE)
        self.stdout.write(f"{options['environment']} {'started' if started else 'had started'}")

    def _phase(self, options: dict[str, Any]) -> None:
        now = database_time.now()
        changed = lifecycle.set_phase(options["environment"], options["phase"], now=now, actor=COMMAND_LINE)
        self.stdout.write(f"{options['environment']} phase {'set' if changed else 'unchanged'}")

    def _add(self, options: dict[str, Any]) -> None:
        agents = [parse_did(did) for did in options["agents"]]
        added = participants.add(options["environment"], agents, now=database_time.now(), actor=COMMAND_LINE)
        self.stdout.write(f"{options['environment']}: {pluralize(added, 'participant', 'participants')} added")

    def _remove(self, options: dict[str, Any]) -> None:
        agent = parse_did(options["agent"])
        ended = participants.remove(options["environment"], agent, now=database_time.now(), actor=COMMAND_LINE)
        if ended:
            enqueue_reclaim()
        self.stdout.write(f"{options['environment']}: {agent} removed, {pluralize(len(ended), 'lease', 'leases')} ended")

    def _access(self, options: dict[str, Any]) -> None:
        is_open = options["access"] == "project"
        changed = participants.set_access(options["environment"], is_open, now=database_time.now(), actor=COMMAND_LINE)
        self.stdout.write(f"{options['environment']} access {'set' if changed else 'unchanged'}")

    def _end(self, options: dict[str, Any]) -> None:
        outcome = lifecycle.NOTHING if options["outcome"] is None else options["outcome"]
        ended = lifecycle.end(options["environment"], outcome=outcome, now=database_time.now(), actor=COMMAND_LINE)
        if ended:
            enqueue_reclaim()
        self.stdout.write(f"{options['environment']} ended: {pluralize(len(ended), 'lease', 'leases')}")

    def _pools(self, options: dict[str, Any]) -> None:
        environment_type = placement.find_type(options["type"])
        if options["pools"] or options["cheapest"] is not None:
            placement.set_pools(
                environment_type, options["pools"] or None, cheapest=options["cheapest"], now=database_time.now(),
                actor=COMMAND_LINE,
            )  # fmt: skip
        names = " ".join(pool.name for pool in placement.list_pools(environment_type))
        self.stdout.write(f"{environment_type}: {names}{' (cheapest first)' if environment_type.cheapest_pool else ''}")

    def _print(self, row: Environment) -> None:
        self.stdout.write(
            f"{row.pk} {row.type_id} {row.status} {row.phase or '-'} {row.project} {row.created_at:%Y-%m-%dT%H:%M:%SZ}"
        )

"""manage.py quota: list, set and remove limits and guarantees of one agent's sandboxes in a pool."""

import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import transaction
from django.db.models import Q

from leases.agents import describe_unknown_agent
from leases.management.base import parse_did, report_errors
from sandboxes import audit
from sandboxes.db import database_time
from sandboxes.management.columns import add_column_options, describe_columns, find_named, parse_columns, validate_row
from sandboxes.models import Pool, Quota

COLUMNS = ("most", "guaranteed")


class Command(BaseCommand):
    help = "List, set and remove quotas: the maximum and the guaranteed number of sandboxes of an agent in a pool."

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        listing = actions.add_parser("list", help="list quotas by pool and agent")
        listing.add_argument("--pool", metavar="NAME", help="quotas in this pool")
        listing.add_argument("--agent", metavar="DID", help="quotas of this agent")
        listing.add_argument("--all", action="store_true", help="also agents without a limit or guarantee")
        listing.add_argument("--json", action="store_true", help="one line of JSON")
        change = actions.add_parser("set", help="set the limit or the guarantee of an agent; effective at once")
        add_column_options(change, Quota, COLUMNS)
        remove = actions.add_parser("remove", help="remove limit and guarantee; the use is still counted")
        for subparser in (change, remove):
            subparser.add_argument("pool", metavar="POOL")
            subparser.add_argument("agent", metavar="DID")
            subparser.add_argument("--dry-run", action="store_true", help="check and print the quota, and change nothing")

    def handle(self, *args: Any, action: str, verbosity: int, **options: Any) -> None:
        with report_errors(verbosity):
            getattr(self, f"_{action}")(options)

    def _list(self, options: dict[str, Any]) -> None:
        rows = Quota.objects.select_related("pool").order_by("pool__name", "agent_did")
        if options["pool"] is not None:
            rows = rows.filter(pool=find_named(Pool, options["pool"]))
        if options["agent"] is not None:
            rows = rows.filter(agent_did=parse_did(options["agent"]))
        if not options["all"]:
            rows = rows.filter(Q(most__isnull=False) | Q(guaranteed__gt=0))
        if options["json"]:
            names = ("agent_did", "used", "most", "guaranteed")
            documents = [{"pool": row.pool.name, **describe_columns(row, names)} for row in rows]
            self.stdout.write(json.dumps({"results": documents}))
            return
        for row in rows:
            self.stdout.write(_format_quota(row))

    def _set(self, options: dict[str, Any]) -> None:
        changes = parse_columns(Quota, COLUMNS, options)
        if not changes:
            raise CommandError("State --most or --guaranteed.")
        pool, agent = find_named(Pool, options["pool"]), parse_did(options["agent"])
        row = Quota.objects.filter(pool=pool, agent_did=agent).first() or Quota(pool=pool, agent_did=agent)
        before = {name: getattr(row, name) for name in changes}
        validate_row(row, changes)
        if not options["dry_run"]:
            with transaction.atomic():
                row, _ = Quota.objects.update_or_create(pool=pool, agent_did=agent, defaults=changes)
                detail = audit.describe_changes(before, row)
                audit.record(row, "Set quota", detail, actor=audit.COMMAND_LINE, now=database_time.now())
        if warning := describe_unknown_agent(agent):
            self.stderr.write(f"Warning: {warning}")
        self.stdout.write(f"{'would be set' if options['dry_run'] else 'set'}: {_format_quota(row)}")

    def _remove(self, options: dict[str, Any]) -> None:
        pool, agent = find_named(Pool, options["pool"]), parse_did(options["agent"])
        rows = Quota.objects.filter(Q(most__isnull=False) | Q(guaranteed__gt=0), pool=pool, agent_did=agent)
        # The row stays: it counts the agent's sandboxes in the pool.
        row = rows.first()
        if row is None:
            raise CommandError(f"{agent} has no quota in the pool {pool.name}.")
        if not options["dry_run"]:
            with transaction.atomic():
                rows.update(most=None, guaranteed=0)
                detail = audit.describe_values(row, COLUMNS)
                audit.record(row, "Remove quota", f"before: {detail}", actor=audit.COMMAND_LINE, now=database_time.now())
        self.stdout.write(f"{'would be removed' if options['dry_run'] else 'removed'}: {pool.name} {agent}")


def _format_quota(row: Quota) -> str:
    most = "no limit" if row.most is None else f"at most {row.most}"
    return f"{row.pool.name} {row.agent_did} {row.used} used, {most}, {row.guaranteed} guaranteed"

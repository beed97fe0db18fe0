"""manage.py snapshot: take, restore and fork workspace snapshots, as the HTTP API does."""

import json
from argparse import ArgumentParser
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError

from billing.management.options import validate_options
from leases import fork, snapshots
from leases.api.leases import render_lease
from leases.api.snapshots import NewSnapshotSerializer, apply_fork_defaults, serialize_snapshot
from leases.leasing import LeaseRequest
from leases.management.base import add_lease_action, parse_did, parse_environment_id, parse_lease_id, report_errors
from leases.models import Lease
from sandboxes.audit import COMMAND_LINE
from sandboxes.db import database_time


class Command(BaseCommand):
    help = "Take and restore snapshots of a lease's workspace, and fork a lease. `manage.py state snapshots` lists them."

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        take = add_lease_action(actions, "take", help="store the current workspace; a cold sandbox is not woken")
        restore = add_lease_action(actions, "restore", help="replace the workspace, effective from the next use")
        forked = add_lease_action(actions, "fork", help="grant a lease in another environment with a copy of the workspace")
        take.add_argument("--name", help="name of the snapshot")
        restore.add_argument("snapshot", metavar="SNAPSHOT_ID")
        forked.add_argument("environment", metavar="ENVIRONMENT_ID", help="environment of the new lease")
        forked.add_argument("--snapshot", metavar="SNAPSHOT_ID", help="default: the current workspace")
        forked.add_argument("--agent", metavar="DID", help="default: agent of the forked lease")
        forked.add_argument("--type", metavar="NAME", help="environment type; default: that of the forked lease")
        forked.add_argument("--pool", metavar="NAME", default="", help="default: pool of the forked lease, or of the type")

    def handle(self, *args: Any, action: str, verbosity: int, lease: str, **options: Any) -> None:
        with report_errors(verbosity):
            getattr(self, f"_{action}")(parse_lease_id(lease), options)

    def _take(self, pk: UUID, options: dict[str, Any]) -> None:
        name = validate_options(NewSnapshotSerializer, {"name": options["name"]})["name"]
        taken = snapshots.take_snapshot(pk, name=name, now=database_time.now(), actor=COMMAND_LINE)
        line = f"{taken.pk} taken: {taken.size_bytes} bytes"
        self.stdout.write(json.dumps(serialize_snapshot(taken)) if options["json"] else line)

    def _restore(self, pk: UUID, options: dict[str, Any]) -> None:
        source = _parse_snapshot_id(options["snapshot"])
        restored = snapshots.restore_snapshot(pk, source, now=database_time.now(), actor=COMMAND_LINE)
        line = f"{source} restored as {restored.pk}"
        self.stdout.write(json.dumps(serialize_snapshot(restored)) if options["json"] else line)

    def _fork(self, pk: UUID, options: dict[str, Any]) -> None:
        lease, now = Lease.objects.select_related("pool", "environment_type").get(pk=pk), database_time.now()
        stated = {
            "agent_did": parse_did(options["agent"]) if options["agent"] is not None else None,
            "environment_type": options["type"],
            "pool": options["pool"],
        }
        request = LeaseRequest(
            environment_id=parse_environment_id(options["environment"]), **apply_fork_defaults(stated, lease)
        )
        snapshot = _parse_snapshot_id(options["snapshot"]) if options["snapshot"] is not None else None
        granted, is_new = fork.fork(lease, request, snapshot=snapshot, now=now, actor=COMMAND_LINE)
        line = f"{granted.pk} {'forked' if is_new else 'already held'}: {granted.sandbox_id}"
        self.stdout.write(json.dumps(render_lease(granted, now=now, is_new=is_new)) if options["json"] else line)


def _parse_snapshot_id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise CommandError(f"{text[:80]!r} is not a snapshot id.") from None

"""manage.py sandboxes: everything that exists at the engines; destroy or adopt what has no owner."""

import json
from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError

from leases.adoption import adopt_sandbox
from leases.api.inventory import build_inventory_document
from leases.management.base import parse_lease_id, report_errors
from sandboxes.audit import COMMAND_LINE
from sandboxes.db import database_time
from sandboxes.formatting import format_path
from sandboxes.inventory.entries import Finding, collect_inventory
from sandboxes.inventory.listings import WITHOUT_RESPONSE, EngineListing, ListingState
from sandboxes.inventory.ownership import find_ownerless
from sandboxes.inventory.removal import destroy_ownerless
from sandboxes.providers.registry import PROVIDERS


class Command(BaseCommand):
    help = (
        "List everything that exists at the engines and in the vendors' accounts, joined with the rows of this installation: "
        "sandboxes without an owner, missing ones, the holders of the others, and prices per hour. Destroy or adopt sandboxes "
        "without an owner."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        commands = parser.add_subparsers(dest="action", required=True)
        listing = commands.add_parser("list", help="list everything")
        listing.add_argument(
            "--finding", choices=[finding.value for finding in Finding], help="only sandboxes with this finding"
        )
        shown = commands.add_parser("show", help="show one sandbox")
        destroyed = commands.add_parser("destroy", help="destroy a sandbox without a row. Its files are not stored")
        adopted = commands.add_parser("adopt", help="insert the row of a sandbox without a row, in quarantine")
        for command in (listing, shown):
            command.add_argument("--json", action="store_true", help="print the document of the HTTP API")
        for command in (shown, destroyed, adopted):
            command.add_argument("provider", choices=[*PROVIDERS])
            command.add_argument("name", help="name at the engine")
        for command in (destroyed, adopted):
            command.add_argument("--reason", required=True, help="recorded in the log")
            command.add_argument("--dry-run", action="store_true", help="check whether it has an owner, without changes")
        adopted.add_argument("--pool", default="", help="pool of the row. Default: the pool with its owner label")
        adopted.add_argument("--lease", metavar="LEASE_ID", help="active lease that gets /workspace as a snapshot")

    def handle(self, *args: Any, action: str, **options: Any) -> None:
        try:
            with report_errors(options["verbosity"]):
                getattr(self, f"_{action}")(options)
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error

    def _list(self, options: dict[str, Any]) -> None:
        inventory = collect_inventory(now=database_time.now(), grace=settings.ORPHAN_GRACE)
        finding = options["finding"] or ""
        document = build_inventory_document(inventory, finding=finding)
        if options["json"]:
            self.stdout.write(json.dumps(document, indent=2))
        else:
            self._print_engines(inventory.engines)
            for each in document["sandboxes"]:
                self.stdout.write(_format_line(each))
        if silent := [engine for engine in inventory.engines if engine.state in WITHOUT_RESPONSE]:
            raise CommandError(f"No listing of {', '.join(engine.name for engine in silent)}: the list is not complete.")

    def _print_engines(self, engines: list[EngineListing]) -> None:
        for engine in engines:
            result = f"{len(engine.sandboxes)} listed" if engine.state == ListingState.LISTED else engine.state.value
            self.stdout.write(f"# {engine.name} ({engine.provider}): {result} {engine.error}".rstrip())

    def _show(self, options: dict[str, Any]) -> None:
        inventory = collect_inventory(now=database_time.now(), grace=settings.ORPHAN_GRACE)
        documents = build_inventory_document(inventory)["sandboxes"]
        target = options["provider"], options["name"]
        found = next((each for each in documents if (each["provider"], each["name"]) == target), None)
        if found is None:
            states = {engine.name: engine.state.value for engine in inventory.engines if engine.provider == target[0]}
            raise CommandError(f"No such sandbox. Engines: {states or 'none of this provider'}.")
        lines = [json.dumps(found, indent=2)] if options["json"] else [f"{key}: {value}" for key, value in found.items()]
        self.stdout.write("\n".join(lines))

    def _destroy(self, options: dict[str, Any]) -> None:
        existed = destroy_ownerless(
            options["provider"], options["name"], now=database_time.now(), grace=settings.ORPHAN_GRACE, actor=COMMAND_LINE,
            reason=options["reason"], dry_run=options["dry_run"],
        )  # fmt: skip
        done = "would be destroyed" if options["dry_run"] else "destroyed"
        self.stdout.write(f"{options['name']}: {done if existed else 'not listed any more'}")

    def _adopt(self, options: dict[str, Any]) -> None:
        now, provider, name = database_time.now(), options["provider"], options["name"]
        if options["dry_run"]:
            found = find_ownerless(provider, name, now=now, grace=settings.ORPHAN_GRACE)
            self.stdout.write(f"{name}: would be adopted into the pool {options['pool'] or found.pool or 'that --pool names'}")
            return
        lease_id = parse_lease_id(options["lease"]) if options["lease"] else None
        adopted = adopt_sandbox(
            provider, name, pool_name=options["pool"], lease_id=lease_id, now=now, actor=COMMAND_LINE, reason=options["reason"]
        )
        files = f", its files are the snapshot {adopted.snapshot.pk}" if adopted.snapshot else ""
        self.stdout.write(f"{adopted.sandbox.pk}: in quarantine{files}")


def _format_line(each: dict[str, Any]) -> str:
    """Format one sandbox: finding, provider, name, whose, states, time and price."""
    whose = each["sandbox_id"] or (f"pool {each['pool']}" if each["pool"] else f"owner label {each['owner']}")
    states = "/".join(state for state in (each["state"], each["process_state"]) if state)
    price = f"{each['usd_per_hour']} USD/h" if each["usd_per_hour"] is not None else "no price"
    place = f"{each['provider']}  {format_path(each['name'])}"
    return f"{each['finding']}  {place}  {format_path(whose)}  {states}  {each['since']}  {price}"

"""manage.py shells: shells of a lease, as the HTTP API has them. (`manage.py shell` is Django's own command.)"""

import json
from argparse import ArgumentParser
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError

from billing.management.options import validate_options
from leases import leasing, shells
from leases.api.shells import NewShellSerializer, serialize_shell
from leases.management.base import add_lease_action, parse_env, parse_lease_id, report_errors
from leases.models import Lease, Shell
from sandboxes import formatting
from sandboxes.db import database_time
from sandboxes.management.base import require_utf8


class Command(BaseCommand):
    help = (
        "List, create and delete shells of a lease: a working directory and environment variables for the commands that name "
        "the shell. `manage.py exec --shell NAME` runs a command in one, `manage.py processes start --shell NAME` a process."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        add_lease_action(actions, "list", help="list the shells of a lease, by name")
        create = add_lease_action(actions, "create", help="create a shell; the sandbox is not woken")
        delete = add_lease_action(
            actions, "delete", help="delete a shell and its variables; commands in progress continue", json_lines=False
        )
        for subparser in (create, delete):
            subparser.add_argument("name", metavar="NAME")
        create.add_argument("--cwd", metavar="DIRECTORY", help="working directory; default: /workspace")
        create.add_argument(
            "--env", action="append", default=[], metavar="NAME[=VALUE]",
            help="environment variable, stored encrypted; without a value it is that of this command; may be repeated",
        )  # fmt: skip

    def handle(self, *args: Any, action: str, verbosity: int, lease: str, **options: Any) -> None:
        with report_errors(verbosity):
            getattr(self, f"_{action}")(Lease.objects.get(pk=parse_lease_id(lease)).pk, options)

    def _list(self, pk: UUID, options: dict[str, Any]) -> None:
        documents = [serialize_shell(shell) for shell in Shell.objects.filter(lease=pk)]
        lines = [json.dumps({"results": documents})] if options["json"] else map(_format_line, documents)
        for line in lines:
            self.stdout.write(line)

    def _create(self, pk: UUID, options: dict[str, Any]) -> None:
        require_utf8("NAME", options["name"])
        require_utf8("--cwd", options["cwd"] or "")
        data = validate_options(NewShellSerializer, {**options, "env": parse_env(options["env"])})
        shell = shells.create_shell(pk, data["name"], env=data["env"], cwd=data["cwd"], now=database_time.now())
        document = serialize_shell(shell)
        self.stdout.write(json.dumps(document) if options["json"] else f"{_format_line(document)} created")

    def _delete(self, pk: UUID, options: dict[str, Any]) -> None:
        name = require_utf8("NAME", options["name"])
        leasing.require_active(pk, now=database_time.now())
        if not shells.delete_shell(pk, name):
            raise CommandError("The lease has no such shell.")
        self.stdout.write(f"{name} deleted")


def _format_line(document: dict[str, Any]) -> str:
    """Format a shell: name, working directory and the names of its variables."""
    return formatting.format_path(" ".join([document["name"], document["cwd"], *document["env_names"]]))

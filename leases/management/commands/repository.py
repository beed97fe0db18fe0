"""manage.py repository: Git repositories of coding tasks. Credentials are read from stdin and never printed."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from leases.coding import repositories
from leases.coding.models import ForgeKind, Repository
from leases.management.base import read_secret, report_errors
from sandboxes.audit import COMMAND_LINE
from sandboxes.db import database_time


class Command(BaseCommand):
    help = "Add, list, disable and remove the Git repositories of coding tasks."

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        add = actions.add_parser("add", help="add a repository, or change the given settings of one")
        add.add_argument("name", metavar="NAME")
        add.add_argument("--clone-url", help="https or ssh URL, or absolute path on this host")
        add.add_argument("--base-branch", help="default: main")
        add.add_argument("--forge", choices=ForgeKind.values, help="default: bare")
        add.add_argument("--api-url", help="base URL of a GitHub-compatible REST API")
        add.add_argument("--forge-project", help="owner/name at the forge")
        add.add_argument("--project", help="project whose environments use it; default: the default project")
        add.add_argument("--ssh-key-path", help="private key for ssh, on this host")
        add.add_argument("--depth", type=int, help="commits in a sandbox's copy; default: 50")
        add.add_argument("--max-mib", type=int, help="limit of a copy's objects; default: 500")
        add.add_argument("--max-change-mib", type=int, help="limit of a submission; default: 10")
        add.add_argument("--protected-path", action="append", dest="protected_paths", metavar="PATTERN", help="repeatable")
        add.add_argument(
            "--allowed-path", action="append", dest="allowed_paths", metavar="PATTERN",
            help="built-in protected path that an agent may change; repeatable",
        )  # fmt: skip
        add.add_argument("--token-stdin", action="store_true", help="read the token for https and the API from stdin")
        actions.add_parser("list", help="list the repositories")
        for name, purpose in (("enable", "accept new tasks"), ("disable", "refuse new tasks"), ("remove", "remove it")):
            actions.add_parser(name, help=purpose).add_argument("name", metavar="NAME")

    def handle(self, *args: Any, action: str, verbosity: int, **options: Any) -> None:
        with report_errors(verbosity):
            getattr(self, f"_{action}")(options)

    def _add(self, options: dict[str, Any]) -> None:
        token = read_secret() if options["token_stdin"] else None
        names = (
            "clone_url", "base_branch", "forge", "api_url", "forge_project", "project", "ssh_key_path", "depth",
            "max_mib", "max_change_mib", "protected_paths", "allowed_paths",
        )  # fmt: skip
        fields = {name: options[name] for name in names}
        row, is_new = repositories.save(options["name"], token=token, now=database_time.now(), actor=COMMAND_LINE, **fields)
        self.stdout.write(f"{row.name} {'added' if is_new else 'changed'}: {row.clone_url} ({row.forge})")

    def _list(self, options: dict[str, Any]) -> None:
        for row in Repository.objects.order_by("name"):
            state = "" if row.enabled else " disabled"
            self.stdout.write(f"{row.name} {row.clone_url} {row.base_branch} {row.forge}{state}")

    def _enable(self, options: dict[str, Any]) -> None:
        self._set_enabled(options["name"], True)

    def _disable(self, options: dict[str, Any]) -> None:
        self._set_enabled(options["name"], False)

    def _set_enabled(self, name: str, enabled: bool) -> None:
        now = database_time.now()
        repositories.set_enabled(repositories.find(name).name, enabled, now=now, actor=COMMAND_LINE)
        self.stdout.write(f"{name} {'enabled' if enabled else 'disabled'}")

    def _remove(self, options: dict[str, Any]) -> None:
        repositories.remove(options["name"], now=database_time.now(), actor=COMMAND_LINE)
        self.stdout.write(f"{options['name']} removed")

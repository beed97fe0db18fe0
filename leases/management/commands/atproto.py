"""manage.py atproto: accounts of agents at repository servers, and their records. Passwords are read from stdin."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from leases.atproto import accounts, records
from leases.atproto.models import AtprotoAccount, AtprotoRecord, RecordStatus
from leases.management.base import parse_did, read_secret, report_errors
from sandboxes.audit import COMMAND_LINE
from sandboxes.db import database_time


class Command(BaseCommand):
    help = "Set, list and remove the AT Protocol accounts of agents. List records, and repeat failed ones."

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        set_account = actions.add_parser("set", help="set the account of an agent")
        set_account.add_argument("agent", metavar="AGENT")
        set_account.add_argument("--service-url", required=True, help="base URL of the repository's server (PDS)")
        set_account.add_argument("--service-did", default="", help="DID of the server: the audience of service tokens")
        set_account.add_argument(
            "--password-stdin", action="store_true", help="write in a session opened with the password on stdin"
        )
        actions.add_parser("list", help="list the accounts")
        actions.add_parser("remove", help="remove the account of an agent").add_argument("agent", metavar="AGENT")
        listing = actions.add_parser("records", help="list the newest records")
        listing.add_argument("--status", choices=RecordStatus.values)
        listing.add_argument("--limit", type=int, default=50)
        actions.add_parser("retry", help="repeat the requests of all failed records")

    def handle(self, *args: Any, action: str, verbosity: int, **options: Any) -> None:
        with report_errors(verbosity):
            getattr(self, f"_{action}")(options)

    def _set(self, options: dict[str, Any]) -> None:
        account, is_new = accounts.set_account(
            parse_did(options["agent"]),
            service_url=options["service_url"],
            service_did=options["service_did"],
            password=read_secret() if options["password_stdin"] else None,
            now=database_time.now(),
            actor=COMMAND_LINE,
        )
        self.stdout.write(f"{account.agent_did} {'added' if is_new else 'changed'}: {_describe(account)}")

    def _list(self, options: dict[str, Any]) -> None:
        for account in AtprotoAccount.objects.all():
            self.stdout.write(f"{account.agent_did} {_describe(account)}")

    def _remove(self, options: dict[str, Any]) -> None:
        if not accounts.remove_account(options["agent"], now=database_time.now(), actor=COMMAND_LINE):
            raise CommandError("The agent has no AT Protocol account.")
        self.stdout.write(f"{options['agent']} removed")

    def _records(self, options: dict[str, Any]) -> None:
        rows = AtprotoRecord.objects.all()
        if options["status"]:
            rows = rows.filter(status=options["status"])
        for row in rows[: max(options["limit"], 0)]:
            self.stdout.write(" ".join(filter(None, [row.status, row.agent_did, str(row), row.uri, row.error])))

    def _retry(self, options: dict[str, Any]) -> None:
        now = database_time.now()
        failed = AtprotoRecord.objects.filter(status=RecordStatus.FAILED)
        repeated = sum(records.retry(row, now=now) for row in failed.iterator())
        self.stdout.write(f"{repeated} to be repeated by the sweep `records`")


def _describe(account: AtprotoAccount) -> str:
    return f"{account.service_url} {account.authentication}"

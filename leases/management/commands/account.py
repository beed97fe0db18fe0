"""manage.py account: list, show, add and change accounts, and assign agents to them."""

from argparse import ArgumentParser
from collections.abc import Collection
from datetime import date
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import CommandError
from django.db import transaction

from billing.dates import to_utc_date
from billing.models import HOUSE_ACCOUNT_NAME, Account, Membership
from leases.agents import describe_unknown_agent
from leases.management.base import parse_did
from sandboxes import audit
from sandboxes.db import database_time
from sandboxes.formatting import pluralize
from sandboxes.management.columns import find_named
from sandboxes.management.named_rows import NamedRowCommand


class Command(NamedRowCommand):
    help = "List, show, add and change accounts, which pay for agents. `manage.py statements` closes their months."
    model = Account
    columns = ("title",)

    def add_actions(self, actions: Any) -> Collection[ArgumentParser]:
        assign = actions.add_parser("assign", help=f"let an account pay for an agent; {HOUSE_ACCOUNT_NAME} ends that")
        assign.add_argument("agent", metavar="DID")
        assign.add_argument(
            "--since", metavar="DAY",
            help="first day (UTC), such as 2026-11-01. Default: the earliest possible for the first account, otherwise today",
        )  # fmt: skip
        assign.add_argument("--dry-run", action="store_true", help="check and print the membership, and change nothing")
        return (assign,)

    def describe(self, row: Account) -> dict[str, Any]:
        present = _find_present_members().filter(account=row).order_by("agent_did")
        return super().describe(row) | {"agents": [*present.values_list("agent_did", flat=True)]}

    def format_line(self, row: Account) -> str:
        count = _find_present_members().filter(account=row).count()
        members = "all other agents" if row.name == HOUSE_ACCOUNT_NAME else pluralize(count, "agent", "agents")
        return f"{row.name} {members}{f' ({row.title})' if row.title else ''}"

    def _assign(self, options: dict[str, Any]) -> None:
        agent, account = parse_did(options["agent"]), find_named(Account, options["name"])
        membership = Membership(agent_did=agent, account=account)
        if options["since"] is not None:
            membership.since = _parse_day(options["since"])
        if membership.changes_nothing():
            raise CommandError(f"The agent already belongs to {account} on that day.")
        try:
            if options["dry_run"]:
                membership.full_clean()
            else:
                with transaction.atomic():
                    membership.save()
                    detail = f"{account} from {membership.since}"
                    audit.record(membership, "Assign agent", detail, actor=audit.COMMAND_LINE, now=database_time.now())
        except ValidationError as error:
            name, messages = next(iter(error.message_dict.items()))
            raise CommandError(f"{'--since: ' if name == 'since' else ''}{' '.join(messages)}") from None
        if warning := describe_unknown_agent(agent):
            self.stderr.write(f"Warning: {warning}")
        outcome = "would be assigned" if options["dry_run"] else "assigned"
        self.stdout.write(f"{agent} {outcome} to {account} from {membership.since} on")


def _find_present_members() -> Any:
    return Membership.objects.on(to_utc_date(database_time.now()))


def _parse_day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise CommandError("--since: must be a day such as 2026-11-01.") from None

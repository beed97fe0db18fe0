"""manage.py statements: months of accounts, closed."""

import json as encoding
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone

from billing import statements
from billing.api.statements import (
    StatementQuerySerializer,
    render_lines_csv,
    render_statement,
    render_statement_detail,
    render_statements_csv,
)
from billing.management.options import format_table, validate_options
from billing.models import Account, BillableItem, Statement
from billing.pricing import format_decimal


class Command(BaseCommand):
    help = "List closed months, show one, or close one: of one account, or of each that has something in it."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("what", choices=["list", "show", "close"])
        parser.add_argument("--account", metavar="NAME", help="of this account only")
        parser.add_argument("--month", metavar="YYYY-MM", help="UTC, such as 2026-11")
        shape = parser.add_mutually_exclusive_group()
        shape.add_argument("--csv", action="store_true", help="of `show` the lines, of `list` and `close` a line for each")
        shape.add_argument("--json", action="store_true", help="one line of JSON")

    def handle(self, *args: Any, what: str, csv: bool, json: bool, **given: Any) -> None:
        said = validate_options(StatementQuerySerializer, given)
        if "account" in said and not Account.objects.filter(name=said["account"]).exists():
            raise CommandError(f"--account: there is no {said['account']!r}.")
        refused: list[str] = []
        if what == "close":
            refused = self._close(said)
        only = {field: said[name] for name, field in (("account", "account__name"), ("month", "month")) if name in said}
        found = [*Statement.objects.filter(**only).select_related("account").order_by("month", "account__name")]
        if what == "show":
            self._show(said, found, csv, json)
        elif csv:
            self.stdout.write(render_statements_csv(found), ending="")
        elif json:
            self.stdout.write(encoding.dumps({"results": [_render_json_statement(row) for row in found]}))
        else:
            self.stdout.write(format_table(["account", "month", "USD", "credit", "to pay"], [*map(_format_row, found)]))
        if refused:
            raise CommandError("\n".join(refused))

    def _close(self, said: dict[str, Any]) -> list[str]:
        """What could not be closed, and why."""
        if "month" not in said:
            raise CommandError("--month: say which one to close.")
        accounts = (
            Account.objects.filter(name=said["account"]) if "account" in said else statements.find_due_accounts(said["month"])
        )
        refused = []
        for account in accounts:
            try:
                statements.close_month(account, said["month"], now=timezone.now(), actor="command line")
            except statements.MonthNotClosable as why:
                refused.append(f"{account}: {why}")
        return refused

    def _show(self, said: dict[str, Any], found: list[Statement], csv: bool, json: bool) -> None:
        if not {"account", "month"} <= said.keys():
            raise CommandError("show needs --account and --month.")
        if not found:
            raise CommandError(f"{said['month']:%Y-%m} of {said['account']} is not closed.")
        row = found[0]
        if csv:
            self.stdout.write(render_lines_csv(row.lines.all()), ending="")
        elif json:
            self.stdout.write(encoding.dumps(render_statement_detail(row) | _render_json_statement(row)))
        else:
            head = ["agent", "provider", "item", "month", "quantity", "USD"]
            lines = [
                [line.agent_did or "(none)", line.provider, BillableItem(line.item).label, f"{line.for_month:%Y-%m}",
                 format_decimal(line.quantity), str(line.usd)]
                for line in row.lines.all()
            ]  # fmt: skip
            sums = (("subtotal", row.subtotal), ("credit used", -row.credit_used), ("to pay", row.total))
            self.stdout.write(format_table(head, [*lines, *([name, "", "", "", "", str(usd)] for name, usd in sums)]))


def _format_row(row: Statement) -> list[str]:
    return [row.account.name, f"{row.month:%Y-%m}", str(row.subtotal), str(row.credit_used), str(row.total)]


def _render_json_statement(row: Statement) -> dict[str, Any]:
    return render_statement(row) | {"closed_at": row.closed_at.isoformat()}

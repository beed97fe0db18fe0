"""manage.py statements: list, show and close months of accounts."""

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
    help = "List statements, show one, or close a month of one account or of every account with costs or corrections."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("action", choices=["list", "show", "close"])
        parser.add_argument("--account", metavar="NAME", help="only of this account")
        parser.add_argument("--month", metavar="YYYY-MM", help="month (UTC), such as 2026-11")
        output = parser.add_mutually_exclusive_group()
        output.add_argument(
            "--csv",
            action="store_true",
            help="CSV: lines of the statement for `show`, one row per statement for `list` and `close`",
        )
        output.add_argument("--json", action="store_true", help="one line of JSON")

    def handle(self, *args: Any, action: str, csv: bool, json: bool, **options: Any) -> None:
        selected = validate_options(StatementQuerySerializer, options)
        if "account" in selected and not Account.objects.filter(name=selected["account"]).exists():
            raise CommandError(f"--account: there is no {selected['account']!r}.")
        refused: list[str] = []
        if action == "close":
            refused = self._close(selected)
        filters = {
            field: selected[name] for name, field in (("account", "account__name"), ("month", "month")) if name in selected
        }
        rows = [*Statement.objects.filter(**filters).select_related("account").order_by("month", "account__name")]
        if action == "show":
            self._show(selected, rows, csv, json)
        elif csv:
            self.stdout.write(render_statements_csv(rows), ending="")
        elif json:
            self.stdout.write(encoding.dumps({"results": [_render_json_statement(row) for row in rows]}))
        else:
            self.stdout.write(format_table(["account", "month", "USD", "credit", "to pay"], [*map(_format_row, rows)]))
        if refused:
            raise CommandError("\n".join(refused))

    def _close(self, selected: dict[str, Any]) -> list[str]:
        """Close the month of each account. Return a message for each account that cannot be closed."""
        if "month" not in selected:
            raise CommandError("--month: required to close a month.")
        accounts = (
            Account.objects.filter(name=selected["account"])
            if "account" in selected
            else statements.find_due_accounts(selected["month"])
        )
        refused = []
        for account in accounts:
            try:
                statements.close_month(account, selected["month"], now=timezone.now(), actor="command line")
            except statements.MonthNotClosable as error:
                refused.append(f"{account}: {error}")
        return refused

    def _show(self, selected: dict[str, Any], rows: list[Statement], csv: bool, json: bool) -> None:
        if not {"account", "month"} <= selected.keys():
            raise CommandError("show requires --account and --month.")
        if not rows:
            raise CommandError(f"{selected['month']:%Y-%m} of {selected['account']} is not closed.")
        row = rows[0]
        if csv:
            self.stdout.write(render_lines_csv(row.lines.all()), ending="")
        elif json:
            self.stdout.write(encoding.dumps(render_statement_detail(row) | _render_json_statement(row)))
        else:
            header = ["agent", "provider", "item", "month", "quantity", "USD"]
            lines = [
                [line.agent_did or "(none)", line.provider, BillableItem(line.item).label, f"{line.for_month:%Y-%m}",
                 format_decimal(line.quantity), str(line.usd)]
                for line in row.lines.all()
            ]  # fmt: skip
            sums = (("subtotal", row.subtotal), ("credit used", -row.credit_used), ("to pay", row.total))
            self.stdout.write(format_table(header, [*lines, *([name, "", "", "", "", str(usd)] for name, usd in sums)]))


def _format_row(row: Statement) -> list[str]:
    return [row.account.name, f"{row.month:%Y-%m}", str(row.subtotal), str(row.credit_used), str(row.total)]


def _render_json_statement(row: Statement) -> dict[str, Any]:
    return render_statement(row) | {"closed_at": row.closed_at.isoformat()}

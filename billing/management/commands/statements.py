"""manage.py statements: list, show and close months of accounts."""

import json as encoding
from argparse import ArgumentParser
from decimal import Decimal
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from billing import statements
from billing.api.statements import (
    StatementQuerySerializer,
    find_lines,
    render_lines_csv,
    render_preview_detail,
    render_statement,
    render_statement_detail,
    render_statements_csv,
)
from billing.management.options import format_table, validate_options
from billing.models import Account, Statement
from sandboxes.db import database_time


class Command(BaseCommand):
    help = "List statements, show one, or close a month of one account or of every account with costs or corrections."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("action", choices=["list", "show", "close"])
        parser.add_argument("--account", metavar="NAME", help="only of this account")
        parser.add_argument("--month", metavar="YYYY-MM", help="month (UTC), such as 2026-11")
        parser.add_argument(
            "--preliminary", action="store_true", help="show: also a month that is not closed, with its lines so far"
        )
        output = parser.add_mutually_exclusive_group()
        output.add_argument(
            "--csv",
            action="store_true",
            help="CSV: lines of the statement for `show`, one row per statement for `list` and `close`",
        )
        output.add_argument("--json", action="store_true", help="one line of JSON")

    def handle(self, *args: Any, action: str, csv: bool, json: bool, preliminary: bool, **options: Any) -> None:
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
            self._show(selected, rows, csv, json, preliminary)
        elif csv:
            self.stdout.write(render_statements_csv(rows), ending="")
        elif json:
            self.stdout.write(encoding.dumps({"results": [_render_json_statement(row) for row in rows]}))
        else:
            self.stdout.write(format_table(["account", "month", "USD", "credit", "to pay"], [*map(_format_row, rows)]))
            for row in rows:
                if note := row.uncertainty:
                    self.stdout.write(f"{row}: {note}")
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
                statements.close_month(account, selected["month"], now=database_time.now(), actor="command line")
            except statements.MonthNotClosable as error:
                refused.append(f"{account}: {error}")
        return refused

    def _show(self, selected: dict[str, Any], rows: list[Statement], csv: bool, json: bool, preliminary: bool) -> None:
        if not {"account", "month"} <= selected.keys():
            raise CommandError("show requires --account and --month.")
        if not rows and not preliminary:
            raise CommandError(
                f"{selected['month']:%Y-%m} of {selected['account']} is not closed. --preliminary shows its lines so far."
            )
        if rows:
            detail = render_statement_detail(rows[0]) | _render_json_statement(rows[0])
        else:
            account = Account.objects.get(name=selected["account"])
            lines = statements.preview_month(account, selected["month"])
            detail = render_preview_detail(account, selected["month"], lines)
        if csv:
            text = render_lines_csv(find_lines(rows[0])) if rows else render_lines_csv(lines, preliminary=True)
            self.stdout.write(text, ending="")
        elif json:
            self.stdout.write(encoding.dumps(detail))
        else:
            self.stdout.write(_format_detail(detail, preliminary=not rows))


def _format_detail(detail: dict[str, Any], *, preliminary: bool) -> str:
    """Format the lines and sums of a statement, or of an open month, as a table."""
    header = ["agent", "provider", "item", "month", "quantity", "free", "rate", "USD"]
    lines = [
        [line["agent"] or "(none)", line["provider"], _format_item(line), line["for_month"], line["quantity"], line["free"],
         line["rate_usd"] or "-", line["usd"]]
        for line in detail["lines"]
    ]  # fmt: skip
    sums = [[name, "", "", "", "", "", "", usd] for name, usd in _list_sums(detail)]
    uncertain = [(Decimal(line["estimated_usd"]), line["unpriced_calls"]) for line in detail["lines"]]
    tokens = [(line["input_tokens"], line["output_tokens"]) for line in detail["lines"]]
    for names, values in ((["USD estimated", "unpriced calls"], uncertain), (["input tokens", "output tokens"], tokens)):
        if any(map(any, values)):
            header += names
            for row, pair in zip(lines, values, strict=True):
                row += [f"{value or ''}" for value in pair]
            for row in sums:
                row += ["", ""]
    note = "preliminary: this month is not closed\n" if preliminary else ""
    return note + format_table(header, [*lines, *sums])


def _format_item(line: dict[str, Any]) -> str:
    return f"{line['unit']}: {line['model']}" if line["model"] else line["unit"]


def _list_sums(detail: dict[str, Any]) -> list[tuple[str, str]]:
    credit = str(-Decimal(detail["credit_used_usd"]))
    return [("subtotal", detail["subtotal_usd"]), ("credit used", credit), ("to pay", detail["total_usd"])]


def _format_row(row: Statement) -> list[str]:
    return [row.account.name, f"{row.month:%Y-%m}", str(row.subtotal), str(row.credit_used), str(row.total)]


def _render_json_statement(row: Statement) -> dict[str, Any]:
    return render_statement(row) | {"closed_at": row.closed_at.isoformat()}

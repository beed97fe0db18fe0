"""manage.py statements: list, show, close and export months of accounts."""

import json as encoding
from argparse import ArgumentParser
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from pathlib import Path
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
from billing.focus.export import find_accounts, iter_csv, open_month
from billing.management.options import format_table, validate_options
from billing.models import Account, Statement
from sandboxes.audit import COMMAND_LINE
from sandboxes.db import database_time


class Command(BaseCommand):
    help = (
        "List statements, show one, close a month of one account or of every account with costs or corrections, or export "
        "a month of one or all accounts in the FOCUS format."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("action", choices=["list", "show", "close", "export"])
        parser.add_argument("--account", metavar="NAME", help="only of this account")
        parser.add_argument("--month", metavar="YYYY-MM", help="month (UTC), such as 2026-11")
        parser.add_argument(
            "--preliminary", action="store_true", help="show, export: also a month that is not closed, with its lines so far"
        )
        parser.add_argument("--format", choices=["focus"], help="export: columns of FOCUS 1.0, as CSV")
        parser.add_argument("--daily", action="store_true", help="export: rows by day, lease and environment of a closed month")
        parser.add_argument("--output", metavar="FILE", help="export: file to write or replace, instead of the standard output")
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
        if action == "export":
            self._export(selected, preliminary=preliminary, is_text=not (csv or json), **options)
            return
        if options["format"] or options["daily"] or options["output"]:
            raise CommandError("--format, --daily and --output: for export only.")
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

    def _export(
        self, selected: dict[str, Any], *, preliminary: bool, is_text: bool, format: str | None, daily: bool,
        output: str | None, **options: Any,
    ) -> None:  # fmt: skip
        if "month" not in selected or not format:
            raise CommandError("export requires --month and --format.")
        if not is_text:
            raise CommandError("--csv and --json: not for export, which is CSV.")
        month: date = selected["month"]
        accounts = [*Account.objects.filter(name=selected["account"])] if "account" in selected else find_accounts(month)
        sources = {account: open_month(account, month, preliminary=preliminary) for account in accounts}
        if unclosed := ", ".join(account.name for account, source in sources.items() if source is None):
            raise CommandError(f"{month:%Y-%m} of {unclosed} is not closed. --preliminary exports its lines so far.")
        chunks = iter_csv(filter(None, sources.values()), daily=daily)
        if output:
            _write_file(Path(output), chunks)
            return
        for chunk in chunks:
            self.stdout.write(chunk, ending="")

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
                statements.close_month(account, selected["month"], now=database_time.now(), actor=COMMAND_LINE)
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


def _write_file(path: Path, chunks: Iterator[str]) -> None:
    """Write a file completely, or leave an existing one as it is."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        try:
            with partial.open("w", encoding="utf-8", newline="") as file:
                file.writelines(chunks)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise CommandError(f"--output: {error.strerror}: {path}") from error


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

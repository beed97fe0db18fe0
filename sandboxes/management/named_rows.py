"""Base of the management commands that list, show, add and change rows which operators set up and refer to by name."""

import json
from argparse import ArgumentParser
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, ClassVar

from django.core.management.base import BaseCommand, CommandError
from django.db import models, transaction

from sandboxes import audit
from sandboxes.db import database_time
from sandboxes.management.base import report_errors
from sandboxes.management.columns import (
    add_column_options,
    describe_columns,
    find_named,
    format_value,
    parse_columns,
    validate_row,
)


class NamedRowCommand(BaseCommand):
    """Command with the actions list, show, add and set. Subclasses name the model, its columns and further actions."""

    model: ClassVar[type[models.Model]]
    columns: ClassVar[Sequence[str]]  # set by `add` and `set`
    facts: ClassVar[Sequence[str]] = ()  # further columns that are shown

    def add_arguments(self, parser: ArgumentParser) -> None:
        noun = str(self.model._meta.verbose_name)
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        listing = actions.add_parser("list", help="print one line for each")
        show = actions.add_parser("show", help=f"print all settings of one {noun}")
        for subparser in (listing, show):
            subparser.add_argument("--json", action="store_true", help="one line of JSON")
        add = actions.add_parser("add", help=f"add a new {noun}")
        change = actions.add_parser("set", help="change the stated settings")
        for subparser in (add, change):
            add_column_options(subparser, self.model, self.columns)
            subparser.add_argument("--dry-run", action="store_true", help="check and print the settings, and change nothing")
        for subparser in (show, add, change, *self.add_actions(actions)):
            subparser.add_argument("name", metavar="NAME", help=f"name of the {noun}; state it before options that take lists")

    def add_actions(self, actions: Any) -> Collection[ArgumentParser]:
        """Add the parsers of further actions and return those that take a name."""
        return ()

    def handle(self, *args: Any, action: str, verbosity: int, **options: Any) -> None:
        with report_errors(verbosity):
            getattr(self, f"_{action}")(options)

    def format_line(self, row: Any) -> str:
        raise NotImplementedError

    def find_rows(self) -> Sequence[Any]:
        return [*self.model._default_manager.order_by("name")]

    def prepare(self, row: Any, changes: dict[str, Any]) -> None:
        """Complete the columns of a new row, or refuse the change of an existing one."""

    def save(self, row: Any, changes: Collection[str]) -> None:
        """Save a validated row; of an existing one only the changed columns, since counters may have changed."""
        row.save(update_fields=None if row._state.adding else [*changes])

    def complete(self, now: datetime) -> None:
        """Derive further values from a saved row, outside its transaction."""

    def describe(self, row: Any) -> dict[str, Any]:
        return {"name": row.name, **describe_columns(row, [*self.columns, *self.facts])}

    def _save_and_record(self, row: Any, before: dict[str, Any], changes: Collection[str], *, now: datetime) -> None:
        is_new, noun = row._state.adding, self.model._meta.verbose_name
        with transaction.atomic():
            self.save(row, changes)
            detail = audit.describe_values(row, changes) if is_new else audit.describe_changes(before, row)
            if is_new or detail:
                audit.record(row, f"{'Add' if is_new else 'Change'} {noun}", detail, actor=audit.COMMAND_LINE, now=now)
        self.complete(now)

    def _list(self, options: dict[str, Any]) -> None:
        rows = self.find_rows()
        if options["json"]:
            self.stdout.write(json.dumps({"results": [self.describe(row) for row in rows]}))
            return
        for row in rows:
            self.stdout.write(self.format_line(row))

    def _show(self, options: dict[str, Any]) -> None:
        document = self.describe(find_named(self.model, options["name"]))
        lines = [f"{name}: {format_value(value)}" for name, value in document.items()]
        self.stdout.write(json.dumps(document) if options["json"] else "\n".join(lines))

    def _add(self, options: dict[str, Any]) -> None:
        self._store(self.model(name=options["name"]), options, "added")

    def _set(self, options: dict[str, Any]) -> None:
        self._store(find_named(self.model, options["name"]), options, "changed")

    def _store(self, row: Any, options: dict[str, Any], outcome: str) -> None:
        changes = parse_columns(self.model, self.columns, options)
        if not changes and not row._state.adding:
            raise CommandError("State at least one setting to change; see --help.")
        self.prepare(row, changes)
        before = {} if row._state.adding else {name: getattr(row, name) for name in changes}
        validate_row(row, changes)
        if not options["dry_run"]:
            self._save_and_record(row, before, changes, now=database_time.now())
        settings = [f"{name}={format_value(value)}" for name, value in describe_columns(row, changes).items()]
        prefix = "would be " if options["dry_run"] else ""
        self.stdout.write(f"{row.name} {prefix}{outcome}{': ' if settings else ''}{', '.join(settings)}")

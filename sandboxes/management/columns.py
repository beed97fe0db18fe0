"""Columns of a model as options of a management command. The model validates the values.

A list option takes several values and may be repeated; without a value the list is empty. "none" empties a column that may be
empty, and "" a text."""

import json
from argparse import ArgumentParser, BooleanOptionalAction
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import CommandError
from django.db import models

from sandboxes.db import durations
from sandboxes.formatting import suggest_match
from sandboxes.management.base import require_utf8

NONE = "none"
MAX_DIGITS = 9  # fits every integer column
METAVARS: list[tuple[type[models.Field], str]] = [
    (models.IntegerField, "NUMBER"), (models.DurationField, "DURATION"), (models.DecimalField, "USD"),
    (models.ForeignKey, "NAME"), (models.JSONField, "VALUE"),
]  # fmt: skip


def add_column_options(parser: ArgumentParser, model: type[models.Model], names: Iterable[str]) -> None:
    for name in names:
        field = model._meta.get_field(name)
        assert isinstance(field, models.Field)
        text = str(field.help_text or field.verbose_name).replace("%", "%%")
        if isinstance(field, models.BooleanField):
            parser.add_argument(build_option(name), action=BooleanOptionalAction, default=None, help=text)
            continue
        if field.null:
            text += f" {NONE!r} empties it."
        metavar = next((metavar for kind, metavar in METAVARS if isinstance(field, kind)), "TEXT")
        values: dict[str, Any] = {"nargs": "*", "action": "extend"} if isinstance(field, models.JSONField) else {}
        parser.add_argument(build_option(name), metavar=metavar, help=text, **values)


def parse_columns(model: type[models.Model], names: Iterable[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stated columns with their values. Raise CommandError, naming the option."""
    return {
        name: _parse(model._meta.get_field(name), options[name], build_option(name))
        for name in names
        if options[name] is not None
    }


def validate_row(row: models.Model, changes: Mapping[str, Any]) -> None:
    """Set columns of a row and validate the row without saving it. Raise CommandError, naming the option."""
    for name, value in changes.items():
        setattr(row, name, value)
    try:
        row.full_clean()
    except ValidationError as error:
        name, messages = next(iter(error.message_dict.items()))
        option = "" if name == "__all__" else f"{name if name == 'name' else build_option(name)}: "
        raise CommandError(f"{option}{' '.join(messages)}") from None


def find_named(model: type[models.Model], name: str) -> Any:
    """Return the row of a model by its name. Raise CommandError with the nearest name."""
    names = model._default_manager.values_list("name", flat=True)
    row = model._default_manager.filter(name=require_utf8("name", name)).first()
    if row is None:
        raise CommandError(f"There is no {model._meta.verbose_name} {name[:80]!r}.{suggest_match(name, names)}")
    return row


def describe_columns(row: models.Model, names: Iterable[str]) -> dict[str, Any]:
    """Return columns of a row as values of JSON: durations in seconds, amounts as text, related rows by name."""
    return {name: _describe(getattr(row, name)) for name in names}


def format_value(value: Any) -> str:
    """Format a value of `describe_columns` as text on one line."""
    if isinstance(value, list):
        return " ".join(value) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value in (None, ""):
        return "-"
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value)


def build_option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _describe(value: Any) -> Any:
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
        return int(seconds) if seconds.is_integer() else seconds
    if isinstance(value, models.Model):
        return str(value)
    return value if value is None or isinstance(value, bool | int | str | list) else format(value.normalize(), "f")


def _parse(field: Any, value: Any, option: str) -> Any:
    if isinstance(field, models.BooleanField):
        return value
    if isinstance(field, models.JSONField):
        return [require_utf8(option, each) for each in value]
    if field.null and value == NONE:
        return None
    if isinstance(field, models.DurationField):
        return _parse_duration(option, value)
    if isinstance(field, models.IntegerField) and not (value.isascii() and value.isdigit() and len(value) <= MAX_DIGITS):
        raise CommandError(f"{option}: must be a number{f' or {NONE!r}' if field.null else ''}.")
    if isinstance(field, models.ForeignKey):
        return _find_related(field, value, option)
    try:
        return field.to_python(require_utf8(option, value))
    except ValidationError as error:
        raise CommandError(f"{option}: {' '.join(error.messages)}") from None


def _parse_duration(option: str, text: str) -> timedelta:
    try:
        return timedelta(0) if text == "0" else durations.parse_duration(text)
    except ValueError as error:
        raise CommandError(f"{option}: {error}") from None


def _find_related(field: Any, name: str, option: str) -> models.Model:
    try:
        row: models.Model = find_named(field.related_model, name)
    except CommandError as error:
        raise CommandError(f"{option}: {error}") from None
    return row

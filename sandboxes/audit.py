"""Record of operator actions that do not come from the console, whose actions are log entries of Django's admin."""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from django.db.models import Model

from sandboxes.models import OperatorAction
from sandboxes.models.installation import Installation

COMMAND_LINE = "command line"  # actor of management commands
INSTALLATION_ID = 1


def record(row: Model, action: str, detail: str = "", *, actor: str, now: datetime) -> None:
    """Record an operator's change of a row. Call this function in the transaction of the change.

    `actor` is an API key, or the command line. The row's page in the console lists the action with `action` as its title.
    Texts that are too long are cut. `detail` must not have a secret."""
    _build_action(row, action, detail, actor=actor, now=now).save(force_insert=True)


def record_change(row: Model, action: str, detail: str = "", *, actor: str, now: datetime) -> None:
    """Record as `record` does, unless the actor is a user of the console or empty."""
    if is_key_or_command(actor):
        record(row, action, detail, actor=actor, now=now)


def record_changes(rows: Iterable[tuple[Model, str]], action: str, *, actor: str, now: datetime) -> None:
    """Record the same action on several rows, each with its detail, as `record_change` does."""
    if is_key_or_command(actor):
        OperatorAction.objects.bulk_create(
            [_build_action(row, action, detail, actor=actor, now=now) for row, detail in rows], batch_size=100
        )


def record_installation_change(action: str, detail: str = "", *, actor: str, now: datetime) -> None:
    """Record an action on the whole installation, as `record_change` does."""
    row = Installation.objects.filter(pk=INSTALLATION_ID).first() or Installation(pk=INSTALLATION_ID)
    record_change(row, action, detail, actor=actor, now=now)


def is_key_or_command(actor: str) -> bool:
    """Return whether an actor is "key 1a2b3c4d" or the command line. The name of a console user has no space."""
    return actor == COMMAND_LINE or actor.startswith("key ")


def describe_changes(before: Mapping[str, Any], row: Model) -> str:
    """Return the columns with other values than before: "amount 10 → 20, hard yes → no"."""
    values = ((column, value, getattr(row, column)) for column, value in before.items())
    return ", ".join(f"{name} {format_value(old)} → {format_value(new)}" for name, old, new in values if old != new)


def describe_values(row: Model, columns: Iterable[str]) -> str:
    """Return columns of a new row: "amount 10, hard yes"."""
    return ", ".join(f"{column} {format_value(getattr(row, column))}" for column in columns)


def format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, timedelta):
        return f"{value.total_seconds():g}s"
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    if value in (None, ""):
        return "none"
    return f"{value.normalize():f}" if isinstance(value, Decimal) else str(value)


def _build_action(row: Model, action: str, detail: str, *, actor: str, now: datetime) -> OperatorAction:
    return OperatorAction(
        kind=row._meta.label_lower, object_id=str(row.pk), object_text=str(row), action=action, detail=detail,
        actor=actor, at=now,
    )  # fmt: skip

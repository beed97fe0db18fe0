"""Record of operator actions that do not come from the console, whose actions are log entries of Django's admin.

One rule decides, by the kind of the actor: changes by an API key or a command are recorded, those of a user of the console and
of the control plane itself are not (docs/decisions/0054-operator-actions-by-kind-of-actor.md)."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Any

import structlog
from django.conf import settings
from django.db import DatabaseError
from django.db.models import Model, QuerySet

from sandboxes.models import OperatorAction
from sandboxes.models.installation import Installation
from sandboxes.redaction.texts import omit_answers

log = structlog.get_logger(__name__)
INSTALLATION_ID = 1


class ActorKind(StrEnum):
    """Kind of a caller."""

    KEY = "key"  # API key
    COMMAND = "command"  # management command
    CONSOLE = "console"  # user of the console
    SYSTEM = "system"  # the control plane itself, or a game server that signs its requests


class Actor(str):
    """Name of a caller, as rows store it, with the kind of the caller.

    A text, because most functions only store the name. Those that record an operator action require an Actor."""

    kind: ActorKind

    def __new__(cls, name: str, kind: ActorKind) -> "Actor":
        actor = super().__new__(cls, name)
        actor.kind = kind
        return actor

    def __getnewargs__(self) -> tuple[str, ActorKind]:  # type: ignore[override]
        return str(self), self.kind


COMMAND_LINE = Actor("command line", ActorKind.COMMAND)
CONTROL_PLANE = Actor("", ActorKind.SYSTEM)
RECORDED_KINDS = frozenset({ActorKind.KEY, ActorKind.COMMAND})


@dataclass
class Order:
    """Result of a recorded order. The code that carries out the order sets it."""

    result: str = "done"


def record(row: Model, action: str, detail: str = "", *, actor: Actor, now: datetime) -> None:
    """Record a change of a row, if the actor is an API key or a command. Call this function in the transaction of the change.

    The row's page in the console lists the action with `action` as its title. Texts that are too long are cut. `detail` must
    not have a secret."""
    record_each([(row, detail)], action, actor=actor, now=now)


def record_each(rows: Iterable[tuple[Model, str]], action: str, *, actor: Actor, now: datetime) -> None:
    """Record the same action on several rows, each with its detail, as `record` does."""
    if actor.kind in RECORDED_KINDS:
        built = [_build_action(row, action, detail, actor=actor, now=now) for row, detail in rows]
        OperatorAction.objects.bulk_create(built, batch_size=100)


@contextmanager
def record_order(row: Model, action: str, detail: str = "", *, actor: Actor, now: datetime) -> Iterator[Order]:
    """Record an action whose effect is not one transaction: before the block, which carries it out, as an order.

    After the block its result is stored, or the error that ended the block. The result of an order whose process dies stays
    unknown. Call this function outside of transactions. Recorded for the same actors as `record`."""
    order, recorded = Order(), None
    if actor.kind in RECORDED_KINDS:
        recorded = _build_action(row, action, detail, actor=actor, now=now)
        recorded.is_order = True
        recorded.save(force_insert=True)
    try:
        yield order
    except Exception as error:
        _store_result(recorded, f"failed: {omit_answers(str(error)) or type(error).__name__}")
        raise
    _store_result(recorded, order.result)


def get_installation_row() -> Installation:
    """Return the row of an action on the whole installation, unsaved if the installation has none yet."""
    return Installation.objects.filter(pk=INSTALLATION_ID).first() or Installation(pk=INSTALLATION_ID)


def find_expired(*, now: datetime) -> QuerySet[OperatorAction]:
    """Return the actions past KEEP_OPERATOR_ACTIONS, oldest first."""
    return OperatorAction.objects.filter(at__lt=now - settings.KEEP_OPERATOR_ACTIONS).order_by("at", "id")


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


def _build_action(row: Model, action: str, detail: str, *, actor: Actor, now: datetime) -> OperatorAction:
    return OperatorAction(
        kind=row._meta.label_lower, object_id=str(row.pk), object_text=str(row), action=action, detail=detail,
        actor=actor, at=now,
    )  # fmt: skip


def _store_result(recorded: OperatorAction | None, result: str) -> None:
    """Store the result of an order. Without the database it stays unknown: the effect must not be repeated for it."""
    if recorded is None:
        return
    try:
        OperatorAction.objects.filter(pk=recorded.pk, result="").update(result=result)
    except DatabaseError as error:
        log.warning("result of an order not stored", action=recorded.action, result=result, error=str(error))

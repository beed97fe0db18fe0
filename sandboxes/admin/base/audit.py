"""Users of the console as actors, and recorded actions of operators, as a row's page lists them."""

from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from typing import Any

from django.contrib.admin.models import LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db.models import Model
from django.http import HttpRequest

from sandboxes.audit import Actor, ActorKind
from sandboxes.models import OperatorAction


@dataclass(frozen=True)
class AuditEntry:
    """Recorded action of an operator on one row, by the console, an API key or a command."""

    at: datetime
    action: Any
    reason: str
    actor: str


def get_actor(request: HttpRequest) -> Actor:
    """Return the user of the console. Their changes are log entries of Django's admin, not operator actions."""
    return Actor(request.user.get_username(), ActorKind.CONSOLE)


def list_audit_entries(row: Model, limit: int) -> list[AuditEntry]:
    """List the newest actions on a row, newest first. Two queries."""
    entries = [*_list_console_actions(row, limit), *_list_other_actions(row, limit)]
    return sorted(entries, key=attrgetter("at"), reverse=True)[:limit]


def _list_console_actions(row: Model, limit: int) -> list[AuditEntry]:
    kind = ContentType.objects.get_for_model(row, for_concrete_model=False)
    entries = LogEntry.objects.filter(content_type=kind, object_id=str(row.pk)).select_related("user")[:limit]
    parts = [(entry, *entry.get_change_message().partition(": ")) for entry in entries]
    return [AuditEntry(entry.action_time, title, reason, entry.user.get_username()) for entry, title, _, reason in parts]


def _list_other_actions(row: Model, limit: int) -> list[AuditEntry]:
    found = OperatorAction.objects.filter(kind=row._meta.label_lower, object_id=str(row.pk)).order_by("-at")[:limit]
    return [AuditEntry(each.at, each.action, each.summary or each.object_text, each.actor) for each in found]

"""Recorded actions of operators, as a row's page lists them."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.contrib.admin.models import LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db.models import Model


@dataclass(frozen=True)
class AuditEntry:
    """Recorded action of an operator on one row."""

    at: datetime
    action: Any
    reason: str
    actor: str


def list_audit_entries(row: Model, limit: int) -> list[AuditEntry]:
    """List the newest log entries of a row, newest first."""
    kind = ContentType.objects.get_for_model(row, for_concrete_model=False)
    entries = LogEntry.objects.filter(content_type=kind, object_id=str(row.pk)).select_related("user")[:limit]
    parts = [(entry, *entry.get_change_message().partition(": ")) for entry in entries]
    return [AuditEntry(entry.action_time, title, reason, entry.user.get_username()) for entry, title, _, reason in parts]

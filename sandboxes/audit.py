"""Record of operator actions that do not come from the console, whose actions are log entries of Django's admin."""

from datetime import datetime

from django.db.models import Model

from sandboxes.models import OperatorAction


def record(row: Model, action: str, detail: str = "", *, actor: str, now: datetime) -> None:
    """Record an operator's change of a row. Call this function in the transaction of the change.

    `actor` is an API key, or the command line. The row's page in the console lists the action with `action` as its title.
    Texts that are too long are cut."""
    OperatorAction.objects.create(
        kind=row._meta.label_lower, object_id=str(row.pk), object_text=str(row)[:300], action=action, detail=detail[:1000],
        actor=actor, at=now,
    )  # fmt: skip

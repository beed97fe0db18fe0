"""Who may call a model, and the rows that say who did."""

from datetime import datetime

from django.db.models import QuerySet

from sandboxes.models import LlmCall


def overdue(*, now: datetime) -> QuerySet[LlmCall]:
    """Calls that should have been closed by now: whoever forwarded them has died."""
    return LlmCall.objects.filter(ended_at__isnull=True, deadline_at__lt=now).order_by("deadline_at")


def close_abandoned(*, now: datetime, limit: int = 200) -> int:
    """Close calls past their deadline; how many. What they cost is not known, and so they show as unpriced."""
    some = overdue(now=now).values_list("pk", flat=True)[:limit]
    return LlmCall.objects.filter(pk__in=list(some), ended_at__isnull=True).update(ended_at=now, outcome=LlmCall.Outcome.LOST)

"""What happened and others want to know: written down in the transaction in which it happens, so that they are told of
what did and of nothing else. `delivering` tells them."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction

from sandboxes import rows
from sandboxes.webhooks import LISTENING, Delivery, Event, Kind, Webhook

KEPT = timedelta(days=30)  # events, and who was told of them


def put(kind: str, *, key: str, payload: Mapping[str, Any], now: datetime) -> Event | None:
    """Write down what happened, with a delivery for each webhook that wants it. None if it was written down before.

    Call it in the transaction in which it happens: both are seen, or neither. `key` is what happened, within its kind,
    and decides whether it is the same; `payload` is what receivers are sent, so it has no secrets in it."""
    event = Event(kind=Kind(kind).value, key=key, payload=dict(payload), at=now)
    with transaction.atomic():
        if not rows.insert_new(event):
            return None
        listening = Webhook.objects.filter(LISTENING).order_by().values_list("pk", "kinds")
        to = [pk for pk, kinds in listening if not kinds or kind in kinds]
        Delivery.objects.bulk_create([Delivery(event=event, webhook_id=pk, asked_at=now, due_at=now) for pk in to])
    return event


def forget(*, now: datetime, limit: int = 10_000) -> int:
    """Remove events older than KEPT, the oldest first, and what is known of their deliveries; how many."""
    old = Event.objects.filter(at__lt=now - KEPT).order_by("at", "pk").values_list("pk", flat=True)[:limit]
    return Event.objects.filter(pk__in=list(old)).delete()[1].get("sandboxes.Event", 0)

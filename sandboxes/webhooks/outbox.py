"""What happened and others want to know: written down in the transaction in which it happens, so that they are told of
what did and of nothing else. `delivering` tells them."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models import QuerySet
from django_q.models import OrmQ
from django_q.tasks import async_task

from sandboxes.db import sql
from sandboxes.models.webhooks import ENABLED, Delivery, Event, EventType, Webhook

EVENT_RETENTION = timedelta(days=30)  # events, and who was told of them
MAX_QUEUED_TASKS = 100  # tasks waiting: beyond this the next scheduled sweep is soon enough


def enqueue_event(kind: str, *, key: str, payload: Mapping[str, Any], now: datetime) -> Event | None:
    """Write down what happened, with a delivery for each webhook that wants it. None if it was written down before.

    Call it in the transaction in which it happens: both are seen, or neither. `key` is what happened, within its kind,
    and decides whether it is the same; `payload` is what receivers are sent, so it has no secrets in it."""
    event = Event(kind=EventType(kind).value, key=key, payload=dict(payload), at=now)
    with transaction.atomic(savepoint=False):
        if not sql.insert_if_absent(event):
            return None
        listening = Webhook.objects.filter(ENABLED).order_by().values_list("pk", "kinds")
        to = [pk for pk, kinds in listening if not kinds or kind in kinds]
        Delivery.objects.bulk_create([Delivery(event=event, webhook_id=pk, asked_at=now, due_at=now) for pk in to])
        if to:
            enqueue_delivery_task()
    return event


def enqueue_delivery_task() -> None:
    """Have the queue tell those who are to be told, rather than wait for the next sweep. Losing this loses only time."""
    if OrmQ.objects.count() < MAX_QUEUED_TASKS:
        async_task("sandboxes.webhooks.delivery.run_delivery_task", group="webhooks")


def purge_old_events(*, now: datetime, limit: int = 10_000) -> int:
    """Remove old events, the oldest first, and what is known of their deliveries; how many."""
    found = [*find_old_events(now=now).values_list("pk", flat=True)[:limit]]
    return Event.objects.filter(pk__in=found).delete()[1].get("sandboxes.Event", 0)


def find_old_events(*, now: datetime) -> QuerySet[Event]:
    """Events that were kept for long enough."""
    return Event.objects.filter(at__lt=now - EVENT_RETENTION).order_by("at", "pk")

"""Transactional outbox: events are inserted in the transaction of their fact. sandboxes.webhooks.delivery sends them."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models import QuerySet
from django_q.models import OrmQ

from sandboxes.db import sql
from sandboxes.hosts import queues
from sandboxes.models.webhooks import ENABLED, Delivery, Event, EventType, Webhook

EVENT_RETENTION = timedelta(days=30)  # of events and their deliveries
MAX_QUEUED_TASKS = 100  # with a larger backlog no task is added, and the scheduled sweep delivers


def enqueue_event(kind: str, *, key: str, payload: Mapping[str, Any], now: datetime) -> Event | None:
    """Insert an event and one delivery for each subscribed webhook. Return None if the event exists already.

    Call it in the transaction of the fact. `key` identifies the event within its kind. `payload` is sent to receivers and must
    not contain secrets."""
    event = Event(kind=EventType(kind).value, key=key, payload=dict(payload), at=now)
    with transaction.atomic(savepoint=False):
        if not sql.insert_if_absent(event):
            return None
        enabled = Webhook.objects.filter(ENABLED).order_by().values_list("pk", "kinds")
        subscribed = [pk for pk, kinds in enabled if not kinds or kind in kinds]
        Delivery.objects.bulk_create([Delivery(event=event, webhook_id=pk, asked_at=now, due_at=now) for pk in subscribed])
        if subscribed:
            enqueue_delivery_task()
    return event


def enqueue_delivery_task() -> None:
    """Enqueue an immediate delivery pass. If the task is lost, the next scheduled sweep delivers."""
    if OrmQ.objects.count() < MAX_QUEUED_TASKS:
        queues.enqueue("sandboxes.webhooks.delivery.run_delivery_task", group="webhooks")


def purge_old_events(*, now: datetime, limit: int = 10_000) -> int:
    """Delete up to `limit` expired events with their deliveries, oldest first, and return their number."""
    expired = [*find_old_events(now=now).values_list("pk", flat=True)[:limit]]
    return Event.objects.filter(pk__in=expired).delete()[1].get("sandboxes.Event", 0)


def find_old_events(*, now: datetime) -> QuerySet[Event]:
    """Return the events older than EVENT_RETENTION."""
    return Event.objects.filter(at__lt=now - EVENT_RETENTION).order_by("at", "pk")

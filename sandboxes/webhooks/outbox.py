"""Transactional outbox: events are inserted in the transaction of their fact. sandboxes.webhooks.delivery sends them.

Event streams read events by position, and a client continues after the last position that it has seen. If the inserting
transaction took the position, streams would lose events: on PostgreSQL a transaction with a smaller number may commit after one
with a larger number that a stream has already passed. `assign_positions` therefore numbers committed events, in transactions
under one lock: each assigns only numbers above all numbers in use. An event that commits late gets a late position."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models import Max, QuerySet
from django_q.models import OrmQ

from sandboxes.db import sql
from sandboxes.hosts import queues
from sandboxes.models.webhooks import ENABLED, Delivery, Event, EventType, Webhook

POSITION_BATCH_SIZE = 1000  # events of one transaction of assign_positions
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


def assign_positions(*, now: datetime) -> int:
    """Assign positions to all committed events that have none, in the order of their times. Return the newest position.

    Called by the readers of event streams. Events without a position are found by a partial index, which is mostly empty.
    Positions are microseconds since 1970, or one more than the newest: the sequence goes on after all events were purged."""
    while Event.objects.filter(position__isnull=True).exists():
        with transaction.atomic():
            sql.lock_key("positions of events")
            pending = Event.objects.filter(position__isnull=True).order_by("at", "pk").only("pk")
            events = list(pending[:POSITION_BATCH_SIZE])
            first = max(_find_newest_position() + 1, int(now.timestamp() * 1_000_000))
            for position, event in enumerate(events, first):
                event.position = position
            Event.objects.bulk_update(events, ["position"])
    return _find_newest_position()


def _find_newest_position() -> int:
    return Event.objects.aggregate(newest=Max("position"))["newest"] or 0


def purge_old_events(*, now: datetime, limit: int = 10_000) -> int:
    """Delete up to `limit` expired events with their deliveries, oldest first, and return their number."""
    expired = [*find_old_events(now=now).values_list("pk", flat=True)[:limit]]
    return Event.objects.filter(pk__in=expired).delete()[1].get("sandboxes.Event", 0)


def find_old_events(*, now: datetime) -> QuerySet[Event]:
    """Return the events older than EVENT_RETENTION."""
    return Event.objects.filter(at__lt=now - EVENT_RETENTION).order_by("at", "pk")

"""Transactional outbox: events are inserted in the transaction of their fact. sandboxes.webhooks.delivery sends them.

Event streams read events by position, and a client continues after the last position that it has seen. If the inserting
transaction took the position, streams would lose events: on PostgreSQL a transaction with a smaller number may commit after one
with a larger number that a stream has already passed. `assign_positions` therefore numbers committed events, in transactions
under one lock: each assigns only numbers above all numbers in use. An event that commits late gets a late position."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models import Exists, Max, OuterRef, Q, QuerySet
from django_q.models import OrmQ

from sandboxes.db import sql
from sandboxes.hosts import queues
from sandboxes.models.webhooks import ENABLED, Delivery, Event, EventType, Webhook

POSITION_BATCH_SIZE = 10_000  # events of one transaction of assign_positions
ASSIGN_POSITIONS = """\
UPDATE sandboxes_event SET position = %s + pending.number
FROM (
  SELECT id, row_number() OVER (ORDER BY at, id) AS number FROM sandboxes_event WHERE position IS NULL ORDER BY at, id LIMIT %s
) AS pending
WHERE sandboxes_event.id = pending.id"""
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
    Positions continue after the newest one, and after the microseconds since 1970, so that no position is used again after all
    events were purged."""
    while Event.objects.filter(position__isnull=True).exists():
        with transaction.atomic():
            sql.lock_key("positions of events")
            last = max(_find_newest_position(), int(now.timestamp() * 1_000_000))
            sql.execute(ASSIGN_POSITIONS, last, POSITION_BATCH_SIZE)
    return _find_newest_position()


def _find_newest_position() -> int:
    return Event.objects.aggregate(newest=Max("position"))["newest"] or 0


def find_old_deliveries(*, now: datetime) -> QuerySet[Delivery]:
    """Return the deliveries of events older than EVENT_RETENTION, but those that an enabled webhook still waits for."""
    is_pending = Q(due_at__isnull=False, webhook__in=Webhook.objects.filter(ENABLED).values("pk"))
    return Delivery.objects.filter(~is_pending, event__at__lt=now - EVENT_RETENTION).order_by("event__at")


def find_old_events(*, now: datetime) -> QuerySet[Event]:
    """Return the events older than EVENT_RETENTION without a delivery."""
    deliveries = Delivery.objects.filter(event=OuterRef("pk"))
    return Event.objects.filter(~Exists(deliveries), at__lt=now - EVENT_RETENTION).order_by("at", "pk")

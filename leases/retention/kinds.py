"""Table of the kinds of rows that expire, and the condition that no other row refers to them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.contrib.sessions.models import Session
from django.db.models import PROTECT, Exists, ForeignKey, Model, OuterRef, QuerySet
from django_q.models import Task

from leases import shells, turns
from leases.models import IdempotentRequest
from leases.queue import queue
from leases.retention import facts, history
from sandboxes import audit
from sandboxes.egress.allow_list import connections
from sandboxes.identity import signing
from sandboxes.webhooks import outbox

TASK_RETENTION = timedelta(days=30)  # of failed tasks of the queue


@dataclass(frozen=True)
class ExpiredRows:
    """Rows of one kind that have expired. With `cleared` their columns are set to these values, and the rows stay.

    `rows` must not select a row whose columns are cleared."""

    kind: str  # plural noun for the result of the sweep
    rows: QuerySet[Any]
    cleared: Mapping[str, Any] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        return f"{self.kind} {'cleared' if self.cleared else 'deleted'}"

    def select(self) -> QuerySet[Any]:
        """Return the rows that the sweep handles: those to delete only while no row with a PROTECT key refers to them."""
        return self.rows if self.cleared else exclude_referenced(self.rows)


def find_expired(*, now: datetime) -> list[ExpiredRows]:
    """Return the expired rows of each kind. Rows come before those to which they refer."""
    return [
        ExpiredRows("shells of ended leases", shells.find_of_ended_leases()),
        ExpiredRows(
            "responses to idempotency keys", IdempotentRequest.objects.filter(expires_at__lt=now).order_by("expires_at")
        ),
        ExpiredRows("states of turns", turns.find_old_states(now=now), {"state": ""}),
        ExpiredRows("queued runs", queue.find_old_runs(now=now)),
        ExpiredRows("agents of the queue", queue.find_old_agents(now=now)),
        ExpiredRows("webhook deliveries", outbox.find_old_deliveries(now=now)),
        ExpiredRows("events", outbox.find_old_events(now=now)),
        ExpiredRows("egress connections", connections.find_expired(now=now)),
        ExpiredRows("service tokens", signing.find_old_tokens(now=now)),
        ExpiredRows("operator actions", audit.find_expired(now=now)),
        ExpiredRows("tasks of the queue", Task.objects.filter(stopped__lt=now - TASK_RETENTION).order_by("stopped")),
        ExpiredRows("console sessions", Session.objects.filter(expire_date__lt=now).order_by("expire_date")),
        *(ExpiredRows(kind, rows) for kind, rows in [*history.find_expired(now=now).items(), *facts.find_expired().items()]),
    ]


def exclude_referenced(rows: QuerySet[Any]) -> QuerySet[Any]:
    """Leave out the rows to which another row refers by a foreign key with PROTECT."""
    for model, key in find_protecting_keys(rows.model):
        rows = rows.filter(~Exists(model._base_manager.filter(**{key.name: OuterRef(key.target_field.attname)})))
    return rows


def find_protecting_keys(model: type[Model]) -> list[tuple[type[Model], "ForeignKey[Any, Any]"]]:
    """Return the foreign keys with PROTECT to a model, each with the model that has the key."""
    relations = [each for each in model._meta.get_fields(include_hidden=True) if each.one_to_many or each.one_to_one]
    return [
        (each.related_model, each.field)  # type: ignore[union-attr, misc]
        for each in relations
        if each.auto_created and not each.concrete and each.on_delete is PROTECT  # type: ignore[union-attr]
    ]

"""Transactional outbox: one event per fact, with a delivery for each subscribed webhook."""

from datetime import timedelta

import pytest
from django.db import transaction

from leases import execution, leasing
from leases.retention.sweep import delete_expired
from sandboxes import destruction
from sandboxes.models import Delivery, Event, Sandbox, Webhook
from sandboxes.providers.errors import Unavailable
from sandboxes.webhooks import outbox
from tests.conftest import MINUTE, NOW

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("hand-written SQL")]


def hook(*kinds: str, **fields) -> Webhook:
    given = {"url": "https://example.com/events", "kinds": list(kinds), "sealed": b"x", "created_at": NOW} | fields
    return Webhook.objects.create(**given)


def put(kind: str = "budget.warning", key: str = "b1 2026-11", **more):
    return outbox.enqueue_event(kind, key=key, payload={"a": 1}, now=NOW, **more)


def test_an_event_is_inserted_once_with_a_delivery_for_each_subscribed_webhook() -> None:
    every, one = hook(), hook("budget.warning", "lease.ended")
    hook("lease.ended"), hook(active=False), hook(disabled_at=NOW), hook(sealed=None, removed_at=NOW)
    event = put()
    assert (event.kind, event.payload, event.at) == ("budget.warning", {"a": 1}, NOW)
    assert {row.webhook for row in event.deliveries.all()} == {every, one}
    assert set(Delivery.objects.values_list("due_at", "tries", "delivered_at")) == {(NOW, 0, None)}
    hook()
    assert put() is None
    assert (Event.objects.count(), Delivery.objects.count()) == (1, 2)
    assert put("budget.exhausted")  # same key, other kind


def test_an_event_without_subscribers_is_inserted_too() -> None:
    assert [put()] == list(Event.objects.all())


def test_an_unknown_kind_raises() -> None:
    with pytest.raises(ValueError, match="is not a valid EventType"):
        put("lease.began")


def test_a_rollback_removes_the_event() -> None:
    hook()
    with transaction.atomic():
        put()
        transaction.set_rollback(True)
    assert not Event.objects.exists() and not Delivery.objects.exists()


def test_the_end_of_a_lease_is_one_event(grant) -> None:
    hook()
    lease = grant()
    assert leasing.end(lease.pk, reason="operator", detail="her key is sk-123", now=NOW + MINUTE)
    assert not leasing.end(lease.pk, reason="ttl", now=NOW + 2 * MINUTE)
    event = Event.objects.get()
    assert (event.kind, event.key, event.at) == ("lease.ended", str(lease.pk), NOW + MINUTE)
    assert event.payload == {
        "lease_id": str(lease.pk), "agent_did": "did:plc:ada", "environment_id": "game-1", "environment_type": "catan",
        "end_reason": "operator", "leased_at": "2026-11-21T12:00:00Z", "ended_at": "2026-11-21T12:01:00Z",
        "failed_by": "interruption", "sandbox_reason": None, "sandbox_detail": None,
    }  # fmt: skip


def test_each_quarantine_of_a_sandbox_is_an_event(grant, memory, settings, stopped_clock) -> None:
    settings.DESTROY_TRIES = 2
    hook("sandbox.quarantined")
    lease = grant()
    box = execution.ensure_sandbox_ready(lease.pk, now=NOW)
    leasing.end(lease.pk, reason="released", now=NOW)
    counts = []
    memory.fail("destroy", Unavailable("engine down: its key is sk-123"))
    for minutes in (0, 10, 20, 30):  # two attempts, release from quarantine, two more attempts
        assert not destruction.destroy(box.pk, now=NOW + minutes * MINUTE)
        counts.append(Event.objects.filter(kind="sandbox.quarantined").count())
        if minutes == 10:
            assert destruction.retry_destroy(box.pk, now=NOW + 15 * MINUTE)
    assert counts == [0, 1, 1, 2] and Delivery.objects.count() == 2
    payload = Event.objects.filter(kind="sandbox.quarantined").latest("at").payload
    assert payload == {
        "sandbox": str(box.pk), "pool": box.pool.name, "provider": "memory", "ref": box.ref, "lease_id": str(lease.pk),
        "agent_did": "did:plc:ada", "environment_id": "game-1", "tries": 2, "quarantined_at": "2026-11-21T12:30:00Z",
    }  # fmt: skip
    assert Sandbox.objects.get(pk=box.pk).quarantined_at == NOW + 30 * MINUTE


def test_an_old_event_is_deleted_with_its_deliveries_once_no_enabled_webhook_waits_for_it() -> None:
    hook()
    paused = hook()
    put()
    Webhook.objects.filter(pk=paused.pk).update(active=False)
    late = NOW + timedelta(days=30, seconds=1)
    assert delete_expired(now=late).counts == {"webhook deliveries deleted": 1}  # that of the paused webhook
    Delivery.objects.update(due_at=None, delivered_at=NOW)
    assert delete_expired(now=NOW + timedelta(days=30)).counts == {}
    assert delete_expired(now=late).counts == {"webhook deliveries deleted": 1, "events deleted": 1}
    assert Webhook.objects.count() == 2

"""Webhooks, events and deliveries in the console."""

import base64
import re
from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client

from leases import leasing
from leases.models import Lease
from sandboxes.models import Delivery, Event, Webhook
from sandboxes.webhooks import delivery as delivering
from sandboxes.webhooks import outbox, subscriptions
from tests.admin.conftest import NOW
from tests.conftest import MINUTE
from tests.support.console import MARKUP, WHY, fetch, list_messages, list_rows, row_url, submit_bulk
from tests.support.servers.receiver import WebhookReceiver, verify_signature

pytestmark = pytest.mark.django_db
HOOKS, EVENTS, DELIVERIES = "/admin/sandboxes/webhook/", "/admin/sandboxes/event/", "/admin/sandboxes/delivery/"
NEW = {"kinds": ["lease.ended", "budget.warning"], "internal": "on", "description": "the pager", "reason": "on call wants it"}


@pytest.fixture
def webhook(receiver: WebhookReceiver) -> Webhook:
    return subscriptions.add_webhook(receiver.url, now=NOW, internal=True)[0]


def do(client: Client, act: str, row: Webhook | Delivery):
    """Submit the dialog of an action on a row's page."""
    return client.post(row_url(row, act), WHY)


def messages_of(client: Client, row: Webhook | Delivery) -> list[str]:
    return list_messages(client.get(row_url(row)))


def happen(key: str = "1") -> Delivery:
    event = outbox.enqueue_event("lease.ended", key=key, payload={"lease_id": key}, now=NOW)
    assert event
    return event.deliveries.earliest("pk")


def secret_in(text: str) -> str:
    [found] = set(re.findall(r"whsec_[A-Za-z0-9+/]{43}=", text))
    return found


def test_a_webhook_is_added_and_its_secret_shown_once(administrator: Client, receiver: WebhookReceiver) -> None:
    answer = administrator.post(f"{HOOKS}add/", NEW | {"url": receiver.url}, follow=True)
    row = Webhook.objects.get()
    assert answer.redirect_chain == [(row_url(row), 302)]
    secret = secret_in(answer.content.decode())
    assert (row.url, row.kinds, row.internal, row.created_by) == (receiver.url, NEW["kinds"], True, "administrator")
    assert LogEntry.objects.get().get_change_message() == "Add webhook: on call wants it"
    delivering.send_test_event(row, now=NOW)
    assert verify_signature(receiver.received[0], secret)
    hidden = {secret.removeprefix("whsec_"), base64.b64decode(secret.removeprefix("whsec_")).hex()}
    event, delivery = Event.objects.get(), Delivery.objects.get()
    for page in (row_url(row), row_url(event), row_url(delivery), HOOKS, EVENTS, DELIVERIES, "/admin/"):
        shown = fetch(administrator, page)
        assert not any(text in shown for text in hidden) and "v1," not in shown


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("url", "http://example.com"), ("url", "https://169.254.169.254/"), ("internal", ""), ("reason", "x"),
        ("kinds", ["webhook.test"]), ("url", "https://me:pw@example.com"),
    ],
)  # fmt: skip
def test_an_invalid_webhook_is_refused_at_its_field(administrator: Client, field: str, value: str) -> None:
    given = NEW | {"url": "https://10.0.0.1/", field: value}
    answer = administrator.post(f"{HOOKS}add/", {name: one for name, one in given.items() if one})
    assert answer.status_code == 200 and field in answer.context["adminform"].form.errors
    assert not Webhook.objects.exists()


def test_a_webhooks_subscription_is_editable_and_its_url_is_not(administrator: Client, webhook: Webhook) -> None:
    sealed, url = bytes(webhook.sealed or b""), webhook.url
    change = {"url": "https://evil.example/", "kinds": ["budget.exhausted"], "internal": "on", "description": "for Ada"}
    assert administrator.post(row_url(webhook), change).status_code == 302
    webhook.refresh_from_db()
    assert (webhook.url, webhook.kinds, webhook.description) == (url, ["budget.exhausted"], "for Ada")
    assert bytes(webhook.sealed or b"") == sealed
    response = administrator.post(row_url(webhook), {"kinds": []})  # the URL is a loopback address
    assert b"is not enabled for this webhook" in response.content


def test_a_test_event_is_sent_and_its_response_shown(operator: Client, webhook: Webhook, receiver: WebhookReceiver) -> None:
    assert do(operator, "send_test", webhook)["HX-Redirect"] == row_url(webhook)
    assert messages_of(operator, webhook) == ["1 webhook accepted the test event."]
    assert receiver.received[0].payload["type"] == "webhook.test"
    receiver.status = 500
    assert b"Status 500 Internal Server Error." in do(operator, "send_test", webhook).content
    shown = fetch(operator, row_url(webhook))
    assert "Status 500 Internal Server Error." in shown and "lh-alarmed" in shown


def test_a_webhook_is_paused_and_resumed(operator: Client, webhook: Webhook, receiver: WebhookReceiver) -> None:
    do(operator, "pause", webhook)
    shown = fetch(operator, row_url(webhook))
    assert "Resume…" in shown and "Pause…" not in shown
    assert list_rows(operator, f"{HOOKS}?slice=paused") == [webhook]
    do(operator, "pause", webhook)
    assert messages_of(operator, webhook)[0].startswith("Nothing changed")
    do(operator, "resume", webhook)
    shown = fetch(operator, row_url(webhook))
    assert "Pause…" in shown and "Resume…" not in shown


def test_a_rotated_secret_is_shown_once(administrator: Client, webhook: Webhook, receiver: WebhookReceiver) -> None:
    do(administrator, "rotate", webhook)
    secret = secret_in(fetch(administrator, row_url(webhook)))
    again = fetch(administrator, row_url(webhook))
    assert secret not in again and "previous secret expires" in again
    webhook.refresh_from_db()
    delivering.send_test_event(webhook, now=NOW)
    assert verify_signature(receiver.received[0], secret)
    assert not any(secret in entry.change_message for entry in LogEntry.objects.all())


def test_a_removed_webhook_is_a_record(administrator: Client, webhook: Webhook) -> None:
    happen()
    do(administrator, "remove", webhook)
    shown = fetch(administrator, row_url(webhook))
    assert "destroyed" in shown and "Remove…" not in shown and 'name="_save"' not in shown
    assert list_rows(administrator, HOOKS) == [] and list_rows(administrator, f"{HOOKS}?slice=all") == [webhook]


def test_a_failed_delivery_is_sent_again(operator: Client, webhook: Webhook, receiver: WebhookReceiver) -> None:
    delivery = happen()
    receiver.status = 503
    assert "failing" not in fetch(operator, HOOKS)
    for minutes in (0, 3 * 24 * 60 + 1):
        Delivery.objects.update(due_at=NOW, tries=delivering.MIN_ATTEMPTS - 1)
        Webhook.objects.update(failures=delivering.MIN_ATTEMPTS - 1, retry_at=None)
        delivering.deliver_due(now=NOW + minutes * MINUTE)
        assert ("active, failing" in fetch(operator, HOOKS)) == (minutes == 0)  # disabled after three days
    assert list_rows(operator, f"{DELIVERIES}?slice=given_up") == [delivery]
    assert list_rows(operator, f"{HOOKS}?slice=disabled") == [webhook]
    receiver.status = 204
    do(operator, "resume", webhook)
    do(operator, "again", delivery)
    assert list_rows(operator, DELIVERIES) == [delivery]
    assert delivering.deliver_due(now=NOW + timedelta(days=30)).counts == {"delivered": 1}
    assert list_rows(operator, f"{DELIVERIES}?slice=delivered") == [delivery]
    page = "sandboxes/delivery/?slice=delivered"
    assert submit_bulk(operator, page, "again_all", [delivery.pk], confirm="1", **WHY).status_code == 302
    assert list_rows(operator, DELIVERIES) == [delivery]


def test_an_event_shows_its_payload_and_deliveries(
    viewer: Client, lease: Lease, webhook: Webhook, receiver: WebhookReceiver
) -> None:
    leasing.end(lease.pk, reason="released", now=NOW)
    delivering.deliver_due(now=NOW)
    event = Event.objects.get()
    shown = fetch(viewer, row_url(event))
    assert "&quot;type&quot;: &quot;lease.ended&quot;" in shown and "delivered" in shown and receiver.url in shown
    assert list_rows(viewer, f"{EVENTS}?q={event.pk}") == [event]
    assert list_rows(viewer, f"{EVENTS}?q={lease.pk}") == [event]
    assert list_rows(viewer, f"{EVENTS}?q=nobody") == []
    for term in (str(lease.pk)[:8], receiver.url[-6:], f"{str(lease.pk)[:8]} {receiver.url[-6:]}"):
        assert list_rows(viewer, f"{DELIVERIES}?slice=all&q={term}") == list(event.deliveries.all()), term
    assert list_rows(viewer, f"{DELIVERIES}?slice=all&q=nobody") == []
    assert list_rows(viewer, f"{DELIVERIES}?slice=all&webhook__id__exact={webhook.pk}") == list(event.deliveries.all())
    assert list_rows(viewer, f"{DELIVERIES}?slice=all&event__id__exact={event.pk}") == list(event.deliveries.all())


def test_text_in_webhooks_is_escaped(viewer: Client, webhook: Webhook) -> None:
    Webhook.objects.update(description=MARKUP)
    delivery = happen("</pre><script>alert(1)</script>")
    for page in (HOOKS, EVENTS, DELIVERIES, row_url(webhook), row_url(delivery), row_url(delivery.event)):
        shown = fetch(viewer, page)
        assert "<img src=x" not in shown and "<script>alert" not in shown

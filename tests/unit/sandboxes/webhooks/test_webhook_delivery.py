"""Webhook delivery to a real receiver on loopback: signatures, retries, disabling, crashes and races."""

import base64
import io
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.core.management import call_command
from django.db import IntegrityError, connection, transaction
from django.utils import timezone
from django_q.models import OrmQ

from leases import leasing
from sandboxes import lifecycle, queue_threads
from sandboxes.db import clock, encryption
from sandboxes.errors import WebhookTestFailed
from sandboxes.models import Delivery, Event, Webhook
from sandboxes.sweep_log import SweepResult
from sandboxes.webhooks import delivery as delivering
from sandboxes.webhooks import http_post, outbox, subscriptions
from tests.conftest import MINUTE, NOW, run_in_threads
from tests.support.servers.receiver import WebhookReceiver, run_receiver, verify_signature
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db
DAY = timedelta(days=1)


def listen(receiver: WebhookReceiver, *kinds: str, path: str = "", **fields: Any) -> tuple[Webhook, str]:
    return subscriptions.add_webhook(receiver.url + path, kinds, now=NOW, internal=True, **fields)


@pytest.fixture
def webhook(receiver: WebhookReceiver) -> Webhook:
    return listen(receiver)[0]


def happen(number: int = 1, now=NOW) -> Event:
    event = outbox.enqueue_event("budget.warning", key=str(number), payload={"number": number}, now=now)
    assert event
    return event


def sweep(now=NOW) -> dict[str, int]:
    result = delivering.deliver_due(now=now)
    assert not result.failures
    return result.counts


def sweep_elsewhere(now=NOW) -> dict[str, int]:
    """Deliver as another process would, also during a pass of this one."""
    result = SweepResult()
    delivering.DeliveryPass(clock.clock_from(now), until=now + delivering.PASS_TIME_LIMIT, result=result).run()
    assert not result.failures
    return result.counts


# --- successful delivery --------------------------------------------------------------------------------------------


def test_an_event_arrives_once_and_its_signature_verifies(receiver: WebhookReceiver, grant) -> None:
    webhook, secret = listen(receiver)
    lease = grant()
    leasing.end(lease.pk, reason="released", now=NOW + MINUTE)
    assert sweep(NOW + 2 * MINUTE) == {"delivered": 1}
    assert sweep(NOW + 9 * MINUTE) == {}
    event, delivery, [one] = Event.objects.get(), Delivery.objects.get(), receiver.received
    assert one.path == "/events"
    assert one.payload == {
        "id": str(event.pk), "type": "lease.ended", "timestamp": "2026-11-21T12:01:00Z", "data": event.payload,
    }  # fmt: skip
    assert one.headers["webhook-id"] == str(event.pk)
    assert one.headers["webhook-timestamp"] == str(int((NOW + 2 * MINUTE).timestamp()))
    assert one.headers["content-type"] == "application/json"
    assert verify_signature(one, secret)
    assert not verify_signature(one, listen(receiver)[1])
    assert (delivery.tries, delivery.last_status, delivery.due_at) == (1, 204, None)
    assert NOW + 2 * MINUTE <= delivery.delivered_at < NOW + 3 * MINUTE
    webhook.refresh_from_db()
    assert (webhook.last_status, webhook.last_error, webhook.last_delivered_at) == (204, "", delivery.delivered_at)


def test_after_a_rotation_both_secrets_sign_for_a_day(receiver: WebhookReceiver) -> None:
    webhook, before = listen(receiver)
    after = subscriptions.rotate_secret(webhook, now=NOW)
    assert after
    assert subscriptions.rotate_secret(webhook, now=NOW) is None  # stale row
    for number, when in enumerate((NOW, NOW + DAY - MINUTE, NOW + DAY)):
        happen(number, when)
        sweep(when)
    assert [verify_signature(one, after) for one in receiver.received] == [True, True, True]
    assert [verify_signature(one, before) for one in receiver.received] == [True, True, False]


def test_an_event_enqueues_a_delivery_task(receiver: WebhookReceiver) -> None:
    happen(1)
    assert not OrmQ.objects.exists()  # no webhook subscribes
    listen(receiver)
    with transaction.atomic():
        happen(2)
        transaction.set_rollback(True)
    assert not OrmQ.objects.exists()
    happen(3, timezone.now())
    assert [task.func() for task in OrmQ.objects.all()] == ["sandboxes.webhooks.delivery.run_delivery_task"]
    assert delivering.run_delivery_task() == "1 delivered"


# --- failed delivery ------------------------------------------------------------------------------------------------


def test_a_failed_attempt_is_retried_with_backoff_until_delivered(receiver: WebhookReceiver) -> None:
    webhook, secret = listen(receiver)
    event = happen()
    receiver.status = 500
    waits, when = [], NOW
    for _ in range(5):
        assert sweep(when) == {"to be tried again": 1}
        delivery = Delivery.objects.get()
        waits.append((delivery.due_at - when).total_seconds())
        assert sweep(delivery.due_at - timedelta(seconds=1)) == {}
        when = delivery.due_at
    assert all(
        wait <= found < wait + 5 for found, wait in zip(waits, (5, 10, 20, 40, 80), strict=True)
    )  # the attempt itself takes time
    assert (delivery.tries, delivery.last_status, delivery.last_error) == (5, 500, "Status 500 Internal Server Error.")
    webhook.refresh_from_db()
    assert (webhook.last_status, webhook.last_error) == (500, "Status 500 Internal Server Error.")
    receiver.status = 200
    assert sweep(when) == {"delivered": 1}
    assert {one.headers["webhook-id"] for one in receiver.received} == {str(event.pk)} and len(receiver.received) == 6
    assert len({one.headers["webhook-timestamp"] for one in receiver.received}) == 6
    assert all(verify_signature(one, secret) for one in receiver.received)
    webhook.refresh_from_db()
    assert (webhook.last_status, webhook.last_error) == (200, "")


def test_a_receiver_that_fails_for_three_days_is_disabled(receiver: WebhookReceiver, webhook) -> None:
    happen()
    receiver.status = 503
    when, tries, longest = NOW, 0, timedelta(0)
    while (delivery := Delivery.objects.get()).due_at:
        longest, when, tries = max(longest, delivery.due_at - when), delivery.due_at, tries + 1
        sweep(when)
    assert NOW + 3 * DAY <= delivery.given_up_at < NOW + 3 * DAY + timedelta(hours=6, minutes=1)
    assert longest < timedelta(hours=6, minutes=1) and delivery.tries == tries > 15
    webhook.refresh_from_db()
    assert webhook.disabled_at == delivery.given_up_at
    assert happen(2, when).deliveries.count() == 0
    receiver.status = 200
    assert subscriptions.resume_webhook(webhook, now=when)
    assert not subscriptions.resume_webhook(webhook, now=when)
    happen(3, when)
    assert delivering.redeliver(delivery.pk, now=when)
    assert not delivering.redeliver(delivery.pk, now=when)
    assert sweep(when) == {"delivered": 2}


def test_a_delivery_not_attempted_for_days_is_not_abandoned_at_its_first_failure(receiver: WebhookReceiver, webhook) -> None:
    happen()
    receiver.status = 503  # first attempt after the outage
    assert sweep(NOW + 4 * DAY) == {"to be tried again": 1}
    receiver.status = 200
    assert sweep(NOW + 4 * DAY + MINUTE) == {"delivered": 1}
    webhook.refresh_from_db()
    assert webhook.disabled_at is None


def test_one_undeliverable_event_is_abandoned_without_disabling_the_webhook(receiver: WebhookReceiver, webhook) -> None:
    happen(1)
    receiver.status = 422
    for hours in range(0, 96, 6):
        sweep(NOW + timedelta(hours=hours))
        receiver.status = 200
        happen(hours + 2, NOW + timedelta(hours=hours, minutes=1))
        Delivery.objects.filter(event__key="1").exclude(due_at=None).update(due_at=NOW + timedelta(hours=hours + 5))
        assert sweep(NOW + timedelta(hours=hours, minutes=1)) == {"delivered": 1}
        receiver.status = 422
    webhook.refresh_from_db()
    assert Delivery.objects.get(event__key="1").given_up_at and webhook.disabled_at is None


def test_a_receiver_that_answers_410_is_disabled(receiver: WebhookReceiver, webhook) -> None:
    happen(1), happen(2)
    receiver.status = 410
    assert sweep() == {"given up": 1}
    webhook.refresh_from_db()
    assert webhook.disabled_at and webhook.last_status == 410
    assert Delivery.objects.filter(given_up_at=webhook.disabled_at).count() == 2
    assert sweep(NOW + DAY) == {} and len(receiver.received) == 1


@pytest.mark.parametrize(
    ("retry_after", "seconds"), [("60", 60), ("2", 5), ("999999", 6 * 3600), ("Mon, 1 Jan 2029", 5), ("-1", 5)]
)
def test_retry_after_delays_the_next_attempt(receiver: WebhookReceiver, webhook, retry_after: str, seconds: int) -> None:
    happen()
    receiver.status, receiver.headers = 429, {"Retry-After": retry_after}
    sweep()
    assert 0 <= (Delivery.objects.get().due_at - NOW).total_seconds() - seconds < 3  # duration of the attempt


def test_a_resumed_webhook_receives_its_pending_events(receiver: WebhookReceiver, webhook) -> None:
    happen(1)
    assert subscriptions.pause_webhook(webhook, now=NOW) and not subscriptions.pause_webhook(webhook, now=NOW)
    happen(2)
    assert sweep() == {}
    assert subscriptions.resume_webhook(webhook, now=NOW + 5 * DAY)
    receiver.status = 500
    assert sweep(NOW + 5 * DAY) == {"to be tried again": 1}  # the retry window starts now
    receiver.status = 204
    assert sweep(NOW + 5 * DAY + MINUTE) == {"delivered": 1}
    assert [one.payload["data"]["number"] for one in receiver.received] == [1, 1]


def test_a_removed_webhook_receives_nothing_and_has_no_secret(receiver: WebhookReceiver, webhook) -> None:
    happen(1)
    assert subscriptions.remove_webhook(webhook, now=NOW) and not subscriptions.remove_webhook(webhook, now=NOW)
    happen(2)
    webhook.refresh_from_db()
    assert (webhook.sealed, webhook.sealed_before) == (None, None)
    assert sweep() == {} and not receiver.received
    assert not subscriptions.resume_webhook(webhook, now=NOW) and not subscriptions.pause_webhook(webhook, now=NOW)
    assert not delivering.redeliver(Delivery.objects.get().pk, now=NOW)
    with pytest.raises(WebhookTestFailed):
        delivering.send_test_event(webhook, now=NOW)
    with pytest.raises(IntegrityError), transaction.atomic():
        Webhook.objects.filter(pk=webhook.pk).update(sealed=b"x")


def test_a_failing_webhook_does_not_delay_another(receiver: WebhookReceiver) -> None:
    with run_receiver() as broken:
        broken.status = 500
        listen(broken)
        listen(receiver)
        for number in range(3):
            happen(number)
        assert sweep() == {"delivered": 3, "to be tried again": 1}
        assert (len(broken.received), len(receiver.received)) == (1, 3)


def block_until(reached: Callable[[], bool], open_requests: list[int]) -> Callable[[BaseHTTPRequestHandler], None]:
    """Answer of a receiver that responds only once `reached`. The numbers of its open requests are appended."""
    lock, state = threading.Lock(), SimpleNamespace(open=0)

    def answer(request: BaseHTTPRequestHandler) -> None:
        with lock:
            state.open += 1
            open_requests.append(state.open)
        is_reached = wait_quietly(reached)
        with lock:
            state.open -= 1
        request.send_response(204 if is_reached else 500)
        request.send_header("Content-Length", "0")
        request.end_headers()

    return answer


def wait_quietly(reached: Callable[[], bool]) -> bool:
    """Wait shorter than the timeout of a delivery. Return whether the condition was reached."""
    deadline = time.monotonic() + 0.8 * http_post.TIMEOUT_SECONDS
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.01)
    return reached()


def test_receivers_that_do_not_respond_delay_no_event_of_another(receiver: WebhookReceiver) -> None:
    with run_receiver() as silent:
        silent.answer = block_until(lambda: len(receiver.received) == 5, [])
        for number in range(12):  # older than the webhook that works
            listen(silent, path=f"/{number}")
        listen(receiver)
        for number in range(5):
            happen(number)
        assert sweep()["delivered"] == 13 * 5
    assert Delivery.objects.filter(tries__gt=1).count() == 0


def test_receivers_that_failed_before_do_not_occupy_all_threads(receiver: WebhookReceiver, monkeypatch) -> None:
    monkeypatch.setattr(delivering, "MAX_PROBES", 3)
    monkeypatch.setattr(delivering, "MAX_PARALLEL_ATTEMPTS", 4)
    open_requests: list[int] = []
    with run_receiver() as silent:
        silent.answer = block_until(lambda: len(receiver.received) == 5 and max(open_requests) == 3, open_requests)
        for number in range(8):
            listen(silent, path=f"/{number}")
        Webhook.objects.update(failures=4, failing_since=NOW - MINUTE, retry_at=NOW)
        listen(receiver)
        for number in range(5):
            happen(number)
        assert sweep()["delivered"] == 9 * 5
    assert not Webhook.objects.exclude(failures=0, failing_since=None, retry_at=None).exists()


def test_a_receiver_that_fails_is_probed_with_one_event_and_then_gets_all(receiver: WebhookReceiver, webhook) -> None:
    for number in range(30):
        happen(number)
    receiver.status, when = 500, NOW
    for attempts in range(1, 9):
        assert sweep(when) == {"to be tried again": 1} and len(receiver.received) == attempts
        webhook.refresh_from_db()
        pause = min(timedelta(seconds=5) * 2 ** (attempts - 1), delivering.MAX_PROBE_INTERVAL)
        assert pause <= webhook.retry_at - when < pause + timedelta(seconds=5)
        assert sweep(webhook.retry_at - timedelta(seconds=3)) == {}
        when = webhook.retry_at
    assert (webhook.failures, webhook.failing_since - NOW < timedelta(seconds=5)) == (8, True)
    receiver.status = 204
    assert sweep(when)["delivered"] >= 22  # each failed event waits for its own next attempt
    sweep(when + delivering.MAX_BACKOFF)
    assert not Delivery.objects.filter(delivered_at=None).exists()


def test_resuming_and_sending_again_end_the_wait_of_a_webhook(receiver: WebhookReceiver, webhook) -> None:
    happen(1)
    sweep()
    happen(2)
    later = NOW + timedelta(days=1)
    Webhook.objects.update(retry_at=later)
    assert sweep(NOW + MINUTE) == {}
    assert delivering.redeliver(Delivery.objects.get(event__key="1").pk, now=NOW + MINUTE)
    assert sweep(NOW + MINUTE) == {"delivered": 2}
    happen(3)
    Webhook.objects.update(retry_at=later, failures=3, failing_since=NOW)
    subscriptions.pause_webhook(webhook, now=NOW)
    assert subscriptions.resume_webhook(webhook, now=NOW + MINUTE)
    assert sweep(NOW + MINUTE) == {"delivered": 1}


def test_a_pass_at_its_time_limit_leaves_the_rest_to_a_task(receiver: WebhookReceiver, webhook, monkeypatch) -> None:
    for number in range(3):
        happen(number)
    OrmQ.objects.all().delete()
    spent = [0.0]

    def hook(step: str, subject: Any) -> None:
        spent[0] += 40 * (step == "delivery claimed")

    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + spent[0]))
    monkeypatch.setattr(lifecycle, "CHECKPOINT_HOOKS", [hook])
    assert sweep() == {"delivered": 1}
    assert [task.func() for task in OrmQ.objects.all()] == ["sandboxes.webhooks.delivery.run_delivery_task"]


def test_a_request_during_a_pass_is_not_lost() -> None:
    state = delivering.RunningPass()
    assert state.begin() and not state.begin()
    assert not state.end(wanted=True)  # looks once more
    state.request()
    assert not state.end(wanted=True) and state.end(wanted=True)
    assert state.begin()
    state.request()
    assert state.end(wanted=False) and state.begin() and state.end(wanted=True)


@pytest.mark.django_db(transaction=True)
def test_a_task_of_the_queue_does_not_wait_for_receivers(receiver: WebhookReceiver, webhook) -> None:
    happen()
    answered = threading.Event()
    receiver.answer = block_until(answered.is_set, [])
    results: list[str] = []

    def work() -> None:
        queue_threads.mark_worker_thread()
        results.append(delivering.run_delivery_task())
        results.append(delivering.run_delivery_task())
        connection.close()

    worker = threading.Thread(target=work)
    worker.start()
    worker.join(30)
    assert results == ["still running in the background"] * 2 and not answered.is_set()
    answered.set()
    wait_until(lambda: Delivery.objects.filter(delivered_at__isnull=False).exists(), "delivered")
    wait_until(lambda: not delivering.RUNNING_PASS._is_running, "the pass has ended")
    assert len(receiver.received) == 1


def test_a_test_event_is_sent_once_also_to_a_paused_webhook(receiver: WebhookReceiver) -> None:
    webhook, secret = listen(receiver, "lease.ended")
    other, _ = listen(receiver)
    subscriptions.pause_webhook(webhook, now=NOW)
    delivering.send_test_event(webhook, now=NOW)
    [one] = receiver.received
    assert one.payload["type"] == "webhook.test" and one.payload["data"] == {"webhook_id": str(webhook.pk)}
    assert verify_signature(one, secret)
    receiver.status = 404
    with pytest.raises(WebhookTestFailed, match="Status 404 Not Found"):
        delivering.send_test_event(other, now=NOW)
    assert sweep(NOW + 4 * DAY) == {} and len(receiver.received) == 2
    other.refresh_from_db()
    assert (other.disabled_at, other.last_status) == (None, 404)


def test_an_undecryptable_secret_is_reported_and_nothing_is_sent(receiver: WebhookReceiver, webhook) -> None:
    other, _ = listen(receiver, "lease.ended")
    Webhook.objects.filter(pk=webhook.pk).update(sealed=other.sealed)  # an attacker with database access but no key
    happen()
    assert sweep() == {"to be tried again": 1}
    assert "LEASEHOLD_IDENTITY_KEYS" in Delivery.objects.get().last_error
    assert not receiver.received


# --- crashes and concurrent workers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "arrived"), [("delivery claimed", 0), ("delivery answered", 1)])
def test_another_worker_takes_over_after_a_crash(receiver: WebhookReceiver, crash_at, step: str, arrived: int) -> None:
    _, secret = listen(receiver)
    event = happen()
    with crash_at(step):
        sweep()
    assert len(receiver.received) == arrived
    assert sweep(NOW + delivering.CLAIM_TIMEOUT - timedelta(seconds=1)) == {}
    assert sweep(NOW + delivering.CLAIM_TIMEOUT + timedelta(seconds=10)) == {"delivered": 1}  # the sweep takes time as well
    assert [one.headers["webhook-id"] for one in receiver.received] == [str(event.pk)] * (arrived + 1)
    assert all(verify_signature(one, secret) for one in receiver.received)
    delivery = Delivery.objects.get()
    assert (delivery.tries, delivery.claim) == (2, None) and delivery.delivered_at


def test_a_concurrent_worker_skips_a_claimed_delivery(receiver: WebhookReceiver, webhook, at_checkpoint) -> None:
    happen()
    rival: list[dict[str, int]] = []
    at_checkpoint("delivery claimed", lambda: rival.append(sweep_elsewhere()))
    assert sweep() == {"delivered": 1}
    assert rival == [{}] and len(receiver.received) == 1


def test_a_receiver_gets_one_attempt_at_a_time_from_all_workers(receiver: WebhookReceiver, webhook, at_checkpoint) -> None:
    happen(1), happen(2)
    rival: list[dict[str, int]] = []
    at_checkpoint("delivery claimed", lambda: rival.append(sweep_elsewhere()))
    assert sweep() == {"delivered": 2}
    assert rival == [{}] and len(receiver.received) == 2


def test_a_worker_past_its_deadline_records_nothing(receiver: WebhookReceiver, webhook, at_checkpoint) -> None:
    happen()
    receiver.status = 500

    def rival() -> None:
        receiver.status = 204
        assert sweep_elsewhere(NOW + delivering.CLAIM_TIMEOUT + timedelta(seconds=10)) == {"delivered": 1}

    at_checkpoint("delivery answered", rival)
    assert sweep() == {"lost race": 1}
    delivery = Delivery.objects.get()
    assert delivery.delivered_at and delivery.last_status == 204


def test_a_webhook_removed_during_an_attempt_stays_removed(webhook, at_checkpoint) -> None:
    happen()
    at_checkpoint("delivery claimed", lambda: subscriptions.remove_webhook(webhook, now=NOW))
    assert sweep() == {"lost race": 1}
    assert Delivery.objects.get().given_up_at == NOW


# --- validation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/events", "ftp://example.com", "example.com", "https://", "https://me:pw@example.com/",
        "https://x y/",
        "https://example.com/#part", "https://169.254.169.254/latest", "https://[fe80::1]/", "https://[::ffff:169.254.169.254]/",
        "https://0.0.0.0/", "https://10.0.0.1/", "https://127.0.0.1/", "https://[::1]:8443/", "http://localhost/x",
        "https://example.com:99999/", "https://100.100.100.200/", "https://[64:ff9b::a9fe:a9fe]/", "https://" + "a" * 500,
    ],
)  # fmt: skip
def test_an_invalid_or_forbidden_url_is_refused(url: str) -> None:
    with pytest.raises(ValidationError) as refused:
        subscriptions.add_webhook(url, now=NOW)
    assert {*refused.value.message_dict} <= {"url", "internal"} and not Webhook.objects.exists()


@pytest.mark.parametrize("url", ["https://example.com/events?of=us", "https://xn--bcher-kva.example:8443/", "https://1.1.1.1/"])
def test_a_public_https_url_is_accepted(url: str) -> None:
    assert subscriptions.add_webhook(url, now=NOW)[0].url == url


@pytest.mark.parametrize("url", ["https://10.0.0.1/", "https://[::1]:8443/", "http://localhost:8000/x", "http://127.0.0.2/"])
def test_an_internal_address_is_accepted_for_an_internal_webhook(url: str) -> None:
    assert subscriptions.add_webhook(url, now=NOW, internal=True)[0].internal


def test_plain_http_to_other_hosts_needs_debug(settings) -> None:
    settings.DEBUG = True
    assert subscriptions.add_webhook("http://example.com/", now=NOW)


@pytest.mark.parametrize("kinds", [["lease.began"], ["webhook.test"], ["lease.ended", "lease.ended"], "lease.ended"])
def test_an_unknown_event_type_is_refused(kinds: Any) -> None:
    with pytest.raises(ValidationError) as refused:
        subscriptions.add_webhook("https://example.com", kinds, now=NOW)
    assert "kinds" in refused.value.message_dict


# --- secrets and upkeep ---------------------------------------------------------------------------------------------


def test_secrets_are_encrypted_again_under_the_first_key(receiver: WebhookReceiver, settings) -> None:
    webhook, first = listen(receiver)
    second = subscriptions.rotate_secret(webhook, now=NOW)
    assert second
    settings.IDENTITY_KEYS = [bytes(range(32))]
    assert subscriptions.reencrypt_secrets(now=NOW).changed == 1
    again = subscriptions.reencrypt_secrets(now=NOW)
    assert (again.changed, again.current, again.undecryptable) == (0, 1, [])
    settings.SECRET_KEY = "another, so that the key derived from it opens nothing"
    happen()
    assert sweep() == {"delivered": 1}
    assert verify_signature(receiver.received[0], first) and verify_signature(receiver.received[0], second)
    settings.IDENTITY_KEYS = []
    assert subscriptions.reencrypt_secrets(now=NOW).undecryptable == [webhook]


def test_a_secret_is_decrypted_for_its_own_row_only(receiver: WebhookReceiver) -> None:
    webhook, _ = listen(receiver)
    webhook.sealed_before, webhook.before_until = webhook.sealed, NOW + DAY
    assert len(subscriptions.load_signing_secrets(webhook, now=NOW)) == 2
    webhook.pk = listen(receiver)[0].pk
    with pytest.raises(encryption.DecryptionFailed):
        subscriptions.load_signing_secrets(webhook, now=NOW)


# --- secrets do not leak --------------------------------------------------------------------------------------------


def test_neither_secret_nor_signature_is_in_the_database_or_the_log(receiver: WebhookReceiver, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    webhook, first = listen(receiver)
    second = subscriptions.rotate_secret(webhook, now=NOW)
    assert second
    happen(1)
    sweep()
    receiver.status = 500
    happen(2)
    sweep(NOW + MINUTE)
    with pytest.raises(WebhookTestFailed):
        delivering.send_test_event(webhook, now=NOW + MINUTE)
    subscriptions.pause_webhook(webhook, now=NOW)
    signatures = {word for one in receiver.received for word in one.headers["webhook-signature"].split(" ")}
    assert len(signatures) == 6
    secrets = {secret.removeprefix("whsec_") for secret in (first, second)}
    raw = {form for secret in secrets for form in (base64.b64decode(secret), base64.b64decode(secret).hex().encode())}
    hidden = raw | {text.removeprefix("v1,").encode() for text in secrets | signatures}
    dump = io.StringIO()
    call_command("dumpdata", stdout=dump)
    stored = dump.getvalue().encode() + b"".join(
        bytes(each) for row in Webhook.objects.values_list("sealed", "sealed_before") for each in row if each
    )
    logged = caplog.text.encode()
    assert str(webhook.pk).encode() in stored and b"event not delivered" in logged
    assert not [text for text in hidden if text in stored or text in logged]


# --- parallel workers -----------------------------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
def test_parallel_workers_send_each_event_once(receiver: WebhookReceiver, webhook) -> None:
    events = {str(happen(number).pk) for number in range(20)}
    claimed: list[int] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        claimed.append(Delivery.objects.filter(claim__isnull=False).count())
        connection.close()
        handler.send_response(204)
        handler.end_headers()

    receiver.answer = answer

    def send(index: int) -> int:
        delivered = 0
        while Delivery.objects.filter(due_at__lte=NOW).exists():
            delivered += sweep_elsewhere().get("delivered", 0)
        return delivered

    with run_in_threads(4) as run:
        assert sum(run(send)) == 20
    ids = [one.headers["webhook-id"] for one in receiver.received]
    assert len(ids) == 20 and set(ids) == events
    assert set(Delivery.objects.values_list("tries", flat=True)) == {1}
    assert claimed == [1] * 20, "a receiver gets one attempt at a time"


@pytest.mark.django_db(transaction=True)
def test_concurrent_inserts_of_one_fact_are_one_event(webhook) -> None:
    with run_in_threads(4) as run:
        found = run(lambda index: outbox.enqueue_event("budget.exhausted", key="b1", payload={"by": index}, now=NOW))
    assert [type(each) for each in found].count(Event) == 1 and found.count(None) == 3
    assert (Event.objects.count(), Delivery.objects.count()) == (1, 1)

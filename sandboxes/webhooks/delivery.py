"""Tell webhooks what happened: at least once, signed as Standard Webhooks 1.0.0 says, tried again until it is too late.

https://www.standardwebhooks.com: the headers webhook-id, webhook-timestamp and webhook-signature, the last one a list of
"v1," and the base64 of HMAC-SHA256 over "id.timestamp.body", one for each secret that is good. The id is the event's and
stays the same over all tries: by it a receiver knows what it has had."""

import base64
import hashlib
import hmac
import json
import uuid
from collections.abc import Sequence
from datetime import datetime, timedelta

import structlog
from django.db import transaction
from django.db.models import Exists, F, OuterRef, Q, QuerySet
from django.utils import timezone

from sandboxes.db import encryption
from sandboxes.db.clock import clock_from, compute_backoff, format_timestamp
from sandboxes.errors import WebhookTestFailed
from sandboxes.lifecycle import checkpoint
from sandboxes.models.webhooks import ENABLED, NOT_REMOVED, Delivery, Event, EventType, Webhook
from sandboxes.sweep_log import SweepResult
from sandboxes.webhooks import http_post, subscriptions
from sandboxes.webhooks.http_post import PostResult

log = structlog.get_logger(__name__)
CLAIM_TIMEOUT = timedelta(minutes=2)  # a try takes posting.TIMEOUT and two short transactions; later, whoever made it is dead
INITIAL_BACKOFF, MAX_BACKOFF = timedelta(seconds=5), timedelta(hours=6)  # between two tries
RETRY_WINDOW = timedelta(days=3)  # from when on a failed try is the last one,
MIN_ATTEMPTS = 10  # if there were so many: nobody may have tried in all that time
PASS_TIME_LIMIT = timedelta(seconds=30)  # of one pass
HTTP_GONE = 410  # says that its receiver wants no more


# --- the sweep ------------------------------------------------------------------------------------------------------


def deliver_due(*, now: datetime) -> SweepResult:
    """Try what is due, the oldest first, and of several webhooks the one that has taken least of this pass: one that is
    slow does not hold up the others, and one that fails is left alone until the next pass."""
    swept, later = SweepResult(), clock_from(now)
    taken: dict[uuid.UUID, timedelta] = {}
    left_alone: set[uuid.UUID] = set()
    while (began := later()) <= now + PASS_TIME_LIMIT:
        due = [pk for pk in find_due_webhooks(now=began).values_list("pk", flat=True) if pk not in left_alone]
        if not due:
            break
        webhook = min(due, key=lambda pk: taken.get(pk, timedelta(0)))
        try:
            what = deliver_next(webhook, now=began)
        except Exception as failed:  # a bug that one event brings out must not keep the others
            log.exception("delivery failed", webhook=str(webhook))
            swept.failures.append(f"{webhook}: {type(failed).__name__}: {failed}")
            what = ""
        taken[webhook] = taken.get(webhook, timedelta(0)) + later() - began
        if what:
            swept.note(what)
        if what != "delivered":
            left_alone.add(webhook)
    return swept


def run_delivery_task() -> str:
    """What the queue runs when something has happened."""
    return str(deliver_due(now=timezone.now()))


def find_due_webhooks(*, now: datetime) -> QuerySet[Webhook]:
    """Webhooks that have something due."""
    return Webhook.objects.filter(ENABLED, Exists(find_due_deliveries(now=now).filter(webhook=OuterRef("pk")))).order_by(
        "created_at", "pk"
    )


def find_due_deliveries(*, now: datetime) -> QuerySet[Delivery]:
    """What is to be tried now, or was being tried by somebody who is dead; of webhooks that do not listen, too."""
    return Delivery.objects.filter(due_at__lte=now)


def find_deliverable(*, now: datetime) -> QuerySet[Delivery]:
    """What the sweep would try."""
    listening = Webhook.objects.filter(ENABLED, pk=OuterRef("webhook"))
    return find_due_deliveries(now=now).filter(Exists(listening)).order_by("due_at", "pk")


# --- one delivery ---------------------------------------------------------------------------------------------------


def deliver_next(webhook: uuid.UUID, *, now: datetime) -> str:
    """Try the oldest that is due for a webhook: "delivered", "to be tried again" or "given up"; "lost race" if somebody
    else was first at it, or has taken it over."""
    later = clock_from(now)
    delivery = claim_delivery(webhook, now=now)
    if delivery is None:
        return "lost race"
    checkpoint("delivery claimed", delivery)
    answer = send_once(delivery, now=now)
    checkpoint("delivery answered", delivery)
    return record_result(delivery, answer, now=later())


def claim_delivery(webhook: uuid.UUID, *, now: datetime) -> Delivery | None:
    """Nobody else tries this one before CLAIM is over."""
    with transaction.atomic(durable=True):
        free = find_deliverable(now=now).filter(webhook=webhook).select_for_update(skip_locked=True, of=("self",))
        pk = free.values_list("pk", flat=True).first()
        token = uuid.uuid4()
        if pk is None or not Delivery.objects.filter(pk=pk, due_at__lte=now).update(
            claim=token, due_at=now + CLAIM_TIMEOUT, tries=F("tries") + 1
        ):
            return None
    return Delivery.objects.select_related("event", "webhook").filter(pk=pk, claim=token).first()


def send_once(delivery: Delivery, *, now: datetime) -> PostResult:
    """Send it once, signed. What came back; it is written down by nobody yet."""
    event, webhook = delivery.event, delivery.webhook
    try:
        secrets = subscriptions.load_signing_secrets(webhook, now=now)
    except encryption.DecryptionFailed:
        log.error("webhook secret cannot be opened", webhook=str(webhook.pk))
        return PostResult(
            error="Its secret cannot be decrypted: LEASEHOLD_IDENTITY_KEYS lacks the key that it was encrypted under."
        )
    body = build_body(event)
    return http_post.post(webhook.url, body, build_headers(event.pk, body, secrets, now=now), internal=webhook.internal)


def build_body(event: Event) -> bytes:
    said = {"id": str(event.pk), "type": event.kind, "timestamp": format_timestamp(event.at), "data": event.payload}
    return json.dumps(said, separators=(",", ":")).encode()


def build_headers(pk: uuid.UUID, body: bytes, secrets: Sequence[bytes], *, now: datetime) -> dict[str, str]:
    moment = str(int(now.timestamp()))
    signed = b".".join((str(pk).encode(), moment.encode(), body))
    signatures = (base64.b64encode(hmac.digest(secret, signed, hashlib.sha256)).decode() for secret in secrets)
    return {
        "Content-Type": "application/json",
        "User-Agent": "Leasehold",
        "webhook-id": str(pk),
        "webhook-timestamp": moment,
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
    }


def record_result(delivery: Delivery, answer: PostResult, *, now: datetime) -> str:
    """Write down what came back, if the claim still holds."""
    tried = delivery.tries >= MIN_ATTEMPTS and now >= delivery.asked_at + RETRY_WINDOW
    over = delivery.event.kind == EventType.TEST or tried
    said = {"last_status": answer.status, "last_error": answer.error[:300]}
    if not answer.error:
        after: dict[str, datetime | None] = {"due_at": None, "delivered_at": now}
    elif over:
        after = {"due_at": None, "given_up_at": now}
    else:
        wait = max(
            compute_backoff(delivery.tries, first=INITIAL_BACKOFF, most=MAX_BACKOFF), min(answer.retry_after, MAX_BACKOFF)
        )
        after = {"due_at": now + wait}
    with transaction.atomic(durable=True):
        # The webhook's row first, as whoever resumes or removes it locks them in this order.
        webhook = Webhook.objects.filter(pk=delivery.webhook_id)
        webhook.update(last_at=now, **said, **({} if answer.error else {"last_delivered_at": now}))
        if not Delivery.objects.filter(pk=delivery.pk, claim=delivery.claim).update(claim=None, **after, **said):
            transaction.set_rollback(True)
            return "lost race"
        if not answer.error:
            return "delivered"
        dead = Q(last_delivered_at__isnull=True) | Q(last_delivered_at__lte=now - RETRY_WINDOW)
        silent = over and delivery.event.kind != EventType.TEST and webhook.filter(dead).exists()
        disabled = (silent or answer.status == HTTP_GONE) and webhook.filter(NOT_REMOVED, disabled_at__isnull=True).update(
            disabled_at=now
        )
        if disabled:
            subscriptions.abandon_deliveries(delivery.webhook_id, now=now)
            log.error("webhook disabled", webhook=str(delivery.webhook_id), error=answer.error)
    log.warning("event not delivered", webhook=str(delivery.webhook_id), event_id=str(delivery.event_id), error=answer.error)
    return "given up" if over or disabled else "to be tried again"


# --- what operators ask for -----------------------------------------------------------------------------------------


def send_test_event(webhook: Webhook, *, now: datetime, actor: str = "") -> Delivery:
    """Send it an event that says only that, once, also if it is paused. NotDelivered says what came back."""
    later = clock_from(now)
    fresh = Webhook.objects.filter(NOT_REMOVED, pk=webhook.pk).first()  # its secret may have been rotated since it was read
    if fresh is None:
        raise WebhookTestFailed("It was removed.")
    with transaction.atomic(durable=True):
        event = Event.objects.create(kind=EventType.TEST, key=uuid.uuid4().hex, payload={"webhook_id": str(webhook.pk)}, at=now)
        delivery = Delivery.objects.create(
            event=event, webhook=fresh, asked_at=now, due_at=now + CLAIM_TIMEOUT, claim=uuid.uuid4(), tries=1
        )
    log.info("webhook tested", webhook=str(webhook.pk), actor=actor)
    answer = send_once(delivery, now=now)
    record_result(delivery, answer, now=later())
    if answer.error:
        raise WebhookTestFailed(f"The test did not arrive. {answer.error}")
    return delivery


def redeliver(pk: int, *, now: datetime, actor: str = "") -> bool:
    """Have the sweep send what was delivered, or given up, once more. False if it is on its way, or its webhook gone."""
    there = Webhook.objects.filter(NOT_REMOVED, pk=OuterRef("webhook"))
    asked = Delivery.objects.filter(Exists(there), pk=pk, due_at__isnull=True).update(
        due_at=now, asked_at=now, tries=0, delivered_at=None, given_up_at=None
    )
    if asked:
        log.info("event sent again", delivery=pk, actor=actor)
    return bool(asked)

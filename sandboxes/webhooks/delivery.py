"""Delivery of events to webhooks: at least once, signed, retried with exponential backoff.

Signatures follow Standard Webhooks 1.0.0 (https://www.standardwebhooks.com): headers webhook-id, webhook-timestamp and
webhook-signature, the last one a list of "v1," plus the base64 of HMAC-SHA256 over "id.timestamp.body", one for each valid
secret. The id is the event's and stays the same over all attempts, so that receivers can drop duplicates."""

import json
import uuid
from collections.abc import Sequence
from datetime import datetime, timedelta

import structlog
from django.db import transaction
from django.db.models import Exists, F, OuterRef, Q, QuerySet

from sandboxes import installation_marks
from sandboxes.db import database_time, encryption
from sandboxes.db.clock import clock_from, compute_backoff, format_timestamp
from sandboxes.errors import WebhookTestFailed
from sandboxes.lifecycle import checkpoint
from sandboxes.models.webhooks import ENABLED, NOT_REMOVED, Delivery, Event, EventType, Webhook
from sandboxes.sweep_log import SweepResult
from sandboxes.webhooks import signatures, subscriptions
from sandboxes.webhooks.post_result import PostResult

log = structlog.get_logger(__name__)
# A claimed delivery is due again after CLAIM_TIMEOUT: its worker has died, because an attempt takes at most
# http_post.TIMEOUT_SECONDS and two short transactions.
CLAIM_TIMEOUT = timedelta(minutes=2)
INITIAL_BACKOFF, MAX_BACKOFF = timedelta(seconds=5), timedelta(hours=6)  # between two attempts
# A delivery is abandoned after a failed attempt if it is older than RETRY_WINDOW and has had MIN_ATTEMPTS attempts. The number
# of attempts matters if the worker was down for most of the window.
RETRY_WINDOW = timedelta(days=3)
MIN_ATTEMPTS = 10
PASS_TIME_LIMIT = timedelta(seconds=30)  # of one call of deliver_due, after which no further attempt begins
HTTP_GONE = 410  # Standard Webhooks: the receiver asks to disable the webhook


# --- the sweep ------------------------------------------------------------------------------------------------------


def deliver_due(*, now: datetime) -> SweepResult:
    """Attempt due deliveries for up to PASS_TIME_LIMIT.

    The next attempt is the oldest due delivery of the webhook whose attempts have taken the least time in this pass, so that a
    slow receiver does not delay the others. After a failed attempt a webhook is skipped until the next pass."""
    result, clock = SweepResult(), clock_from(now)
    time_used: dict[uuid.UUID, timedelta] = {}
    skipped: set[uuid.UUID] = set()
    while (started := clock()) <= now + PASS_TIME_LIMIT:
        due = [pk for pk in find_due_webhooks(now=started).values_list("pk", flat=True) if pk not in skipped]
        if not due:
            break
        webhook = min(due, key=lambda pk: time_used.get(pk, timedelta(0)))
        try:
            outcome = deliver_next(webhook, now=started)
        except Exception as failed:  # a bug that one event triggers must not stop the deliveries of the other webhooks
            log.exception("delivery failed", webhook=str(webhook))
            result.failures.append(f"{webhook}: {type(failed).__name__}: {failed}")
            outcome = ""
        time_used[webhook] = time_used.get(webhook, timedelta(0)) + clock() - started
        if outcome:
            result.note(outcome)
        if outcome != "delivered":
            skipped.add(webhook)
    return result


def run_delivery_task() -> str:
    """Deliver due events. Queue task that enqueue_event schedules."""
    if refusal := installation_marks.find_refusal():  # a copy of the database has the same events
        return f"Refused: {refusal}"
    return str(deliver_due(now=database_time.now()))


def find_due_webhooks(*, now: datetime) -> QuerySet[Webhook]:
    """Return the enabled webhooks with a due delivery."""
    return Webhook.objects.filter(ENABLED, Exists(find_due_deliveries(now=now).filter(webhook=OuterRef("pk")))).order_by(
        "created_at", "pk"
    )


def find_due_deliveries(*, now: datetime) -> QuerySet[Delivery]:
    """Return due deliveries, also of disabled webhooks. Includes claimed deliveries whose CLAIM_TIMEOUT has passed."""
    return Delivery.objects.filter(due_at__lte=now)


def find_deliverable(*, now: datetime) -> QuerySet[Delivery]:
    """Return the due deliveries of enabled webhooks, oldest first."""
    enabled = Webhook.objects.filter(ENABLED, pk=OuterRef("webhook"))
    return find_due_deliveries(now=now).filter(Exists(enabled)).order_by("due_at", "pk")


# --- one delivery ---------------------------------------------------------------------------------------------------


def deliver_next(webhook: uuid.UUID, *, now: datetime) -> str:
    """Attempt the oldest due delivery of a webhook.

    Returns "delivered", "to be tried again", "given up", or "lost race" if another worker claimed the delivery."""
    clock = clock_from(now)
    delivery = claim_delivery(webhook, now=now)
    if delivery is None:
        return "lost race"
    checkpoint("delivery claimed", delivery)
    result = send_once(delivery, now=now)
    checkpoint("delivery answered", delivery)
    return record_result(delivery, result, now=clock())


def claim_delivery(webhook: uuid.UUID, *, now: datetime) -> Delivery | None:
    """Claim the oldest due delivery for CLAIM_TIMEOUT. Return None if another worker was first."""
    with transaction.atomic(durable=True):
        due = find_deliverable(now=now).filter(webhook=webhook).select_for_update(skip_locked=True, of=("self",))
        pk = due.values_list("pk", flat=True).first()
        token = uuid.uuid4()
        if pk is None or not Delivery.objects.filter(pk=pk, due_at__lte=now).update(
            claim=token, due_at=now + CLAIM_TIMEOUT, tries=F("tries") + 1
        ):
            return None
    return Delivery.objects.select_related("event", "webhook").filter(pk=pk, claim=token).first()


def send_once(delivery: Delivery, *, now: datetime) -> PostResult:
    """Send a delivery once, signed, and return the result without recording it."""
    from sandboxes.webhooks import http_post  # imports aiohttp, 9 MiB that an installation without webhooks does not need

    event, webhook = delivery.event, delivery.webhook
    try:
        secrets = subscriptions.load_signing_secrets(webhook, now=now)
    except encryption.DecryptionFailed:
        log.error("webhook secret decryption failed", webhook=str(webhook.pk))
        return PostResult(error="The secret cannot be decrypted: LEASEHOLD_IDENTITY_KEYS lacks the key that encrypted it.")
    body = build_body(event)
    return http_post.post(webhook.url, body, build_headers(event.pk, body, secrets, now=now), internal=webhook.internal)


def build_body(event: Event) -> bytes:
    content = {"id": str(event.pk), "type": event.kind, "timestamp": format_timestamp(event.at), "data": event.payload}
    return json.dumps(content, separators=(",", ":")).encode()


def build_headers(event_id: uuid.UUID, body: bytes, secrets: Sequence[bytes], *, now: datetime) -> dict[str, str]:
    timestamp = str(int(now.timestamp()))
    return {
        "Content-Type": "application/json",
        "User-Agent": "Leasehold",
        "webhook-id": str(event_id),
        "webhook-timestamp": timestamp,
        "webhook-signature": " ".join(signatures.sign(secret, str(event_id), timestamp, body) for secret in secrets),
    }


def record_result(delivery: Delivery, result: PostResult, *, now: datetime) -> str:
    """Record the result of an attempt. Returns the outcome, as deliver_next does; "lost race" if the claim is no longer valid.

    Disables the webhook after status 410, or if the delivery of a real event is abandoned and no other delivery has succeeded
    within RETRY_WINDOW."""
    exhausted = delivery.tries >= MIN_ATTEMPTS and now >= delivery.asked_at + RETRY_WINDOW
    final = delivery.event.kind == EventType.TEST or exhausted
    attempt = {"last_status": result.status, "last_error": result.error[:300]}
    if not result.error:
        changes: dict[str, datetime | None] = {"due_at": None, "delivered_at": now}
    elif final:
        changes = {"due_at": None, "given_up_at": now}
    else:
        wait = max(
            compute_backoff(delivery.tries, initial=INITIAL_BACKOFF, maximum=MAX_BACKOFF), min(result.retry_after, MAX_BACKOFF)
        )
        changes = {"due_at": now + wait}
    with transaction.atomic(durable=True):
        # Updates the webhook before its delivery: `resume_webhook` and `remove_webhook` lock the rows in the same order.
        webhook = Webhook.objects.filter(pk=delivery.webhook_id)
        webhook.update(last_at=now, **attempt, **({} if result.error else {"last_delivered_at": now}))
        if not Delivery.objects.filter(pk=delivery.pk, claim=delivery.claim).update(claim=None, **changes, **attempt):
            transaction.set_rollback(True)
            return "lost race"
        if not result.error:
            return "delivered"
        no_recent_success = Q(last_delivered_at__isnull=True) | Q(last_delivered_at__lte=now - RETRY_WINDOW)
        failing = final and delivery.event.kind != EventType.TEST and webhook.filter(no_recent_success).exists()
        disabled = (failing or result.status == HTTP_GONE) and webhook.filter(NOT_REMOVED, disabled_at__isnull=True).update(
            disabled_at=now
        )
        if disabled:
            subscriptions.abandon_deliveries(delivery.webhook_id, now=now)
            log.error("webhook disabled", webhook=str(delivery.webhook_id), error=result.error)
    log.warning("event not delivered", webhook=str(delivery.webhook_id), event_id=str(delivery.event_id), error=result.error)
    return "given up" if final or disabled else "to be tried again"


# --- operator actions -----------------------------------------------------------------------------------------------


def send_test_event(webhook: Webhook, *, now: datetime, actor: str = "") -> Delivery:
    """Send one test event, also to a paused webhook. Raise WebhookTestFailed with the error."""
    clock = clock_from(now)
    current = Webhook.objects.filter(NOT_REMOVED, pk=webhook.pk).first()  # the secret may have been rotated meanwhile
    if current is None:
        raise WebhookTestFailed("The webhook was removed.")
    with transaction.atomic(durable=True):
        event = Event.objects.create(kind=EventType.TEST, key=uuid.uuid4().hex, payload={"webhook_id": str(webhook.pk)}, at=now)
        delivery = Delivery.objects.create(
            event=event, webhook=current, asked_at=now, due_at=now + CLAIM_TIMEOUT, claim=uuid.uuid4(), tries=1
        )
    log.info("webhook tested", webhook=str(webhook.pk), actor=actor)
    result = send_once(delivery, now=now)
    record_result(delivery, result, now=clock())
    if result.error:
        raise WebhookTestFailed(f"Test delivery failed. {result.error}")
    return delivery


def redeliver(pk: int, *, now: datetime, actor: str = "") -> bool:
    """Schedule a delivered or abandoned delivery again. Return False if it is pending or its webhook was removed."""
    not_removed = Webhook.objects.filter(NOT_REMOVED, pk=OuterRef("webhook"))
    scheduled = Delivery.objects.filter(Exists(not_removed), pk=pk, due_at__isnull=True).update(
        due_at=now, asked_at=now, tries=0, delivered_at=None, given_up_at=None
    )
    if scheduled:
        log.info("redelivery scheduled", delivery=pk, actor=actor)
    return bool(scheduled)

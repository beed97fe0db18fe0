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
from sandboxes.db.clock import backoff, iso, ticking
from sandboxes.errors import NotDelivered
from sandboxes.lifecycle import step
from sandboxes.models.webhooks import CURRENT, LISTENING, Delivery, Event, Kind, Webhook
from sandboxes.sweeps import Swept
from sandboxes.webhooks import http_post, subscriptions
from sandboxes.webhooks.http_post import Answer

log = structlog.get_logger(__name__)
CLAIM = timedelta(minutes=2)  # a try takes posting.TIMEOUT and two short transactions; later, whoever made it is dead
FIRST, MOST = timedelta(seconds=5), timedelta(hours=6)  # between two tries
PATIENCE = timedelta(days=3)  # from when on a failed try is the last one,
FEWEST = 10  # if there were so many: nobody may have tried in all that time
BUDGET = timedelta(seconds=30)  # of one pass
GONE = 410  # says that its receiver wants no more


# --- the sweep ------------------------------------------------------------------------------------------------------


def deliver_due(*, now: datetime) -> Swept:
    """Try what is due, the oldest first, and of several webhooks the one that has taken least of this pass: one that is
    slow does not hold up the others, and one that fails is left alone until the next pass."""
    swept, later = Swept(), ticking(now)
    taken: dict[uuid.UUID, timedelta] = {}
    left_alone: set[uuid.UUID] = set()
    while (began := later()) <= now + BUDGET:
        due = [pk for pk in waiting(now=began).values_list("pk", flat=True) if pk not in left_alone]
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


def deliver_soon() -> str:
    """What the queue runs when something has happened."""
    return str(deliver_due(now=timezone.now()))


def waiting(*, now: datetime) -> QuerySet[Webhook]:
    """Webhooks that have something due."""
    return Webhook.objects.filter(LISTENING, Exists(due(now=now).filter(webhook=OuterRef("pk")))).order_by("created_at", "pk")


def due(*, now: datetime) -> QuerySet[Delivery]:
    """What is to be tried now, or was being tried by somebody who is dead; of webhooks that do not listen, too."""
    return Delivery.objects.filter(due_at__lte=now)


def deliverable(*, now: datetime) -> QuerySet[Delivery]:
    """What the sweep would try."""
    listening = Webhook.objects.filter(LISTENING, pk=OuterRef("webhook"))
    return due(now=now).filter(Exists(listening)).order_by("due_at", "pk")


# --- one delivery ---------------------------------------------------------------------------------------------------


def deliver_next(webhook: uuid.UUID, *, now: datetime) -> str:
    """Try the oldest that is due for a webhook: "delivered", "to be tried again" or "given up"; "lost race" if somebody
    else was first at it, or has taken it over."""
    later = ticking(now)
    delivery = claim(webhook, now=now)
    if delivery is None:
        return "lost race"
    step("delivery claimed", delivery)
    answer = attempt(delivery, now=now)
    step("delivery answered", delivery)
    return record(delivery, answer, now=later())


def claim(webhook: uuid.UUID, *, now: datetime) -> Delivery | None:
    """Nobody else tries this one before CLAIM is over."""
    with transaction.atomic(durable=True):
        free = deliverable(now=now).filter(webhook=webhook).select_for_update(skip_locked=True, of=("self",))
        pk = free.values_list("pk", flat=True).first()
        token = uuid.uuid4()
        if pk is None or not Delivery.objects.filter(pk=pk, due_at__lte=now).update(
            claim=token, due_at=now + CLAIM, tries=F("tries") + 1
        ):
            return None
    return Delivery.objects.select_related("event", "webhook").filter(pk=pk, claim=token).first()


def attempt(delivery: Delivery, *, now: datetime) -> Answer:
    """Send it once, signed. What came back; it is written down by nobody yet."""
    event, webhook = delivery.event, delivery.webhook
    try:
        secrets = subscriptions.secrets_of(webhook, now=now)
    except encryption.Unopened:
        log.error("webhook secret cannot be opened", webhook=str(webhook.pk))
        return Answer(
            error="Its secret cannot be decrypted: LEASEHOLD_IDENTITY_KEYS lacks the key that it was encrypted under."
        )
    body = body_of(event)
    return http_post.post(webhook.url, body, headers(event.pk, body, secrets, now=now), internal=webhook.internal)


def body_of(event: Event) -> bytes:
    said = {"id": str(event.pk), "type": event.kind, "timestamp": iso(event.at), "data": event.payload}
    return json.dumps(said, separators=(",", ":")).encode()


def headers(pk: uuid.UUID, body: bytes, secrets: Sequence[bytes], *, now: datetime) -> dict[str, str]:
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


def record(delivery: Delivery, answer: Answer, *, now: datetime) -> str:
    """Write down what came back, if the claim still holds."""
    tried = delivery.tries >= FEWEST and now >= delivery.asked_at + PATIENCE
    over = delivery.event.kind == Kind.TEST or tried
    said = {"last_status": answer.status, "last_error": answer.error[:300]}
    if not answer.error:
        after: dict[str, datetime | None] = {"due_at": None, "delivered_at": now}
    elif over:
        after = {"due_at": None, "given_up_at": now}
    else:
        wait = max(backoff(delivery.tries, first=FIRST, most=MOST), min(answer.retry_after, MOST))
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
        dead = Q(last_delivered_at__isnull=True) | Q(last_delivered_at__lte=now - PATIENCE)
        silent = over and delivery.event.kind != Kind.TEST and webhook.filter(dead).exists()
        disabled = (silent or answer.status == GONE) and webhook.filter(CURRENT, disabled_at__isnull=True).update(
            disabled_at=now
        )
        if disabled:
            subscriptions.give_up(delivery.webhook_id, now=now)
            log.error("webhook disabled", webhook=str(delivery.webhook_id), error=answer.error)
    log.warning("event not delivered", webhook=str(delivery.webhook_id), event_id=str(delivery.event_id), error=answer.error)
    return "given up" if over or disabled else "to be tried again"


# --- what operators ask for -----------------------------------------------------------------------------------------


def send_test(webhook: Webhook, *, now: datetime, actor: str = "") -> Delivery:
    """Send it an event that says only that, once, also if it is paused. NotDelivered says what came back."""
    later = ticking(now)
    fresh = Webhook.objects.filter(CURRENT, pk=webhook.pk).first()  # its secret may have been rotated since it was read
    if fresh is None:
        raise NotDelivered("It was removed.")
    with transaction.atomic(durable=True):
        event = Event.objects.create(kind=Kind.TEST, key=uuid.uuid4().hex, payload={"webhook_id": str(webhook.pk)}, at=now)
        delivery = Delivery.objects.create(
            event=event, webhook=fresh, asked_at=now, due_at=now + CLAIM, claim=uuid.uuid4(), tries=1
        )
    log.info("webhook tested", webhook=str(webhook.pk), actor=actor)
    answer = attempt(delivery, now=now)
    record(delivery, answer, now=later())
    if answer.error:
        raise NotDelivered(f"The test did not arrive. {answer.error}")
    return delivery


def send_again(pk: int, *, now: datetime, actor: str = "") -> bool:
    """Have the sweep send what was delivered, or given up, once more. False if it is on its way, or its webhook gone."""
    there = Webhook.objects.filter(CURRENT, pk=OuterRef("webhook"))
    asked = Delivery.objects.filter(Exists(there), pk=pk, due_at__isnull=True).update(
        due_at=now, asked_at=now, tries=0, delivered_at=None, given_up_at=None
    )
    if asked:
        log.info("event sent again", delivery=pk, actor=actor)
    return bool(asked)

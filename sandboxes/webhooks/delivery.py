"""Delivery of events to webhooks: at least once, signed, retried with exponential backoff.

Signatures follow Standard Webhooks 1.0.0 (https://www.standardwebhooks.com): headers webhook-id, webhook-timestamp and
webhook-signature, the last one a list of "v1," plus the base64 of HMAC-SHA256 over "id.timestamp.body", one for each valid
secret. The id is the event's and stays the same over all attempts, so that receivers can drop duplicates."""

import json
import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import structlog
from django.db import transaction
from django.db.models import Exists, F, OuterRef, Q, QuerySet
from django.db.models.functions import Coalesce

from sandboxes import installation_marks
from sandboxes.claims import note_progress
from sandboxes.db import database_time, encryption
from sandboxes.db.clock import Clock, clock_from, compute_backoff, format_timestamp
from sandboxes.deferred_writes import end_if_unanswered
from sandboxes.errors import WebhookTestFailed
from sandboxes.lifecycle import checkpoint
from sandboxes.models.webhooks import ENABLED, NOT_REMOVED, Delivery, Event, EventType, Webhook
from sandboxes.queue_threads import DETACHED, StillRunning, run_in_work_thread
from sandboxes.sweep_log import SweepResult
from sandboxes.webhooks import outbox, signatures, subscriptions
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
MAX_PROBE_INTERVAL = timedelta(minutes=10)  # between two attempts at a receiver that fails
PASS_TIME_LIMIT = timedelta(seconds=30)  # of one call of deliver_due, after which no further attempt begins
MAX_PARALLEL_ATTEMPTS = 64  # of one process, at most one for each webhook
MAX_PROBES = 32  # of these, attempts at receivers whose last attempt failed
LOOK_INTERVAL_SECONDS = 0.5  # between two looks for due webhooks while attempts are in progress
HTTP_GONE = 410  # Standard Webhooks: the receiver asks to disable the webhook


# --- passes ---------------------------------------------------------------------------------------------------------


def deliver_due(*, now: datetime) -> SweepResult:
    """Attempt due deliveries for up to PASS_TIME_LIMIT, those of different webhooks in parallel.

    One pass runs in a process at a time. A call during a pass makes that pass look again, and returns at once."""
    result, clock = SweepResult(), clock_from(now)
    is_unfinished = False
    if not RUNNING_PASS.begin():
        return SweepResult({"left to the running pass": 1})
    try:
        while True:
            is_unfinished = DeliveryPass(clock, until=now + PASS_TIME_LIMIT, result=result).run()
            if RUNNING_PASS.end(wanted=not is_unfinished):
                break
    except BaseException:
        RUNNING_PASS.end(wanted=False)
        raise
    if is_unfinished:
        outbox.enqueue_delivery_task()
    return result


def run_delivery_task() -> str:
    """Deliver due events in a thread of their own. Queue task that enqueue_event schedules."""
    if refusal := installation_marks.find_refusal():  # a copy of the database has the same events
        return f"Refused: {refusal}"
    RUNNING_PASS.request()
    try:
        return run_in_work_thread("deliveries", lambda: str(deliver_due(now=database_time.now())), wait=DETACHED)
    except StillRunning as running:
        return str(running)


class RunningPass:
    """State of the pass of this process, so that a request during a pass is neither lost nor starts a second pass."""

    def __init__(self) -> None:
        self._lock, self._is_running, self._is_requested = threading.Lock(), False, False

    def request(self) -> None:
        """Make the running pass look again before it ends."""
        with self._lock:
            self._is_requested = True

    def begin(self) -> bool:
        """Begin a pass, or make the running one look again. Return whether the caller begins."""
        with self._lock:
            self._is_requested = self._is_running
            begun, self._is_running = not self._is_running, True
            return begun

    def end(self, *, wanted: bool) -> bool:
        """End the pass, unless a further look is `wanted` and was requested. Return whether the pass has ended."""
        with self._lock:
            self._is_running, self._is_requested = wanted and self._is_requested, False
            return not self._is_running


RUNNING_PASS = RunningPass()


class DeliveryPass:
    """One look at all due deliveries. This thread reads and writes the rows; threads without a database connection send.

    A webhook has one attempt at a time, of all processes together. Webhooks that work come first, the longest not attempted
    before the others. Those whose last attempt failed have at most MAX_PROBES attempts in progress: silent receivers never
    occupy all threads."""

    def __init__(self, clock: Clock, *, until: datetime, result: SweepResult) -> None:
        self._clock, self._until, self._result = clock, until, result
        self._attempts: dict[Future[PostResult], Delivery] = {}
        self._left_out: set[uuid.UUID] = set()  # until the next pass: another process delivers, or the rows cannot be written

    def run(self) -> bool:
        """Attempt deliveries until none is due. Return whether the time limit has left some."""
        with ThreadPoolExecutor(MAX_PARALLEL_ATTEMPTS, thread_name_prefix="webhook") as senders:
            while True:
                is_over = self._clock() > self._until
                if not is_over:
                    self._begin_attempts(senders)
                if not self._attempts:
                    return is_over and bool(self._choose(now=self._clock()))
                done, _ = wait(self._attempts, timeout=LOOK_INTERVAL_SECONDS, return_when=FIRST_COMPLETED)
                note_progress()
                for attempt in done:
                    self._record(attempt, self._attempts.pop(attempt))

    def _begin_attempts(self, senders: ThreadPoolExecutor) -> None:
        now = self._clock()
        for webhook in self._choose(now=now):
            delivery = None
            with self._result.catching(webhook):
                delivery = claim_delivery(webhook, now=now)
            if delivery is None:
                self._result.note("lost race")
                self._left_out.add(webhook)
                continue
            checkpoint("delivery claimed", delivery)
            self._attempts[senders.submit(send_once, delivery, now=now)] = delivery

    def _choose(self, *, now: datetime) -> list[uuid.UUID]:
        """Return the webhooks whose next attempt begins now."""
        attempted = [delivery.webhook for delivery in self._attempts.values()]
        probes = MAX_PROBES - sum(webhook.failures > 0 for webhook in attempted)
        due = find_due_webhooks(now=now).exclude(pk__in={*self._left_out, *(webhook.pk for webhook in attempted)})
        working = [*due.filter(failures=0).values_list("pk", flat=True)[: MAX_PARALLEL_ATTEMPTS - len(attempted)]]
        room = min(probes, MAX_PARALLEL_ATTEMPTS - len(attempted) - len(working))
        return [*working, *due.filter(failures__gt=0).values_list("pk", flat=True)[: max(room, 0)]]

    def _record(self, attempt: Future[PostResult], delivery: Delivery) -> None:
        """Record a finished attempt. A bug that one event triggers must not stop the deliveries of the other webhooks."""
        outcome = ""
        with self._result.catching(delivery.webhook_id):
            answer = attempt.result()
            checkpoint("delivery answered", delivery)
            outcome = record_result(delivery, answer, now=self._clock())
            self._result.note(outcome)
        if outcome in ("", "lost race"):
            self._left_out.add(delivery.webhook_id)


def find_due_webhooks(*, now: datetime) -> QuerySet[Webhook]:
    """Return the enabled webhooks with a due delivery that may be attempted now, the longest not attempted first."""
    due = Exists(find_due_deliveries(now=now).filter(webhook=OuterRef("pk")))
    return find_free_webhooks(now=now).filter(ENABLED, due).order_by(F("last_at").asc(nulls_first=True), "created_at", "pk")


def find_free_webhooks(*, now: datetime) -> QuerySet[Webhook]:
    """Return the webhooks that do not wait after a failure, and to which no process sends at this moment."""
    is_ready = Q(retry_at__isnull=True) | Q(retry_at__lte=now)
    in_progress = Delivery.objects.filter(webhook=OuterRef("pk"), claim__isnull=False, due_at__gt=now)
    return Webhook.objects.filter(is_ready, ~Exists(in_progress))


def find_due_deliveries(*, now: datetime) -> QuerySet[Delivery]:
    """Return due deliveries, also of disabled webhooks. Includes claimed deliveries whose CLAIM_TIMEOUT has passed."""
    return Delivery.objects.filter(due_at__lte=now)


def find_deliverable(*, now: datetime) -> QuerySet[Delivery]:
    """Return the due deliveries of enabled webhooks, oldest first."""
    enabled = Webhook.objects.filter(ENABLED, pk=OuterRef("webhook"))
    return find_due_deliveries(now=now).filter(Exists(enabled)).order_by("due_at", "pk")


# --- one delivery ---------------------------------------------------------------------------------------------------


def claim_delivery(webhook: uuid.UUID, *, now: datetime) -> Delivery | None:
    """Claim the oldest due delivery for CLAIM_TIMEOUT. Return None if another worker was first.

    The row of the webhook is locked: workers of all hosts together make one attempt at a time for each webhook."""
    token = uuid.uuid4()
    own = Delivery.objects.filter(webhook=webhook, claim=token, due_at__isnull=False)
    with end_if_unanswered(partial(own.update, claim=None, due_at=now), webhook), transaction.atomic(durable=True):
        if not Webhook.objects.select_for_update(skip_locked=True).filter(pk=webhook).exists():
            return None
        if not find_free_webhooks(now=now).filter(pk=webhook).exists():
            return None
        due = find_deliverable(now=now).filter(webhook=webhook).select_for_update(skip_locked=True, of=("self",))
        pk = due.values_list("pk", flat=True).first()
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
    """Record the result of an attempt. Return "delivered", "to be tried again" or "given up".

    Return "lost race" if the claim is no longer valid. After a failed attempt all deliveries of the webhook wait, at most
    MAX_PROBE_INTERVAL: the next attempt is a probe. A webhook is disabled after status 410, or once all attempts of
    RETRY_WINDOW have failed."""
    exhausted = delivery.tries >= MIN_ATTEMPTS and now >= delivery.asked_at + RETRY_WINDOW
    final = delivery.event.kind == EventType.TEST or exhausted
    attempt = {"last_status": result.status, "last_error": result.error}
    if not result.error:
        changes: dict[str, datetime | None] = {"due_at": None, "delivered_at": now}
    elif final:
        changes = {"due_at": None, "given_up_at": now}
    else:
        delay = max(
            compute_backoff(delivery.tries, initial=INITIAL_BACKOFF, maximum=MAX_BACKOFF), min(result.retry_after, MAX_BACKOFF)
        )
        changes = {"due_at": now + delay}
    failures = delivery.webhook.failures + 1
    health: dict[str, Any] = {"failures": 0, "failing_since": None, "retry_at": None, "last_delivered_at": now}
    if result.error:
        pause = compute_backoff(failures, initial=INITIAL_BACKOFF, maximum=MAX_PROBE_INTERVAL)
        pause = max(pause, min(result.retry_after, MAX_BACKOFF))
        health = {"failures": F("failures") + 1, "failing_since": Coalesce("failing_since", now), "retry_at": now + pause}
    with transaction.atomic(durable=True):
        # Updates the webhook before its delivery: `resume_webhook` and `remove_webhook` lock the rows in the same order.
        webhook = Webhook.objects.filter(pk=delivery.webhook_id)
        webhook.update(last_at=now, **attempt, **health)
        if not Delivery.objects.filter(pk=delivery.pk, claim=delivery.claim).update(claim=None, **changes, **attempt):
            transaction.set_rollback(True)
            return "lost race"
        if not result.error:
            return "delivered"
        is_failing = Q(failing_since__lte=now - RETRY_WINDOW, failures__gte=MIN_ATTEMPTS)
        failing = delivery.event.kind != EventType.TEST and webhook.filter(is_failing).exists()
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
    token = uuid.uuid4()
    end = partial(Delivery.objects.filter(webhook=current, claim=token).update, claim=None, due_at=None, given_up_at=now)
    with end_if_unanswered(end, current), transaction.atomic(durable=True):
        event = Event.objects.create(kind=EventType.TEST, key=uuid.uuid4().hex, payload={"webhook_id": str(webhook.pk)}, at=now)
        delivery = Delivery.objects.create(
            event=event, webhook=current, asked_at=now, due_at=now + CLAIM_TIMEOUT, claim=token, tries=1
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
        Webhook.objects.filter(deliveries=pk).update(retry_at=None)
        log.info("redelivery scheduled", delivery=pk, actor=actor)
    return bool(scheduled)

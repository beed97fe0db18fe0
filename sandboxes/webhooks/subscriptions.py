"""Webhook subscriptions: add, pause, resume, rotate the secret, remove. A secret is returned once, when it is generated."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import structlog
from django.db import transaction
from django.db.models import Count, Q

from sandboxes import audit
from sandboxes.db import encryption
from sandboxes.models.webhooks import NOT_REMOVED, Delivery, Webhook
from sandboxes.webhooks import signatures
from sandboxes.webhooks.signatures import ROTATION_OVERLAP

log = structlog.get_logger(__name__)
AUDITED_COLUMNS = ("kinds", "internal", "description")
MIN_WARNED_FAILURES = 3  # failed attempts in a row, about 15 seconds


@dataclass(frozen=True)
class FailingWebhooks:
    """Numbers of webhooks that were disabled after failures, and of those whose receiver fails and is tried again."""

    disabled: int
    failing: int


def count_failing() -> FailingWebhooks:
    """Count the failing webhooks: until a delivery succeeds, or an operator resumes, pauses or removes a disabled one."""
    disabled = Q(disabled_at__isnull=False)
    counts = Webhook.objects.filter(NOT_REMOVED, active=True).aggregate(
        disabled=Count("pk", filter=disabled), failing=Count("pk", filter=~disabled & Q(failures__gte=MIN_WARNED_FAILURES))
    )
    return FailingWebhooks(**counts)


def add_webhook(
    url: str,
    kinds: Sequence[str] = (),
    *,
    now: datetime,
    actor: audit.Actor = audit.CONTROL_PLANE,
    description: str = "",
    internal: bool = False,
) -> tuple[Webhook, str]:  # fmt: skip
    """Add a webhook for some event types, by default for all. Return the webhook and the only copy of its secret.

    Raise ValidationError."""
    webhook = Webhook(url=url, kinds=list(kinds), description=description, internal=internal, created_at=now, created_by=actor)
    webhook.full_clean(exclude=["sealed"], validate_constraints=False)
    sealed, secret = _generate_secret(webhook.pk)
    webhook.sealed = sealed
    with transaction.atomic():
        webhook.save(force_insert=True)
        audit.record(webhook, "Add webhook", audit.describe_values(webhook, AUDITED_COLUMNS), actor=actor, now=now)
    log.info("webhook added", webhook=str(webhook.pk), actor=actor)
    return webhook, secret


def rotate_secret(webhook: Webhook, *, now: datetime, actor: audit.Actor = audit.CONTROL_PLANE) -> str | None:
    """Generate a new secret and return its only copy. The previous secret also signs for ROTATION_OVERLAP.

    Return None if the webhook was removed, or if its secret was rotated since `webhook` was read."""
    sealed, secret = _generate_secret(webhook.pk)
    with transaction.atomic():
        rotated = Webhook.objects.filter(NOT_REMOVED, pk=webhook.pk, sealed=webhook.sealed).update(
            sealed=sealed, sealed_before=webhook.sealed, before_until=now + ROTATION_OVERLAP
        )
        if rotated:
            audit.record(webhook, "Rotate webhook secret", actor=actor, now=now)
    if rotated:
        log.info("webhook secret rotated", webhook=str(webhook.pk), actor=actor)
    return secret if rotated else None


def pause_webhook(webhook: Webhook, *, now: datetime, actor: audit.Actor = audit.CONTROL_PLANE) -> bool:
    """Pause a webhook: later events create no delivery for it, and pending deliveries wait.

    Return False if the webhook was paused or removed before."""
    with transaction.atomic():
        paused = Webhook.objects.filter(NOT_REMOVED, pk=webhook.pk, active=True).update(active=False)
        if paused:
            audit.record(webhook, "Pause webhook", actor=actor, now=now)
    if paused:
        log.info("webhook paused", webhook=str(webhook.pk), actor=actor)
    return bool(paused)


def resume_webhook(webhook: Webhook, *, now: datetime, actor: audit.Actor = audit.CONTROL_PLANE) -> bool:
    """Resume a paused or disabled webhook, and make its pending deliveries due now.

    Return False if the webhook was active already, or was removed."""
    stopped = Q(active=False) | Q(disabled_at__isnull=False)
    with transaction.atomic():
        resumed = Webhook.objects.filter(NOT_REMOVED & stopped, pk=webhook.pk).update(
            active=True, disabled_at=None, failures=0, failing_since=None, retry_at=None
        )
        if resumed:
            audit.record(webhook, "Resume webhook", actor=actor, now=now)
            pending = Delivery.objects.filter(webhook=webhook, due_at__isnull=False)
            pending.update(asked_at=now)
            pending.filter(claim__isnull=True).update(due_at=now)
    if resumed:
        log.info("webhook resumed", webhook=str(webhook.pk), actor=actor)
    return bool(resumed)


def remove_webhook(webhook: Webhook, *, now: datetime, actor: audit.Actor = audit.CONTROL_PLANE) -> bool:
    """Remove a webhook: delete its secret and abandon pending deliveries. Return False if the webhook was removed before.

    The rows of the webhook and its deliveries stay: a concurrent transaction may be inserting a delivery of this webhook."""
    with transaction.atomic():
        removed = Webhook.objects.filter(NOT_REMOVED, pk=webhook.pk).update(
            removed_at=now, sealed=None, sealed_before=None, before_until=None, active=False
        )
        if removed:
            abandon_deliveries(webhook.pk, now=now)
            audit.record(webhook, "Remove webhook", actor=actor, now=now)
    if removed:
        log.info("webhook removed", webhook=str(webhook.pk), actor=actor)
    return bool(removed)


def abandon_deliveries(webhook: UUID, *, now: datetime) -> None:
    """Abandon all pending deliveries of a webhook. Called in the transaction that disables or removes the webhook."""
    Delivery.objects.filter(webhook=webhook, due_at__isnull=False).update(due_at=None, claim=None, given_up_at=now)


def load_signing_secrets(webhook: Webhook, *, now: datetime) -> list[bytes]:
    """Return the valid secrets, newest first. Raise encryption.DecryptionFailed if no configured key decrypts one of them."""
    sealed = [webhook.sealed]
    if webhook.before_until and now < webhook.before_until:
        sealed.append(webhook.sealed_before)
    return [encryption.decrypt(bytes(secret), row=_encryption_context(webhook.pk))[0] for secret in sealed if secret]


def reencrypt_secrets(*, now: datetime) -> encryption.ReencryptionResult[Webhook]:
    """Encrypt every secret under the first encryption key, so that the other keys can be removed. Idempotent."""
    result: encryption.ReencryptionResult[Webhook] = encryption.ReencryptionResult()
    for webhook in Webhook.objects.filter(NOT_REMOVED):
        row = _encryption_context(webhook.pk)
        try:
            secret, is_current = encryption.decrypt(bytes(webhook.sealed or b""), row=row)
            changes: dict[str, bytes | None] = {} if is_current else {"sealed": encryption.encrypt(secret, row=row)}
            if webhook.sealed_before:
                before, is_current = encryption.decrypt(bytes(webhook.sealed_before), row=row)
                overlap_ended = webhook.before_until is None or webhook.before_until <= now
                changes |= (
                    {"sealed_before": None}
                    if overlap_ended
                    else {}
                    if is_current
                    else {"sealed_before": encryption.encrypt(before, row=row)}
                )
        except encryption.DecryptionFailed:
            result.undecryptable.append(webhook)
            continue
        if changes:
            unchanged = Webhook.objects.filter(NOT_REMOVED, pk=webhook.pk, sealed=webhook.sealed)
            result.changed += unchanged.update(**changes)
        else:
            result.current += 1
    return result


def _generate_secret(pk: UUID) -> tuple[bytes, str]:
    secret, text = signatures.generate_secret()
    return encryption.encrypt(secret, row=_encryption_context(pk)), text


def _encryption_context(pk: UUID) -> str:
    return f"webhook {pk}"

"""Signing secrets of game servers: one environment's events, without an API key.

A secret is returned once, when it is added. The one before stays valid for ROTATION_OVERLAP, so that a game server can be
configured without a lost event."""

from datetime import datetime

import structlog
from django.db import transaction
from django.db.models import Q, QuerySet

from leases.environments import lifecycle
from leases.environments.models import EnvironmentSecret
from leases.errors import InvalidSignature
from sandboxes import audit
from sandboxes.db import encryption
from sandboxes.webhooks import signatures
from sandboxes.webhooks.signatures import ROTATION_OVERLAP

log = structlog.get_logger(__name__)
MAX_SECRETS = 10  # valid ones of an environment that are compared, newest first
UNKNOWN = "No valid signing secret exists for this environment."


def add_secret(
    environment_id: str, *, revoke_previous: bool = False, now: datetime, actor: audit.Actor = audit.CONTROL_PLANE
) -> tuple[EnvironmentSecret, str]:
    """Add a secret and return its row and its only copy. Earlier secrets end after ROTATION_OVERLAP, or now if revoked.

    Raise EnvironmentNotFound."""
    environment = lifecycle.find(environment_id)
    row = EnvironmentSecret(environment=environment, created_at=now, created_by=actor)
    secret, text = signatures.generate_secret()
    row.sealed = encryption.encrypt(secret, row=_encryption_context(row))
    until = now if revoke_previous else now + ROTATION_OVERLAP
    with transaction.atomic():
        longer = Q(valid_until__isnull=True) | Q(valid_until__gt=until)
        EnvironmentSecret.objects.filter(longer, environment=environment).update(valid_until=until)
        row.save(force_insert=True)
        EnvironmentSecret.objects.filter(environment=environment, valid_until__lte=now).delete()
        detail = "earlier secrets are revoked" if revoke_previous else ""
        audit.record(environment, "Add secret", detail, actor=actor, now=now)
    log.info("environment secret added", environment=environment_id, secret=str(row.pk), actor=actor)
    return row, text


def check_request(environment_id: str, message_id: str, timestamp: str, signature: str, *, now: datetime) -> list[bytes]:
    """Check the headers before the body is read, and return the secrets that `verify` compares. Raise InvalidSignature."""
    if "\0" in environment_id:
        raise InvalidSignature(UNKNOWN, field="webhook-signature")
    try:
        signatures.check_headers(message_id, timestamp, signature, now=now)
    except signatures.InvalidHeader as invalid:
        raise InvalidSignature(str(invalid), field=invalid.header) from None
    secrets = [secret for row in _find_valid(environment_id, now=now)[:MAX_SECRETS] if (secret := _open_secret(row))]
    if not secrets:
        raise InvalidSignature(UNKNOWN, field="webhook-signature")
    return secrets


def verify(secrets: list[bytes], message_id: str, timestamp: str, signature: str, body: bytes) -> None:
    """Raise InvalidSignature unless one of the secrets made the signature."""
    try:
        signatures.verify(secrets, message_id, timestamp, signature, body)
    except signatures.InvalidHeader as invalid:
        raise InvalidSignature(str(invalid), field=invalid.header) from None


def reencrypt() -> "encryption.ReencryptionResult[EnvironmentSecret]":
    """Encrypt every secret under the first encryption key. Idempotent."""
    result: encryption.ReencryptionResult[EnvironmentSecret] = encryption.ReencryptionResult()
    for row in EnvironmentSecret.objects.order_by("pk"):
        try:
            secret, is_current = encryption.decrypt(bytes(row.sealed), row=_encryption_context(row))
        except encryption.DecryptionFailed:
            result.undecryptable.append(row)
            continue
        if is_current:
            result.current += 1
            continue
        sealed = encryption.encrypt(secret, row=_encryption_context(row))
        result.changed += EnvironmentSecret.objects.filter(pk=row.pk).update(sealed=sealed)
    return result


def _find_valid(environment_id: str, *, now: datetime) -> QuerySet[EnvironmentSecret]:
    valid = Q(valid_until__isnull=True) | Q(valid_until__gt=now)
    return EnvironmentSecret.objects.filter(valid, environment=environment_id).order_by("-created_at")


def _open_secret(row: EnvironmentSecret) -> bytes | None:
    try:
        return encryption.decrypt(bytes(row.sealed), row=_encryption_context(row))[0]
    except encryption.DecryptionFailed:
        log.error("environment secret decryption failed", environment=row.environment_id, secret=str(row.pk))
        return None


def _encryption_context(row: EnvironmentSecret) -> str:
    return f"environment secret {row.pk} of {row.environment_id}"

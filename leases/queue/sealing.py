"""Encryption of the values of a queued run that must not be stored in clear text."""

import json
import uuid
from collections.abc import Mapping
from typing import Any

from leases.queue.models import QueuedRun
from sandboxes.db import encryption


def seal(pk: uuid.UUID, secrets: Mapping[str, Any]) -> bytes:
    """Encrypt the secrets of a queued run."""
    return encryption.encrypt(json.dumps(secrets).encode(), row=_encryption_context(pk))


def open_secrets(row: QueuedRun) -> dict[str, Any]:
    """Decrypt what `seal` encrypted. Raise encryption.DecryptionFailed."""
    content, _ = encryption.decrypt(bytes(row.sealed), row=_encryption_context(row.pk))
    secrets: dict[str, Any] = json.loads(content)
    return secrets


def reencrypt() -> encryption.ReencryptionResult[QueuedRun]:
    """Encrypt the secrets of every run that has not ended under the first encryption key. Idempotent."""
    result: encryption.ReencryptionResult[QueuedRun] = encryption.ReencryptionResult()
    for row in QueuedRun.objects.filter(ended_at__isnull=True).order_by("pk"):
        try:
            content, is_current = encryption.decrypt(bytes(row.sealed), row=_encryption_context(row.pk))
        except encryption.DecryptionFailed:
            result.undecryptable.append(row)
            continue
        if is_current:
            result.current += 1
            continue
        sealed = encryption.encrypt(content, row=_encryption_context(row.pk))
        result.changed += QueuedRun.objects.filter(pk=row.pk, ended_at__isnull=True).update(sealed=sealed)
    return result


def _encryption_context(pk: uuid.UUID) -> str:
    return f"queued run {pk}"

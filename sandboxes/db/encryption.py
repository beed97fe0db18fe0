"""Encryption of secrets at rest: AES-256-GCM under LEASEHOLD_IDENTITY_KEYS, bound to the row.

Fernet has no associated data and cannot bind a ciphertext to a row: an attacker with write access to the database, but without
a key, could copy the secret of one agent into the row of another.

`cryptography` is imported inside the functions: it takes 8 MiB of memory, and most processes never handle a secret."""

import os
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from django.conf import settings

NONCE_BYTES = 12  # random nonces are safe for 2**32 secrets under one key (NIST SP 800-38D, section 8.3)
HKDF_INFO = b"leasehold identity keys 1"


Row = TypeVar("Row")


@dataclass
class ReencryptionResult(Generic[Row]):
    """Result of a re-encryption."""

    changed: int = 0  # rows encrypted again, under the first key
    current: int = 0  # rows that were under the first key before
    undecryptable: list[Row] = field(default_factory=list)  # rows that no key decrypts


class DecryptionFailed(Exception):
    """No configured key decrypts the secret for this row."""


def encrypt(secret: bytes, *, row: str) -> bytes:
    """Encrypt a secret under the first key, with `row` (text that identifies the row) as associated data."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce = os.urandom(NONCE_BYTES)
    return nonce + AESGCM(_load_keys()[0]).encrypt(nonce, secret, row.encode())


def decrypt(sealed: bytes, *, row: str) -> tuple[bytes, bool]:
    """Decrypt a secret, and return whether the first key encrypted it. Raise DecryptionFailed if no key fits this row."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    for index, key in enumerate(_load_keys()):
        try:
            return AESGCM(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], row.encode()), index == 0
        except (InvalidTag, ValueError):  # ValueError: the ciphertext is shorter than a nonce
            continue
    raise DecryptionFailed


def _load_keys() -> list[bytes]:
    """Return the configured keys, then a key derived from SECRET_KEY: secrets stored before any key was configured need it."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    derived = HKDF(hashes.SHA256(), length=32, salt=None, info=HKDF_INFO).derive(settings.SECRET_KEY.encode())
    return [*settings.IDENTITY_KEYS, derived]

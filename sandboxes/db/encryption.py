"""Secrets at rest: AES-256-GCM under LEASEHOLD_IDENTITY_KEYS.

Not Fernet, which cannot bind a ciphertext to its row: whoever can write to the database, but has no key, could otherwise
move one agent's secret into the row of another."""

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.conf import settings

NONCE_BYTES = 12  # bytes; random, which is safe for 2**32 secrets under one key
HKDF_INFO = b"leasehold identity keys 1"


class DecryptionFailed(Exception):
    """It was sealed under none of our keys, or for another row."""


def seal(secret: bytes, *, row: str) -> bytes:
    """The secret as it is stored: under the first key, and to be opened for this row only."""
    nonce = os.urandom(NONCE_BYTES)
    return nonce + AESGCM(_load_keys()[0]).encrypt(nonce, secret, row.encode())


def unseal(sealed: bytes, *, row: str) -> tuple[bytes, bool]:
    """The secret, and whether it is sealed under the first key. Unopened if no key of ours opens it for this row."""
    for index, key in enumerate(_load_keys()):
        try:
            return AESGCM(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], row.encode()), index == 0
        except (InvalidTag, ValueError):  # ValueError: too short for a nonce
            continue
    raise DecryptionFailed


def _load_keys() -> list[bytes]:
    """Those that are configured, and last the one derived from SECRET_KEY: what was sealed before any was configured can
    still be opened, and sealed again under the first."""
    derived = HKDF(hashes.SHA256(), length=32, salt=None, info=HKDF_INFO).derive(settings.SECRET_KEY.encode())
    return [*settings.IDENTITY_KEYS, derived]

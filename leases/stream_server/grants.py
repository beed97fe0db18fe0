"""Signed grants in the URLs of terminals and previews. A grant is the only credential of such a URL.

A grant names a lease and expires. The stream server also checks at each use that the lease is active."""

import base64
import binascii
import struct
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hmac import compare_digest
from typing import Any
from uuid import UUID

from django.conf import settings
from django.core import signing
from django.utils.crypto import salted_hmac

TERMINAL_SALT = "leasehold.terminal-grant"
PREVIEW_SALT = "leasehold.preview-grant"
PREVIEW_FIELDS = struct.Struct(">16sHI")  # lease, port, end in seconds since 1970
PREVIEW_SIGNATURE_BYTES = 16


class InvalidGrant(Exception):
    """The grant has no valid signature, or has expired."""


@dataclass(frozen=True)
class TerminalGrant:
    """Access to the terminal of one process."""

    lease: UUID
    process: UUID
    expires_at: int  # seconds since 1970
    read_only: bool
    actor: str  # API key or operator to which the grant was issued

    def encode(self) -> str:
        fields = asdict(self) | {"lease": self.lease.hex, "process": self.process.hex}
        return signing.dumps(fields, salt=TERMINAL_SALT)

    @classmethod
    def decode(cls, text: str, *, now: datetime) -> "TerminalGrant":
        """Raise InvalidGrant."""
        try:
            fields: dict[str, Any] = signing.loads(text, salt=TERMINAL_SALT)
        except signing.BadSignature as error:
            raise InvalidGrant("The URL of the terminal is not valid.") from error
        grant = cls(**(fields | {"lease": UUID(hex=fields["lease"]), "process": UUID(hex=fields["process"])}))
        _require_current(grant.expires_at, now=now)
        return grant


@dataclass(frozen=True)
class PreviewGrant:
    """Access to one TCP port of the sandbox of a lease."""

    lease: UUID
    port: int
    expires_at: int  # seconds since 1970

    def encode(self) -> str:
        """Return 61 characters, which are valid as one label of a host name (RFC 1035: at most 63, case-insensitive)."""
        fields = PREVIEW_FIELDS.pack(self.lease.bytes, self.port, self.expires_at)
        signature = _sign_preview(fields, settings.SECRET_KEY)
        return base64.b32encode(fields + signature).decode().rstrip("=").lower()

    @classmethod
    def decode(cls, text: str, *, now: datetime) -> "PreviewGrant":
        """Raise InvalidGrant."""
        try:
            content = base64.b32decode(text.upper() + "=" * (-len(text) % 8))
        except (binascii.Error, ValueError) as error:
            raise InvalidGrant("The URL of the preview is not valid.") from error
        fields, signature = content[: PREVIEW_FIELDS.size], content[PREVIEW_FIELDS.size :]
        keys = [settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS]
        if not any(compare_digest(_sign_preview(fields, key), signature) for key in keys):
            raise InvalidGrant("The URL of the preview is not valid.")
        lease, port, expires_at = PREVIEW_FIELDS.unpack(fields)
        _require_current(expires_at, now=now)
        return cls(UUID(bytes=lease), port, expires_at)


def _sign_preview(fields: bytes, key: str | bytes) -> bytes:
    return salted_hmac(PREVIEW_SALT, fields, secret=key, algorithm="sha256").digest()[:PREVIEW_SIGNATURE_BYTES]


def _require_current(expires_at: int, *, now: datetime) -> None:
    if now >= datetime.fromtimestamp(expires_at, UTC):
        raise InvalidGrant("The URL has expired. Request a new one.")

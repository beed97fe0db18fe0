"""Signed grants in the URLs of terminals and previews. A grant is the only credential of such a URL.

A grant names a lease and its issuer, and expires. The stream server also checks at each use, and each second of an open
connection, that the lease is active and that the issuer still has the right that the grant passes on (grants.issuers)."""

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

from leases.grants.issuers import Issuer, IssuerKind

TERMINAL_SALT = "leasehold.terminal-grant.2"
PREVIEW_SALT = "leasehold.preview-grant.2"
PREVIEW_FIELDS = struct.Struct(">16sHII")  # lease, port, end in seconds since 1970, id of the API key
PREVIEW_SIGNATURE_BYTES = 13  # as many as fit: 104 bits
EXPIRED = "The URL has expired. Request a new one."


class InvalidGrant(Exception):
    """The grant has no valid signature, or has expired."""


@dataclass(frozen=True)
class TerminalGrant:
    """Access to the terminal of one process."""

    lease: UUID
    process: UUID
    expires_at: int  # seconds since 1970
    read_only: bool
    actor: str  # name of the issuer, for the log
    issuer: Issuer

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
        issuer = fields["issuer"] | {"kind": IssuerKind(fields["issuer"]["kind"])}
        ids = {"lease": UUID(hex=fields["lease"]), "process": UUID(hex=fields["process"])}
        grant = cls(**(fields | ids | {"issuer": Issuer(**issuer)}))
        _require_current(grant.expires_at, now=now)
        return grant


@dataclass(frozen=True)
class PreviewGrant:
    """Access to one TCP port of the sandbox of a lease.

    The grant is not bound to a secret of its API key: a link that others have outlives the rotation of the key."""

    lease: UUID
    port: int
    expires_at: int  # seconds since 1970
    key_id: int

    @property
    def issuer(self) -> Issuer:
        return Issuer(IssuerKind.KEY, self.key_id)

    def encode(self) -> str:
        """Return 63 characters, which are valid as one label of a host name (RFC 1035: at most 63, case-insensitive)."""
        fields = PREVIEW_FIELDS.pack(self.lease.bytes, self.port, self.expires_at, self.key_id)
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
        lease, port, expires_at, key_id = PREVIEW_FIELDS.unpack(fields)
        _require_current(expires_at, now=now)
        return cls(UUID(bytes=lease), port, expires_at, key_id)


def _sign_preview(fields: bytes, key: str | bytes) -> bytes:
    return salted_hmac(PREVIEW_SALT, fields, secret=key, algorithm="sha256").digest()[:PREVIEW_SIGNATURE_BYTES]


def has_expired(grant: TerminalGrant | PreviewGrant, *, now: datetime) -> bool:
    return _is_past(grant.expires_at, now)


def _require_current(expires_at: int, *, now: datetime) -> None:
    if _is_past(expires_at, now):
        raise InvalidGrant(EXPIRED)


def _is_past(expires_at: int, now: datetime) -> bool:
    return now >= datetime.fromtimestamp(expires_at, UTC)

"""Signatures of Standard Webhooks 1.0.0: secrets, signing and verification."""

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

SECRET_PREFIX = "whsec_"  # noqa: S105 - Standard Webhooks 1.0.0, "Signature scheme": https://www.standardwebhooks.com
SECRET_BYTES = 32  # Standard Webhooks requires 24 to 64
ROTATION_OVERLAP = timedelta(hours=24)  # both secrets are valid during the overlap
TOLERANCE = timedelta(minutes=5)  # between webhook-timestamp and the time of the request, in both directions
MAX_SIGNATURES = 16  # compared with each secret
MESSAGE_ID_RE = re.compile(r"[\x21-\x7e]{1,255}")


class InvalidHeader(Exception):
    """A header of a signed message is missing, malformed or does not match. `header` names it."""

    def __init__(self, header: str, detail: str) -> None:
        super().__init__(detail)
        self.header = header


def generate_secret() -> tuple[bytes, str]:
    """Return a random secret, as bytes and as the text that the other side configures."""
    secret = secrets.token_bytes(SECRET_BYTES)
    return secret, SECRET_PREFIX + base64.b64encode(secret).decode()


def sign(secret: bytes, message_id: str, timestamp: str, body: bytes) -> str:
    """Return one signature for the header webhook-signature."""
    signed = b".".join((message_id.encode(), timestamp.encode(), body))
    return f"v1,{base64.b64encode(hmac.digest(secret, signed, hashlib.sha256)).decode()}"


def check_headers(message_id: str, timestamp: str, signature: str, *, now: datetime) -> None:
    """Raise InvalidHeader unless the headers are well-formed and the timestamp is within TOLERANCE of `now`."""
    if not MESSAGE_ID_RE.fullmatch(message_id):
        raise InvalidHeader("webhook-id", "The header webhook-id has 1 to 255 visible ASCII characters.")
    if not re.fullmatch(r"[0-9]{1,11}", timestamp):
        raise InvalidHeader("webhook-timestamp", "The header webhook-timestamp is the time in seconds since 1970.")
    if abs(now - datetime.fromtimestamp(int(timestamp), UTC)) > TOLERANCE:
        minutes = TOLERANCE.total_seconds() / 60
        raise InvalidHeader("webhook-timestamp", f"The time in webhook-timestamp differs by more than {minutes:g} minutes.")
    if not _split_signatures(signature):
        raise InvalidHeader("webhook-signature", "The header webhook-signature has no signature of version v1.")


def verify(known: Sequence[bytes], message_id: str, timestamp: str, signature: str, body: bytes) -> None:
    """Raise InvalidHeader unless one of the secrets made one of the signatures. Every pair is compared, in constant time."""
    expected = [sign(secret, message_id, timestamp, body).encode() for secret in known]
    received = [each.encode() for each in _split_signatures(signature)]
    matches = [hmac.compare_digest(own, other) for own in expected for other in received]
    if not any(matches):
        raise InvalidHeader("webhook-signature", "No signature in webhook-signature matches the body and a valid secret.")


def _split_signatures(header: str) -> list[str]:
    return [each for each in header.split(" ") if each.startswith("v1,")][:MAX_SIGNATURES]

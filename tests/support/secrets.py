"""Encodings under which a leaked secret can appear."""

import base64
import json
from urllib.parse import quote, quote_plus

from sandboxes.identity import curves
from sandboxes.identity.curves import CURVES, PrivateKey


def list_encodings(secret: bytes) -> set[str]:
    """Return the plain secret and its encodings in base64, hexadecimal, URLs, JSON and Python literals."""
    encoded = {base64.b64encode(secret), base64.urlsafe_b64encode(secret)}
    # Base64 of a longer text that contains the secret depends on its offset modulo 3: cover offsets 1 and 2, too.
    encoded |= {base64.b64encode(b"\0" * pad + secret)[4:-4] for pad in (1, 2)}
    encoded |= {base64.urlsafe_b64encode(b"\0" * pad + secret)[4:-4] for pad in (1, 2)}
    texts = {secret.hex(), secret.hex().upper(), repr(secret)[2:-1], *(text.decode().rstrip("=") for text in encoded)}
    try:
        text = secret.decode()
    except UnicodeDecodeError:
        return texts
    return texts | {text, text[::-1], quote(text, safe=""), quote_plus(text), json.dumps(text)[1:-1], repr(text)[1:-1]}


def list_key_encodings(private: PrivateKey) -> set[str]:
    raw = private.secret
    multibase = curves.encode_base58(CURVES[private.algorithm].private + raw)
    return list_encodings(raw) | {str(int.from_bytes(raw)), multibase, curves.encode_base58(raw)}

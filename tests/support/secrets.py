"""Every text that a secret may be found as."""

import base64
import json
from urllib.parse import quote, quote_plus

from sandboxes.identity import curves
from sandboxes.identity.curves import CURVES, PrivateKey


def list_encodings(secret: bytes) -> set[str]:
    """A secret as it is, and as something that contains it may encode it."""
    encoded = {base64.b64encode(secret), base64.urlsafe_b64encode(secret)}
    # Whatever stands before it, two of these are in the base64 of something that contains it.
    encoded |= {base64.b64encode(b"\0" * pad + secret)[4:-4] for pad in (1, 2)}
    encoded |= {base64.urlsafe_b64encode(b"\0" * pad + secret)[4:-4] for pad in (1, 2)}
    found = {secret.hex(), secret.hex().upper(), repr(secret)[2:-1], *(text.decode().rstrip("=") for text in encoded)}
    try:
        text = secret.decode()
    except UnicodeDecodeError:
        return found
    return found | {text, text[::-1], quote(text, safe=""), quote_plus(text), json.dumps(text)[1:-1], repr(text)[1:-1]}


def list_key_encodings(private: PrivateKey) -> set[str]:
    raw = private.secret
    multibase = curves.encode_base58(CURVES[private.algorithm].private + raw)
    return list_encodings(raw) | {str(int.from_bytes(raw)), multibase, curves.encode_base58(raw)}

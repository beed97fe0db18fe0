"""Independent verification of service tokens, written from the specifications without the code that issues them."""

import base64
import json
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

BASE58_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
CURVE_BY_MULTICODEC: dict[bytes, tuple[str, ec.EllipticCurve, int]] = {
    bytes([0xE7, 0x01]): ("ES256K", ec.SECP256K1(), 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141),
    bytes([0x80, 0x24]): ("ES256", ec.SECP256R1(), 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551),
}


class TokenRejected(Exception):
    """The token is invalid."""


def decode_base64url(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def decode_multibase(text: str) -> bytes:
    """Decode base58btc. Leading zeros are not supported: no key has them."""
    assert text[0] == "z"
    number = sum(BASE58_ALPHABET.index(digit) * 58**place for place, digit in enumerate(reversed(text[1:])))
    return number.to_bytes((number.bit_length() + 7) // 8, "big")


def verify_signature(did_key: str, message: bytes, signature: bytes) -> str:
    """Return the algorithm of a valid low-s signature. Raise TokenRejected."""
    raw = decode_multibase(did_key.removeprefix("did:key:"))
    algorithm, curve, order = CURVE_BY_MULTICODEC[raw[:2]]
    if len(raw) != 35 or len(signature) != 64:
        raise TokenRejected("length")
    r, s = int.from_bytes(signature[:32], "big"), int.from_bytes(signature[32:], "big")
    if s > order // 2:
        raise TokenRejected("high s")
    try:
        key = ec.EllipticCurvePublicKey.from_encoded_point(curve, raw[2:])
        key.verify(encode_dss_signature(r, s), message, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise TokenRejected("signature") from None
    return algorithm


def verify_token(token: str, did_key: str) -> dict[str, Any]:
    """Return the claims of a token signed by this key. The claims are not checked."""
    header, body, signature = token.split(".")
    assert "=" not in token
    algorithm = verify_signature(did_key, f"{header}.{body}".encode(), decode_base64url(signature))
    if json.loads(decode_base64url(header)) != {"typ": "JWT", "alg": algorithm}:
        raise TokenRejected("header")
    claims: dict[str, Any] = json.loads(decode_base64url(body))
    return claims

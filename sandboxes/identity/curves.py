"""Keys on the two elliptic curves of AT Protocol: text forms, signatures and JWTs.

`cryptography` is imported inside the functions: it takes 8 MiB of memory, and most processes never handle a key."""

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

BASE58_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
KEY_BYTES = 32  # of a private key, and of each half of a signature
MAX_KEY_TEXT_CHARS = 64  # of a private key in text form


@dataclass(frozen=True)
class Curve:
    """Elliptic curve, with the multicodec prefixes of its public and private keys."""

    class_name: str  # in cryptography.hazmat.primitives.asymmetric.ec
    public: bytes
    private: bytes

    @property
    def kind(self) -> "ec.EllipticCurve":
        from cryptography.hazmat.primitives.asymmetric import ec

        kind: ec.EllipticCurve = getattr(ec, self.class_name)()
        return kind

    @property
    def order(self) -> int:
        return self.kind.group_order


CURVES = {
    "ES256K": Curve("SECP256K1", public=b"\xe7\x01", private=b"\x81\x26"),
    "ES256": Curve("SECP256R1", public=b"\x80\x24", private=b"\x86\x26"),
}


@dataclass(frozen=True)
class PrivateKey:
    """Private key. Its `repr` omits the secret, which therefore does not appear in tracebacks and logs.

    Construction raises ValueError if the secret is not a private key of the curve."""

    algorithm: str
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != KEY_BYTES or not 0 < int.from_bytes(self.secret) < self.curve.order:
            raise ValueError("Not a private key of this curve.")

    @property
    def curve(self) -> Curve:
        return CURVES[self.algorithm]

    @property
    def public(self) -> str:
        """Public key in multibase: the part of a did:key identifier after `did:key:`."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        point = self._key().public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
        return "z" + encode_base58(self.curve.public + point)

    def sign(self, message: bytes) -> bytes:
        """Sign a message with ECDSA and SHA-256. Return r and s, 32 bytes each, with the lower s that AT Protocol requires."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

        r, s = decode_dss_signature(self._key().sign(message, ec.ECDSA(hashes.SHA256())))
        return r.to_bytes(KEY_BYTES) + min(s, self.curve.order - s).to_bytes(KEY_BYTES)

    def _key(self) -> "ec.EllipticCurvePrivateKey":
        from cryptography.hazmat.primitives.asymmetric import ec

        return ec.derive_private_key(int.from_bytes(self.secret), self.curve.kind)


def generate_key(algorithm: str = "ES256K") -> PrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    number = ec.generate_private_key(CURVES[algorithm].kind).private_numbers().private_value
    return PrivateKey(algorithm, number.to_bytes(KEY_BYTES))


def parse_private_key(text: str, algorithm: str = "") -> PrivateKey:
    """Parse a private key from 64 hexadecimal digits or from multibase.

    Hexadecimal digits are a key of `algorithm`, by default ES256K. Multibase names its curve, which must be the one of
    `algorithm` if an algorithm is given. Raise ValueError; the message does not contain the text."""
    if re.fullmatch(r"[0-9a-fA-F]{64}", text):
        return PrivateKey(algorithm or "ES256K", bytes.fromhex(text))
    if not re.fullmatch(f"z[{BASE58_ALPHABET}]{{1,{MAX_KEY_TEXT_CHARS}}}", text):
        raise ValueError("Enter a private key as 64 hexadecimal digits or as multibase (z and base58).")
    raw = decode_base58(text[1:])
    detected = next((name for name, curve in CURVES.items() if raw.startswith(curve.private)), "")
    if not detected:
        raise ValueError("This multibase text is not a private key on secp256k1 or P-256.")
    if algorithm not in ("", detected):
        raise ValueError(f"This is a key for {detected}.")
    return PrivateKey(detected, raw[len(CURVES[detected].private) :])


def sign_jwt(private: PrivateKey, claims: Mapping[str, Any]) -> str:
    """Return a signed JSON Web Token."""
    signed = f"{_encode_jwt_part({'typ': 'JWT', 'alg': private.algorithm})}.{_encode_jwt_part(claims)}"
    return f"{signed}.{_encode_base64url(private.sign(signed.encode()))}"


def encode_base58(data: bytes) -> str:
    number, digits = int.from_bytes(data), ""
    while number:
        number, digit = divmod(number, 58)
        digits = BASE58_ALPHABET[digit] + digits
    return BASE58_ALPHABET[0] * (len(data) - len(data.lstrip(b"\0"))) + digits


def decode_base58(text: str) -> bytes:
    number = 0
    for digit in text:
        number = number * 58 + BASE58_ALPHABET.index(digit)
    zeros = len(text) - len(text.lstrip(BASE58_ALPHABET[0]))
    return bytes(zeros) + number.to_bytes((number.bit_length() + 7) // 8)


def _encode_jwt_part(claims: Mapping[str, Any]) -> str:
    return _encode_base64url(json.dumps(claims, separators=(",", ":")).encode())


def _encode_base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

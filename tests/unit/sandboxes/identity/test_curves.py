"""Keys, text forms and signatures, checked with published vectors and an independent verifier."""

import base64

import pytest

from sandboxes.identity import curves
from sandboxes.identity.curves import CURVES, PrivateKey
from tests.support import tokens

# AT Protocol's interoperability files w3c_didkey_K256.json, w3c_didkey_P256.json and signature-fixtures.json.
KNOWN = {
    "9085d2bef69286a6cbb51623c8fa258629945cd55ca705cc4e66700396894e0c": "zQ3shokFTS3brHcDQrn82RUDfCZESWL1ZdCEJwekUDPQiYBme",
    "f0f4df55a2b3ff13051ea814a8f24ad00f2e469af73c363ac7e9fb999a9072ed": "zQ3shtxV1FrJfhqE1dvxYRcCknWNjHc3c5X1y3ZSoPDi2aur2",
    "6b0b91287ae3348f8c2f2552d766f30e3604867e34adc37ccbb74a8e6b893e02": "zQ3shZc2QzApp2oymGvQbzP8eKheVshBHbU4ZYjeXqwSKEn6N",
    "c0a6a7c560d37d7ba81ecee9543721ff48fea3e0fb827d42c1868226540fac15": "zQ3shadCps5JLAHcZiuX5YUtWHHL8ysBJqFLWvjZDKAWUBGzy",
    "175a232d440be1e0788f25488a73d9416c04b6f924bea6354bf05dd2f1a75133": "zQ3shptjE6JwdkeKN4fcpnYQY3m9Cet3NiHdAfpvSUZBFoKBj",
    tokens.decode_multibase("z9p4VRzdmhsnq869vQjVCTrRry7u4TtfRxhvBFJTGU2Cp").hex(): (
        "zDnaeTiq1PdzvZXUaMdezchcMJQpBdH2VN4pgrrEhMCCbmwSb"
    ),
}
MESSAGE = "oWVoZWxsb2V3b3JsZA"
P256, K256 = "zDnaembgSGUhZULN2Caob4HLJPaxBh92N7rtH21TErzqf8HQo", "zQ3shqwJEJyMBsBXCWyCBpUBMqxcon9oHB7mCvx4sSpMdLJwc"
SIGNED = [
    (P256, "2vZNsG3UKvvO/CDlrdvyZRISOFylinBh0Jupc6KcWoJWExHptCfduPleDbG3rko3YZnn9Lw0IjpixVmexJDegg", "ES256"),
    (K256, "5WpdIuEUUfVUYaozsi8G0B3cWO09cgZbIIwg1t2YKdUn/FEznOndsz/qgiYb89zwxYCbB71f7yQK5Lr7NasfoA", "ES256K"),
    (P256, "2vZNsG3UKvvO/CDlrdvyZRISOFylinBh0Jupc6KcWoKp7O4VS9giSAah8k5IUbXIW00SuOrjfEqQ9HEkN9JGzw", None),
    (K256, "5WpdIuEUUfVUYaozsi8G0B3cWO09cgZbIIwg1t2YKdXYA67MYxYiTMAVfdnkDCMN9S5B3vHosRe07aORmoshoQ", None),
]


@pytest.mark.parametrize(("key", "signature", "algorithm"), SIGNED)
def test_the_verifier_of_the_tests_agrees_with_the_published_fixtures(key: str, signature: str, algorithm: str | None) -> None:
    raw, message = base64.b64decode(signature + "=="), tokens.decode_base64url(MESSAGE)
    if algorithm:
        assert tokens.verify_signature(key, message, raw) == algorithm
    with pytest.raises(tokens.TokenRejected, match="signature" if algorithm else "high s"):
        tokens.verify_signature(key, b"something else" if algorithm else message, raw)


@pytest.mark.parametrize(("private", "public"), KNOWN.items())
def test_a_private_key_has_the_published_public_key(private: str, public: str) -> None:
    assert curves.parse_private_key(private, "ES256" if public.startswith("zDn") else "ES256K").public == public


@pytest.mark.parametrize("algorithm", CURVES)
def test_every_signature_has_the_lower_s_and_verifies(algorithm: str) -> None:
    """A library returns the higher s for half of its signatures, so 80 signatures contain both kinds."""
    for number in range(20):
        private = curves.generate_key(algorithm)
        for message in (b"", bytes([number]), b"x" * 1000, private.public.encode()):
            assert tokens.verify_signature(private.public, message, private.sign(message)) == algorithm


@pytest.mark.parametrize(("algorithm", "prefix"), [("ES256K", "8126"), ("ES256", "8626")])
def test_a_multibase_private_key_determines_its_curve(algorithm: str, prefix: str) -> None:
    private = curves.generate_key(algorithm)
    text = "z" + curves.encode_base58(bytes.fromhex(prefix) + private.secret)
    assert tokens.decode_multibase(text) == bytes.fromhex(prefix) + private.secret
    assert curves.parse_private_key(text) == curves.parse_private_key(text, algorithm) == private
    with pytest.raises(ValueError, match=f"for {algorithm}"):
        curves.parse_private_key(text, next(name for name in CURVES if name != algorithm))


def test_base58_keeps_leading_zeros() -> None:
    for raw in (b"", b"\0", b"\0\0\1", bytes(range(40)), b"\xff" * 34):
        assert curves.decode_base58(curves.encode_base58(raw)) == raw
    assert curves.encode_base58(b"\0\0hello") == "11" + curves.encode_base58(b"hello")


ORDER = "fffffffffffffffffffffffffffffffebaaedce6af48a03bbfd25e8cd0364141"


@pytest.mark.parametrize(
    "text", ["", "z", "z0OIl", "0" * 64, ORDER, "f" * 64, "ab" * 31, "z" + "2" * 47, "z" + "1" * 64, K256, "zDna", "é" * 64]
)
def test_an_invalid_private_key_is_refused_without_quoting_it(text: str) -> None:
    with pytest.raises(ValueError) as refused:
        curves.parse_private_key(text)
    assert len(text) < 5 or text not in str(refused.value)


def test_a_private_key_is_not_in_its_repr() -> None:
    private = curves.generate_key()
    output = f"{private!r} {private} {[private]} {vars(private).keys()}"
    assert private.secret.hex() not in output and repr(private.secret) not in output
    with pytest.raises(ValueError) as refused:
        PrivateKey("ES256K", private.secret + b"x")
    assert private.secret.hex() not in str(refused.value)

"""manage.py identity: private keys are imported and never printed."""

import base64
import io
import json
import sys

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError

from leases.models import Agent
from sandboxes.identity import curves, signing
from sandboxes.models import SigningKey
from tests.commands.manage import call, load_settings
from tests.conftest import NOW
from tests.support import tokens
from tests.support.secrets import list_key_encodings

pytestmark = pytest.mark.django_db
ADA, BOB = "did:plc:ada", "did:plc:bob"


def run(monkeypatch: pytest.MonkeyPatch, *args: str, stdin: str = "") -> str:
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    return call("identity", *args)


def get_did_key(did: str) -> str:
    """The did:key of the agent's active signing key."""
    key = signing.get_active_key(did)
    tokens.verify_token(signing.create_service_token(did, aud="did:web:relay.example", lxm="a.b.c", now=NOW), key.did_key)
    return key.did_key


def test_a_key_is_created_shown_rotated_and_revoked(monkeypatch) -> None:
    assert "signs with did:key:zQ3s" in run(monkeypatch, "create", ADA)
    assert Agent.objects.filter(did=ADA).exists()
    did_key, _, document = run(monkeypatch, "show", ADA).partition("\n")
    assert did_key == get_did_key(ADA)
    assert json.loads(document) == {
        "id": "did:plc:ada#atproto", "type": "Multikey", "controller": ADA,
        "publicKeyMultibase": did_key.removeprefix("did:key:"),
    }  # fmt: skip
    assert "did:key:zDna" in run(monkeypatch, "rotate", ADA, "--algorithm", "ES256")
    assert get_did_key(ADA).startswith("did:key:zDna")
    assert f"{get_did_key(ADA)} is revoked" in run(monkeypatch, "revoke", ADA)
    assert [line.split()[4] for line in run(monkeypatch, "list").splitlines()] == ["revoked", "retired"]
    assert set(SigningKey.objects.values_list("created_by", "ended_by")) == {("command line", "command line")}


@pytest.mark.parametrize("algorithm", curves.CURVES)
def test_a_private_key_is_imported_from_stdin_as_hex_or_multibase(monkeypatch, algorithm: str) -> None:
    first, second = curves.generate_key(algorithm), curves.generate_key(algorithm)
    multibase = "z" + curves.encode_base58(curves.CURVES[algorithm].private + second.secret)
    run(monkeypatch, "import", ADA, "--algorithm", algorithm, stdin=first.secret.hex() + "\n")
    assert get_did_key(ADA) == f"did:key:{first.public}"
    message = run(monkeypatch, "rotate", ADA, "--import", stdin=multibase)
    assert get_did_key(ADA) == f"did:key:{second.public}"
    message += run(monkeypatch, "list") + run(monkeypatch, "show", ADA) + run(monkeypatch, "reencrypt")
    assert not any(form in message for form in list_key_encodings(first) | list_key_encodings(second))


def test_an_invalid_private_key_is_refused_and_not_printed(monkeypatch) -> None:
    invalid_key = curves.generate_key().secret.hex()[:-1] + "g"
    with pytest.raises(CommandError, match="64 hexadecimal digits") as refused:
        run(monkeypatch, "import", ADA, stdin=invalid_key)
    assert invalid_key not in str(refused.value)
    assert not SigningKey.objects.exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["create", "ada"], "is not a DID"), (["create", ADA], "Rotate it"), (["rotate", BOB], "no signing key"),
        (["revoke", BOB], "no signing key"), (["show", BOB], "no signing key"),
    ],
)  # fmt: skip
def test_an_error_is_one_sentence(monkeypatch, args: list[str], message: str) -> None:
    signing.create_key(ADA, now=NOW)
    with pytest.raises(CommandError, match=message):
        run(monkeypatch, *args)


def test_reencrypt_names_the_agent_whose_key_it_cannot_decrypt(monkeypatch, settings) -> None:
    signing.create_key(ADA, now=NOW)
    settings.IDENTITY_KEYS = [b"1" * 32]
    signing.create_key(BOB, now=NOW)
    settings.IDENTITY_KEYS = [b"2" * 32]
    with pytest.raises(CommandError, match=f"of {BOB}"):
        run(monkeypatch, "reencrypt")
    settings.IDENTITY_KEYS = [b"2" * 32, b"1" * 32]
    assert run(monkeypatch, "reencrypt") == "1 private key re-encrypted, 1 already current\n"


@pytest.mark.parametrize("value", ["secret", "A" * 43, "A" * 44, "=" * 44, f"{'A' * 43}=,", f"{'A' * 43}=,x"])
def test_malformed_encryption_keys_are_refused_and_not_printed(monkeypatch, tmp_path, value: str) -> None:
    with pytest.raises(ImproperlyConfigured) as refused:
        load_settings(monkeypatch, tmp_path, LEASEHOLD_IDENTITY_KEYS=value)
    message = str(refused.value)
    assert message.startswith("LEASEHOLD_IDENTITY_KEYS=(hidden) is not accepted. It takes keys of 32 bytes in base64")
    assert value not in message


def test_encryption_keys_in_either_base64_alphabet_are_accepted_and_not_printed(monkeypatch, tmp_path) -> None:
    keys = [b"\xfb" * 32, b"\xff" * 32]
    encoded = [base64.b64encode(keys[0]).decode(), base64.urlsafe_b64encode(keys[1]).decode()]
    assert "+" in encoded[0] and "_" in encoded[1]
    read_keys = load_settings(monkeypatch, tmp_path, LEASEHOLD_IDENTITY_KEYS=", ".join(encoded)).IDENTITY_KEYS
    assert read_keys == keys
    output = call("config")
    assert not any(key in output for key in encoded)
    line = next(line for line in output.splitlines() if line.startswith("LEASEHOLD_IDENTITY_KEYS"))
    assert line.split()[1:3] == ["********", "environment"]

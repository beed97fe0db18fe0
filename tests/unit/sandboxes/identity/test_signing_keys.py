"""Signing keys and service tokens: life of a key, minting, encryption at rest, and no leak of private keys."""

import io
import json
import logging
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from django.core.management import call_command
from django.db import IntegrityError, transaction

from leases import execution, leasing
from leases.errors import LeaseEnded
from leases.models import Lease
from leases.retention.sweep import delete_expired
from sandboxes.errors import SigningKeyDecryptionFailed, SigningKeyExists, SigningKeyNotFound, SigningKeyRevoked
from sandboxes.identity import curves, signing
from sandboxes.models import MintedToken, SigningKey
from tests.conftest import MINUTE, NOW
from tests.support import tokens
from tests.support.actors import console_user
from tests.support.secrets import list_key_encodings

pytestmark = pytest.mark.django_db
ADA, BOB = "did:plc:ada", "did:plc:bob"
RELAY, SUBSCRIBE = "did:web:relay.example#relay", "com.atproto.sync.subscribeRepos"


def token(agent: str = ADA, **more: Any) -> str:
    return signing.create_service_token(agent, **{"aud": RELAY, "lxm": SUBSCRIBE, "now": NOW} | more)


def mint(lease: Lease, **more: Any) -> tuple[str, MintedToken]:
    return execution.mint_service_token(lease.pk, **{"aud": RELAY, "lxm": SUBSCRIBE, "now": NOW} | more)


@pytest.fixture
def key(db: None) -> SigningKey:
    return signing.create_key(ADA, now=NOW)


# --- tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", curves.CURVES)
def test_a_token_verifies_with_the_public_key_and_names_issuer_and_audience(algorithm: str) -> None:
    key = signing.create_key(ADA, now=NOW, private=curves.generate_key(algorithm))
    claims = tokens.verify_token(token(), key.did_key)
    jti = MintedToken.objects.get().jti.hex
    issued = int(NOW.timestamp())
    assert claims == {"iss": ADA, "aud": RELAY, "lxm": SUBSCRIBE, "iat": issued, "exp": issued + 60, "jti": jti}
    with pytest.raises(tokens.TokenRejected):
        tokens.verify_token(token(), curves.generate_key(algorithm).public)


def test_each_token_is_a_row_without_the_token(key, grant) -> None:
    lease = grant()
    minted, row = mint(lease, lifetime=2 * MINUTE, actor="key 1a2b")
    assert (row.holder, row.agent_did, row.key, row.aud, row.lxm) == (lease.pk, ADA, key, RELAY, SUBSCRIBE)
    assert (row.at, row.expires_at, row.actor) == (NOW, NOW + 2 * MINUTE, "key 1a2b")
    assert UUID(tokens.verify_token(minted, key.did_key)["jti"]) == MintedToken.objects.get().pk
    stored = json.dumps(list(MintedToken.objects.values()), default=str)
    assert not any(part in stored for part in minted.split("."))


def test_old_token_rows_are_deleted(key) -> None:
    for days in (0, 1, 91):
        token(now=NOW + timedelta(days=days))
    assert delete_expired(now=NOW + timedelta(days=91, hours=1)).counts == {"service tokens deleted": 2}
    assert [row.at for row in MintedToken.objects.all()] == [NOW + timedelta(days=91)]


def test_tokens_of_the_same_moment_differ(key) -> None:
    assert len({token() for _ in range(5)}) == len(set(MintedToken.objects.values_list("jti", flat=True))) == 5


@pytest.mark.parametrize("seconds", [0, 0.5, 301, -60])
def test_a_lifetime_is_one_second_to_five_minutes(key, seconds: float) -> None:
    with pytest.raises(ValueError, match="lifetime of a service token"):
        token(lifetime=timedelta(seconds=seconds))
    assert not MintedToken.objects.exists()


def test_a_token_never_outlives_the_requested_lifetime(key) -> None:
    late = NOW + timedelta(milliseconds=999)
    claims = tokens.verify_token(token(now=late, lifetime=timedelta(seconds=1)), key.did_key)
    assert (claims["iat"], claims["exp"]) == (int(NOW.timestamp()), int(NOW.timestamp()) + 1)
    assert MintedToken.objects.get().expires_at == NOW + timedelta(seconds=1)


def test_a_lease_that_has_ended_cannot_mint(key, grant) -> None:
    released, elapsed = grant(), grant(environment="game-2", ttl=MINUTE)
    leasing.release(released.pk, now=NOW)
    for lease in (released, elapsed):
        with pytest.raises(LeaseEnded):
            mint(lease, now=NOW + 2 * MINUTE)
    assert not MintedToken.objects.exists()


def test_a_lease_that_ends_between_check_and_minting_gets_no_token(key, grant, at_checkpoint) -> None:
    lease = grant()
    at_checkpoint("may mint", lambda: leasing.end(lease.pk, reason="operator", now=NOW))
    with pytest.raises(LeaseEnded):
        mint(lease)
    assert not MintedToken.objects.exists()


def test_minting_does_not_renew_the_lease(key, grant) -> None:
    lease = grant()
    mint(lease, now=NOW + MINUTE)
    assert leasing.require_active(lease.pk, now=NOW + MINUTE).expires_at == lease.expires_at


# --- keys ---------------------------------------------------------------------------------------------------------


def test_an_agent_without_a_key_gets_no_token() -> None:
    signing.create_key(BOB, now=NOW)
    with pytest.raises(SigningKeyNotFound):
        token(ADA)


def test_after_a_rotation_the_new_key_signs_and_the_old_private_key_is_deleted() -> None:
    old = signing.create_key(ADA, now=NOW, private=curves.generate_key("ES256"))
    new = signing.rotate_key(ADA, now=NOW + MINUTE, actor=console_user("root"))
    old.refresh_from_db()
    assert (old.retired_at, old.revoked_at, old.ended_by, old.sealed) == (NOW + MINUTE, None, "root", None)
    assert (new.algorithm, new.is_active) == ("ES256", True)
    tokens.verify_token(token(), new.did_key)
    with pytest.raises(tokens.TokenRejected):
        tokens.verify_token(token(), old.did_key)


def test_a_rotation_during_minting_takes_effect(key, grant, at_checkpoint) -> None:
    at_checkpoint("may mint", lambda: signing.rotate_key(ADA, now=NOW))
    minted, row = mint(grant())
    assert row.key != key
    tokens.verify_token(minted, row.key.did_key)


def test_no_token_is_minted_between_revocation_and_a_new_key(key) -> None:
    key = signing.revoke_active_key(ADA, now=NOW + MINUTE, actor=console_user("root"))
    assert (key.revoked_at, key.retired_at, key.ended_by, key.sealed) == (NOW + MINUTE, None, "root", None)
    for act in (token, lambda: signing.revoke_active_key(ADA, now=NOW), lambda: signing.rotate_key(ADA, now=NOW)):
        with pytest.raises(SigningKeyRevoked):
            act()
    another = signing.create_key(ADA, now=NOW + 2 * MINUTE)
    tokens.verify_token(token(), another.did_key)


def test_a_second_rotation_of_the_same_key_changes_nothing(key) -> None:
    assert signing.replace_key(key, now=NOW)
    assert signing.replace_key(key, now=NOW) is None
    assert not signing.revoke_key(key, now=NOW)
    assert SigningKey.objects.count() == 2


def test_an_agent_has_one_active_key_and_a_key_belongs_to_one_agent() -> None:
    private = curves.generate_key()
    signing.create_key(ADA, now=NOW, private=private)
    with pytest.raises(SigningKeyExists, match="Rotate"):
        signing.create_key(ADA, now=NOW)
    with pytest.raises(SigningKeyExists, match="was used before"):
        signing.create_key(BOB, now=NOW, private=private)
    signs = signing.rotate_key(ADA, now=NOW)
    with pytest.raises(SigningKeyExists, match="was used before"):
        signing.rotate_key(ADA, now=NOW, private=private)
    assert signing.get_active_key(ADA) == signs  # the failed attempt did not retire the key


def test_constraints_reject_a_second_active_key_and_a_stored_private_key_after_its_end(key) -> None:
    for change in ({"sealed": None}, {"retired_at": NOW}, {"retired_at": NOW, "revoked_at": NOW, "sealed": None}):
        with pytest.raises(IntegrityError), transaction.atomic():
            SigningKey.objects.filter(pk=key.pk).update(**change)


# --- at rest ------------------------------------------------------------------------------------------------------


def test_a_key_under_an_unknown_encryption_key_is_a_clear_error(settings, caplog) -> None:
    settings.IDENTITY_KEYS, settings.SECRET_KEY = [b"1" * 32], "first"
    signing.create_key(ADA, now=NOW)
    settings.IDENTITY_KEYS, settings.SECRET_KEY = [b"2" * 32], "second"
    with pytest.raises(SigningKeyDecryptionFailed, match="LEASEHOLD_IDENTITY_KEYS") as refused:
        token()
    assert refused.value.__cause__ is None
    assert ADA in caplog.text and "Traceback" not in caplog.text
    assert not MintedToken.objects.exists()


def test_a_private_key_copied_into_another_row_is_not_decrypted(key) -> None:
    bob = signing.create_key(BOB, now=NOW)
    SigningKey.objects.filter(pk=bob.pk).update(sealed=key.sealed)
    with pytest.raises(SigningKeyDecryptionFailed):
        token(BOB)
    SigningKey.objects.filter(pk=key.pk).delete()
    SigningKey.objects.filter(pk=bob.pk).update(public_key=key.public_key)
    with pytest.raises(SigningKeyDecryptionFailed):
        token(BOB)


def test_a_damaged_private_key_is_not_decrypted(key) -> None:
    whole = bytes(key.sealed)
    for damaged in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), whole[:12], b"", b"\0" + whole):
        SigningKey.objects.filter(pk=key.pk).update(sealed=damaged)
        with pytest.raises(SigningKeyDecryptionFailed):
            token()


def test_encryption_keys_can_be_replaced_without_losing_a_signing_key(settings) -> None:
    settings.IDENTITY_KEYS = []
    derived = signing.create_key(ADA, now=NOW)
    settings.IDENTITY_KEYS = [b"1" * 32]
    first = signing.create_key(BOB, now=NOW)
    gone = signing.create_key("did:plc:gone", now=NOW)
    signing.revoke_key(gone, now=NOW)
    settings.IDENTITY_KEYS = [b"2" * 32, b"1" * 32]
    assert vars(signing.reencrypt_keys()) == {"changed": 2, "current": 0, "undecryptable": []}
    assert vars(signing.reencrypt_keys()) == {"changed": 0, "current": 2, "undecryptable": []}
    settings.IDENTITY_KEYS, settings.SECRET_KEY = [b"2" * 32], "another one"
    for key in (derived, first):
        tokens.verify_token(token(key.agent_did), key.did_key)
    settings.IDENTITY_KEYS = [b"3" * 32]
    assert [key.agent_did for key in signing.reencrypt_keys().undecryptable] == [BOB, ADA]


def test_the_same_private_key_is_encrypted_differently_each_time(key, settings) -> None:
    settings.IDENTITY_KEYS = [b"1" * 32]
    seen = {bytes(SigningKey.objects.get().sealed)}
    for number in (b"2", b"3"):
        settings.IDENTITY_KEYS = [number * 32, *settings.IDENTITY_KEYS]
        signing.reencrypt_keys()
        seen.add(bytes(SigningKey.objects.get().sealed))
    assert len(seen) == 3


def test_no_private_key_is_in_the_database_or_in_the_log(grant, caplog, settings) -> None:
    caplog.set_level(logging.DEBUG)
    mine = [curves.generate_key("ES256K"), curves.generate_key("ES256"), curves.generate_key("ES256K")]
    for private, agent in zip(mine, (ADA, BOB, "did:plc:eve"), strict=True):
        signing.create_key(agent, now=NOW, private=private)
    mint(grant())
    signing.rotate_key(BOB, now=NOW)
    settings.IDENTITY_KEYS = [b"1" * 32]
    signing.reencrypt_keys()
    output = io.StringIO()
    call_command("dumpdata", "--all", stdout=output)
    assert "sandboxes.mintedtoken" in output.getvalue()
    assert "signing key created" in caplog.text
    shown = f"{list(SigningKey.objects.all())} {list(MintedToken.objects.all())} {list(SigningKey.objects.values())}"
    for private in mine:
        for form in list_key_encodings(private):
            assert form not in output.getvalue() and form not in caplog.text and form not in shown
        assert all(private.secret not in bytes(key.sealed or b"") for key in SigningKey.objects.all())

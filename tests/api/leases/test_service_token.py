"""Service tokens through the API."""

import pytest

from leases.models import IdempotentRequest
from sandboxes.identity import curves, signing
from sandboxes.models import MintedToken
from tests.api.conftest import ADA, ApiClient
from tests.conftest import NOW
from tests.support import tokens
from tests.support.secrets import list_key_encodings

pytestmark = pytest.mark.django_db
ASK = {"aud": "did:web:relay.example#bsky_relay", "lxm": "com.atproto.sync.subscribeRepos"}


def test_an_active_lease_has_a_token_for_its_agent(ada: ApiClient, lease) -> None:
    private = curves.generate_key()
    key = signing.create_key(ADA, now=NOW, private=private)
    response = ada.post(f"leases/{lease['id']}/service-token", ASK | {"lifetime_seconds": 300})
    assert response.status_code == 200 and response["Cache-Control"] == "no-store"
    payload = response.json()
    claims = tokens.verify_token(payload["token"], key.did_key)
    assert {**ASK, "iss": ADA}.items() <= claims.items()
    assert claims["exp"] - claims["iat"] == 300
    minted = MintedToken.objects.get()
    assert payload["expires_at"] == f"{minted.expires_at:%Y-%m-%dT%H:%M:%SZ}" and minted.expires_at.timestamp() == claims["exp"]
    assert (str(minted.holder), minted.actor) == (lease["id"], f"key {ada.key[3:11]}")
    assert not any(form in response.content.decode() for form in list_key_encodings(private))


def test_a_token_lives_for_a_minute_by_default(ada: ApiClient, lease) -> None:
    key = signing.create_key(ADA, now=NOW)
    for more in ({}, {"lifetime_seconds": None}):
        claims = tokens.verify_token(ada.post(f"leases/{lease['id']}/service-token", ASK | more).json()["token"], key.did_key)
        assert claims["exp"] - claims["iat"] == 60


def test_a_signing_key_that_cannot_sign_is_named(ada: ApiClient, lease, settings) -> None:
    def read_problem() -> tuple[int, str, str]:
        response = ada.post(f"leases/{lease['id']}/service-token", ASK)
        return response.status_code, response.json()["code"], response.json()["detail"]

    assert read_problem()[:2] == (409, "no_signing_key")
    settings.IDENTITY_KEYS = [b"1" * 32]
    signing.create_key(ADA, now=NOW)
    settings.IDENTITY_KEYS = [b"2" * 32]
    status, code, detail = read_problem()
    assert (status, code, "LEASEHOLD_IDENTITY_KEYS" in detail) == (503, "signing_key_unopened", True)
    signing.revoke_active_key(ADA, now=NOW)
    assert read_problem()[:2] == (409, "signing_key_revoked")
    assert not MintedToken.objects.exists()


METHODS = [
    "a.b.c", "com.example.fooBarV2", "one.2.three", "cn.8.lex.stuff", f"com.{'o' * 63}.foo",
    "xn--fiqs8s.xn--fiqa61au8b7zsevnm8ak20mc4a87e.record.two",
]  # fmt: skip


def test_every_nsid_is_accepted_as_method(ada: ApiClient, lease) -> None:
    key = signing.create_key(ADA, now=NOW)
    for lxm in METHODS:
        body = {"aud": "did:plc:z72i7hdynmk6r22z27h6tvur", "lxm": lxm}
        payload = ada.post(f"leases/{lease['id']}/service-token", body).json()
        assert tokens.verify_token(payload["token"], key.did_key)["lxm"] == lxm


def test_an_idempotency_key_stores_no_token(ada: ApiClient, lease) -> None:
    signing.create_key(ADA, now=NOW)
    payload = [ada.post(f"leases/{lease['id']}/service-token", ASK, idempotency_key="k1").json()["token"] for _ in range(2)]
    assert payload[0] != payload[1]
    assert not IdempotentRequest.objects.exists()

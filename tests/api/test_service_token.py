"""Service tokens through the API."""

from typing import Any

import pytest

from leases.models import IdempotentRequest
from sandboxes.identity import curves, signing
from sandboxes.models import MintedToken
from tests.api.conftest import ADA, BOB, ApiClient, expire_lease
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


def assert_refused(api: ApiClient, lease: dict[str, Any], status: int, code: str, body: Any = ASK) -> dict[str, Any]:
    response = api.post(f"leases/{lease['id']}/service-token", body)
    payload: dict[str, Any] = response.json()
    assert (response.status_code, payload["code"]) == (status, code)
    assert not MintedToken.objects.exists()
    return payload


def test_an_ended_lease_gets_no_token(ada: ApiClient, lease) -> None:
    signing.create_key(ADA, now=NOW)
    ada.post(f"leases/{lease['id']}/release")
    assert assert_refused(ada, lease, 410, "lease_ended")["end_reason"] == "released"


def test_an_elapsed_lease_gets_no_token_before_any_sweep(ada: ApiClient, lease) -> None:
    signing.create_key(ADA, now=NOW)
    expire_lease(lease["id"])
    assert assert_refused(ada, lease, 410, "lease_ended")["end_reason"] == "ttl"


def test_another_keys_lease_is_not_found(bob: ApiClient, lease) -> None:
    signing.create_key(ADA, now=NOW)
    signing.create_key(BOB, now=NOW)
    assert_refused(bob, lease, 404, "not_found")


def test_a_missing_or_revoked_signing_key_is_a_conflict(ada: ApiClient, lease) -> None:
    assert_refused(ada, lease, 409, "no_signing_key")
    signing.create_key(ADA, now=NOW)
    signing.revoke_active_key(ADA, now=NOW)
    assert_refused(ada, lease, 409, "signing_key_revoked")


def test_a_signing_key_that_cannot_be_decrypted_is_unavailable(ada: ApiClient, lease, settings) -> None:
    settings.IDENTITY_KEYS = [b"1" * 32]
    signing.create_key(ADA, now=NOW)
    settings.IDENTITY_KEYS = [b"2" * 32]
    assert "LEASEHOLD_IDENTITY_KEYS" in assert_refused(ada, lease, 503, "signing_key_unopened")["detail"]


BAD = {
    "aud": [
        None, "", 5, "relay.example", "did:web:", "did:web:x#", "did:web:x#a#b", "did:web:x y", "did:web:x\n",
        f"did:web:{'x' * 330}",
    ],
    "lxm": [
        None, "", 5, "com.example", "com.example.foo.*", "com.example-.foo", "1.0.0.127.record", "a-0.b-1.c-3",
        "one.two.three\n", "com.atproto.feed.p@st", "com.example.fooBar.2", ".one.two.three", "one.two..three",
        f"com.{'o' * 64}.foo",
    ],
    "lifetime_seconds": [0, -1, 301, 1.5, "60", True],
}  # fmt: skip


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
def test_invalid_input_names_the_field(ada: ApiClient, lease, field: str, value: Any) -> None:
    signing.create_key(ADA, now=NOW)
    assert assert_refused(ada, lease, 400, "invalid", {**ASK, field: value})["field"] == field


@pytest.mark.parametrize("field", ["aud", "lxm"])
def test_audience_and_method_are_required(ada: ApiClient, lease, field: str) -> None:
    assert (
        assert_refused(ada, lease, 400, "invalid", {name: payload for name, payload in ASK.items() if name != field})["field"]
        == field
    )


METHODS = [
    "a.b.c", "com.example.fooBarV2", "one.2.three", "cn.8.lex.stuff", f"com.{'o' * 63}.foo",
    "xn--fiqs8s.xn--fiqa61au8b7zsevnm8ak20mc4a87e.record.two",
]  # fmt: skip


@pytest.mark.parametrize("lxm", METHODS)
def test_every_nsid_is_accepted_as_method(ada: ApiClient, lease, lxm: str) -> None:
    key = signing.create_key(ADA, now=NOW)
    payload = ada.post(f"leases/{lease['id']}/service-token", {"aud": "did:plc:z72i7hdynmk6r22z27h6tvur", "lxm": lxm}).json()
    assert tokens.verify_token(payload["token"], key.did_key)["lxm"] == lxm


def test_an_idempotency_key_stores_no_token(ada: ApiClient, lease) -> None:
    signing.create_key(ADA, now=NOW)
    payload = [ada.post(f"leases/{lease['id']}/service-token", ASK, idempotency_key="k1").json()["token"] for _ in range(2)]
    assert payload[0] != payload[1]
    assert not IdempotentRequest.objects.exists()

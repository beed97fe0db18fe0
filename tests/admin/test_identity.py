"""Signing keys and service tokens in the console."""

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client
from django.utils import timezone

from leases import execution
from leases.models import Agent, Lease
from sandboxes.identity import curves, signing
from sandboxes.identity.curves import PrivateKey
from sandboxes.models import MintedToken, SigningKey
from tests.admin.conftest import ADA, NOW
from tests.conftest import MINUTE
from tests.support.console import WHY, fetch, get_fields, list_rows, row_url
from tests.support.secrets import list_key_encodings

pytestmark = pytest.mark.django_db
KEYS, TOKENS = "/admin/sandboxes/signingkey/", "/admin/sandboxes/mintedtoken/"
RELAY, SUBSCRIBE = "did:web:relay.example#relay", "com.atproto.sync.subscribeRepos"
NEW = {"agent_did": "did:plc:new", "algorithm": "ES256", "reason": "joins the relay"}


def do(client: Client, act: str, key: SigningKey):
    """Submit the dialog of an action on a key's page."""
    return client.post(row_url(key, act), WHY)


def mint(lease: Lease, at=NOW) -> MintedToken:
    return execution.mint_service_token(lease.pk, aud=RELAY, lxm=SUBSCRIBE, now=at, actor="key 1a2b3c4d")[1]


def test_a_key_is_created_with_a_reason_and_its_page_shows_the_document(administrator: Client) -> None:
    answer = administrator.post(f"{KEYS}add/", NEW, follow=True)
    key = signing.get_active_key("did:plc:new")
    assert (key.algorithm, key.created_by) == ("ES256", "administrator")
    assert answer.redirect_chain == [(row_url(key), 302)]
    shown = answer.content.decode()
    assert key.did_key in shown and "&quot;did:plc:new#atproto&quot;" in shown
    assert LogEntry.objects.get().get_change_message() == "Create key: joins the relay"
    assert Agent.objects.filter(did="did:plc:new").exists()


@pytest.mark.parametrize(
    ("field", "value"), [("agent_did", "nonsense"), ("agent_did", ADA), ("reason", "x"), ("algorithm", "RS256")]
)
def test_a_key_that_cannot_be_created_is_refused_at_its_field(administrator: Client, field: str, value: str) -> None:
    signing.create_key(ADA, now=NOW)
    answer = administrator.post(f"{KEYS}add/", NEW | {field: value})
    assert answer.status_code == 200 and field in answer.context["adminform"].form.errors
    assert SigningKey.objects.count() == 1


def test_a_key_created_concurrently_is_reported(administrator: Client, monkeypatch) -> None:
    generate = curves.generate_key

    def rival(algorithm: str) -> PrivateKey:  # after the form was found to be good
        signing.create_key(NEW["agent_did"], now=NOW, private=generate())
        return generate(algorithm)

    monkeypatch.setattr(curves, "generate_key", rival)
    answer = administrator.post(f"{KEYS}add/", NEW, follow=True)
    assert answer.status_code == 200 and b"The agent has a signing key" in answer.content


def test_rotating_leads_to_the_new_key(administrator: Client) -> None:
    old = signing.create_key(ADA, now=NOW)
    answer = do(administrator, "rotate", old)
    new = signing.get_active_key(ADA)
    assert answer["HX-Redirect"] == row_url(new)
    assert (new.created_by, new.pk != old.pk) == ("administrator", True)
    assert LogEntry.objects.get().get_change_message() == "Rotate key: it was agreed"
    assert old.did_key in fetch(administrator, row_url(new))
    assert new.did_key in fetch(administrator, row_url(old))


def test_revoking_offers_a_new_key(administrator: Client) -> None:
    key = signing.create_key(ADA, now=NOW)
    assert do(administrator, "revoke", key)["HX-Redirect"] == row_url(key)
    shown = fetch(administrator, row_url(key))
    assert "create one" in shown and "Rotate key…" not in shown
    assert "nothing changed" in administrator.get(do(administrator, "revoke", key)["HX-Redirect"]).content.decode().lower()


def test_each_tab_of_keys_lists_its_own_rows(viewer: Client) -> None:
    retired, revoked = signing.create_key(ADA, now=NOW), signing.create_key("did:plc:bob", now=NOW)
    active = signing.rotate_key(ADA, now=NOW)
    signing.revoke_key(revoked, now=NOW)
    assert list_rows(viewer, KEYS) == [active]
    assert list_rows(viewer, f"{KEYS}?slice=retired") == [retired]
    assert list_rows(viewer, f"{KEYS}?slice=revoked") == [revoked]
    assert list_rows(viewer, f"{KEYS}?slice=all&q={retired.did_key}") == [retired]
    assert list_rows(viewer, f"{KEYS}?slice=all&q=did:plc:b") == [revoked]


def test_tokens_are_found_by_agent_audience_and_method(viewer: Client, lease: Lease, grant) -> None:
    key = signing.create_key(ADA, now=NOW)
    mine = mint(lease)
    signing.create_key("did:plc:bob", now=NOW)
    other = mint(grant(agent="did:plc:bob"), at=timezone.now())
    assert list_rows(viewer, TOKENS) == [other, mine]
    assert list_rows(viewer, f"{TOKENS}?slice=valid") == [other]
    for term in (ADA, key.did_key, str(lease.pk), str(mine.pk), mine.pk.hex):
        assert list_rows(viewer, f"{TOKENS}?q={term}") == [mine], term
    assert list_rows(viewer, f"{TOKENS}?q=did:web:relay") == list_rows(viewer, f"{TOKENS}?q=com.atproto") == [other, mine]
    page = fetch(viewer, TOKENS)
    assert row_url(lease) in page and "key 1a2b3c4d" in page
    shown = fetch(viewer, row_url(mine))
    assert SUBSCRIBE in shown and row_url(key) in shown


def test_a_key_links_to_exactly_the_tokens_it_counts(viewer: Client, lease: Lease) -> None:
    old = signing.create_key(ADA, now=NOW)
    mint(lease), mint(lease)
    new = signing.rotate_key(ADA, now=NOW)
    mint(lease, at=NOW + MINUTE)
    for key, number in ((old, 2), (new, 1)):
        fact = get_fields(viewer, row_url(key))["Service tokens"]
        assert (fact.value, len(list_rows(viewer, fact.href))) == (str(number), number)


def test_an_agents_page_shows_its_signing_key(administrator: Client, viewer: Client) -> None:
    agent = Agent.objects.create(did=ADA)
    assert f"{KEYS}add/?agent_did=did%3Aplc%3Aada" in fetch(administrator, row_url(agent))
    assert f"{KEYS}add/" not in fetch(viewer, row_url(agent))
    key = signing.create_key(ADA, now=NOW)
    assert row_url(key) in fetch(viewer, row_url(agent))


def test_no_page_shows_a_private_key(superuser: Client, lease: Lease) -> None:
    mine = [curves.generate_key(), curves.generate_key("ES256")]
    key = signing.create_key(ADA, now=NOW, private=mine[0])
    token = mint(lease)
    other = signing.create_key("did:plc:bob", now=NOW, private=mine[1])
    signing.revoke_key(other, now=NOW)
    urls = [KEYS, f"{KEYS}?slice=all", f"{KEYS}add/", TOKENS, row_url(token)]
    urls += [row_url(each, name) for each in (key, other) for name in ("change", "history")]
    sealed = bytes(SigningKey.objects.get(pk=key.pk).sealed)
    for url in urls:
        shown = fetch(superuser, url)
        assert not any(form in shown for private in mine for form in list_key_encodings(private)), url
        assert sealed.hex() not in shown and repr(sealed) not in shown

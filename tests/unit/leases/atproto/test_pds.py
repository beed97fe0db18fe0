"""Accounts and records at a real repository server (PDS), with a DID document of the test."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
import requests

from leases.atproto import accounts, records
from leases.atproto.models import AtprotoRecord
from leases.atproto.service import RepositoryService, ServiceError
from leases.models import Lease
from sandboxes.identity import signing
from sandboxes.models import Policy, SigningKey
from tests.emulators.pds import DidDocuments
from tests.support.servers.services import require_environment
from tests.unit.leases.atproto.conftest import COLLECTION, take_turn

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.matrix("the real repository server; the client has its own tests in test_records.py"),
]
SERVER_DID = "did:web:localhost"
CREATE_ACCOUNT = "com.atproto.server.createAccount"
PASSWORD = "password-of-the-account"


@pytest.fixture
def server() -> RepositoryService:
    [url] = require_environment("pds", "TEST_PDS_URL")
    return RepositoryService(url)


@pytest.fixture
def signing_key(documents: DidDocuments, server: RepositoryService, db: None) -> SigningKey:
    """Signing key of an agent, published in its DID document."""
    key = signing.create_key(documents.did, now=datetime.now(UTC))
    documents.publish(key.public_key, service_url=server.url, handle=build_handle(documents))
    return key


def build_handle(documents: DidDocuments) -> str:
    return f"ada-{documents.port}.test"


def create_account(server: RepositoryService, documents: DidDocuments) -> dict[str, Any]:
    """Create the account of the agent with a service token, which the server verifies by the DID document."""
    now = datetime.now(UTC)
    token = signing.create_service_token(documents.did, aud=SERVER_DID, lxm=CREATE_ACCOUNT, now=now)
    handle = build_handle(documents)
    fields = {"did": documents.did, "handle": handle, "email": f"{uuid4().hex}@example.org", "password": PASSWORD}
    return server.call(CREATE_ACCOUNT, json=fields, authorization=f"Bearer {token}")


def activate_account(server: RepositoryService, documents: DidDocuments, session: dict[str, Any]) -> None:
    """Publish the server's key in the DID document, since the server signs the repository, and activate the account."""
    authorization = {"Authorization": f"Bearer {session['accessJwt']}"}
    url = f"{server.url}/xrpc/com.atproto.identity.getRecommendedDidCredentials"
    key = requests.get(url, headers=authorization, timeout=10).json()["verificationMethods"]["atproto"]
    documents.publish(key.removeprefix("did:key:"), service_url=server.url, handle=build_handle(documents))
    url = f"{server.url}/xrpc/com.atproto.server.activateAccount"
    requests.post(url, headers=authorization, timeout=10).raise_for_status()


def list_records(server: RepositoryService, did: str) -> list[dict[str, Any]]:
    found = server.call("com.atproto.repo.listRecords", params={"repo": did, "collection": COLLECTION})["records"]
    return [row["value"] for row in found]


def test_the_server_accepts_a_service_token_only_with_the_key_of_the_did_document(
    server: RepositoryService, documents: DidDocuments, signing_key: SigningKey
) -> None:
    signing.rotate_key(documents.did, now=datetime.now(UTC))  # not published
    with pytest.raises(ServiceError, match="BadJwtSignature"):
        create_account(server, documents)
    key = signing.get_active_key(documents.did)
    documents.publish(key.public_key, service_url=server.url, handle=build_handle(documents))
    assert create_account(server, documents)["did"] == documents.did


def test_turns_are_recorded_in_the_agents_repository_once(
    server: RepositoryService,
    documents: DidDocuments,
    signing_key: SigningKey,
    permitted: Policy,
    grant: Callable[..., Lease],
    crash_at: Callable[[str], AbstractContextManager[None]],
) -> None:
    activate_account(server, documents, create_account(server, documents))
    accounts.set_account(documents.did, service_url=server.url, password=PASSWORD, now=datetime.now(UTC))
    now = datetime.now(UTC)
    lease = grant(agent=documents.did, now=now)
    take_turn(lease, 1, action={"action": "build", "odds": 0.5, "at": [3, {"deep": None}]}, now=now)
    with crash_at("record created"):  # the server has the record, the control plane does not know it
        records.create_due_records(now=now + timedelta(minutes=1))
    assert records.create_due_records(now=now + timedelta(minutes=5)).counts == {"created": 1}
    row = AtprotoRecord.objects.get()
    assert list_records(server, documents.did) == [row.value]
    assert row.value["action"] == {"action": "build", "odds": "0.5", "at": [3, {"deep": None}]}
    found = server.call(
        "com.atproto.repo.getRecord", params={"repo": documents.did, "collection": COLLECTION, "rkey": row.record_key}
    )
    assert (found["uri"], found["cid"]) == (row.uri, row.cid)


def test_the_answer_to_a_service_token_that_the_server_does_not_accept_is_stored(
    server: RepositoryService,
    documents: DidDocuments,
    signing_key: SigningKey,
    permitted: Policy,
    grant: Callable[..., Lease],
) -> None:
    """This server creates records only in sessions and by OAuth."""
    accounts.set_account(documents.did, service_url=server.url, service_did=SERVER_DID, now=datetime.now(UTC))
    now = datetime.now(UTC)
    take_turn(grant(agent=documents.did, now=now), now=now)
    assert records.create_due_records(now=now + timedelta(minutes=1)).counts == {"postponed": 1}
    row = AtprotoRecord.objects.get()
    assert row.error.startswith("com.atproto.repo.createRecord at localhost: 4") and row.status == "pending"

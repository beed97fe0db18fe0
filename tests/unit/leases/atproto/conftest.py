"""An agent with a DID document, an account at an emulated repository server, and turns that are recorded there."""

import json
from collections.abc import Callable, Iterator
from datetime import datetime

import pytest

from leases import turns
from leases.atproto import accounts
from leases.models import EnvironmentType, Lease, Turn
from sandboxes.identity import signing
from sandboxes.models import Policy
from tests.conftest import NOW
from tests.emulators.pds import DidDocuments, Pds, serve

COLLECTION = "org.example.game.action"


@pytest.fixture
def documents() -> Iterator[DidDocuments]:
    with serve(DidDocuments()) as documents:
        yield documents


@pytest.fixture
def pds(documents: DidDocuments) -> Iterator[Pds]:
    with serve(Pds(documents, now=lambda: NOW)) as pds:
        yield pds


@pytest.fixture
def permitted(pool: object) -> Policy:
    """Environment type whose turns are recorded, with a policy that permits it."""
    policy = Policy.objects.create(name="recorded", record_collections=[COLLECTION])
    EnvironmentType.objects.filter(name="catan").update(policy=policy, turn_collection=COLLECTION)
    return policy


@pytest.fixture
def recorded(permitted: Policy, pds: Pds, documents: DidDocuments, grant: Callable[..., Lease]) -> Lease:
    """Lease of an agent with a signing key, its DID document and an account that accepts service tokens."""
    key = signing.create_key(documents.did, now=NOW)
    documents.publish(key.public_key, service_url=pds.url)
    accounts.set_account(documents.did, service_url=pds.url, service_did=pds.did, now=NOW)
    return grant(agent=documents.did)


def take_turn(lease: Lease, number: int = 1, *, action: object = None, now: datetime = NOW) -> Turn:
    """Take a turn whose command prints `action`."""
    printed = json.dumps(action or {"action": "roll", "dice": 2})
    EnvironmentType.objects.filter(name="catan").update(turn_argv=["echo", printed])
    return turns.take_turn(lease.pk, number, {}, now=now)

"""Revocation of an API key together with the leases that were granted to it."""

from datetime import timedelta

import pytest

from leases import api_keys, leasing
from leases.grants import revocation
from leases.grants.revocation import Revocation
from leases.models import AgentKey, Lease
from sandboxes.models import Pool
from tests.conftest import NOW
from tests.support.actors import console_user
from tests.support.billing import ADA

pytestmark = pytest.mark.django_db


@pytest.fixture
def key() -> AgentKey:
    return api_keys.issue_key([ADA], now=NOW)[0]


def acquire(pool: Pool, environment: str, actor: str) -> Lease:
    request = leasing.LeaseRequest(agent_did=ADA, environment_id=environment, environment_type="catan", pool=pool.name)
    return leasing.acquire(request, now=NOW, actor=actor)[0]


def test_only_leases_that_were_granted_to_the_key_end(key: AgentKey, pool: Pool) -> None:
    other = api_keys.issue_key([ADA], now=NOW)[0]
    own = acquire(pool, "game-1", api_keys.format_actor(key))
    acquire(pool, "game-2", api_keys.format_actor(other))
    acquire(pool, "game-1", api_keys.format_actor(other))  # held already: it stays that of the first key
    acquire(pool, "game-3", "command line")
    api_keys.rotate_key(key.pk, overlap=timedelta(0), now=NOW)
    done = revocation.revoke(key, end_leases=True, now=NOW, actor=console_user("olga"), reason="it leaked")
    assert done == Revocation(revoked=True, ended_leases=1)
    ended = Lease.objects.get(status="expired")
    assert (ended.pk, ended.end_reason, ended.end_detail) == (own.pk, "operator", f"API key {key.prefix} revoked: it leaked")
    assert ended.events.get(kind="ended").actor == "olga"


def test_leases_go_on_unless_they_are_to_end(key: AgentKey, pool: Pool) -> None:
    acquire(pool, "game-1", api_keys.format_actor(key))
    assert revocation.revoke(key, end_leases=False, now=NOW) == Revocation(revoked=True)
    assert Lease.objects.get().status == "active"


def test_leases_of_a_key_that_was_revoked_before_can_be_ended(key: AgentKey, pool: Pool) -> None:
    acquire(pool, "game-1", api_keys.format_actor(key))
    revocation.revoke(key, end_leases=False, now=NOW)
    assert revocation.revoke(key, end_leases=True, now=NOW) == Revocation(revoked=False, ended_leases=1)
    assert revocation.revoke(key, end_leases=True, now=NOW) == Revocation(revoked=False)

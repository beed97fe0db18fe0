"""Minting of tokens concurrently with the end of the lease, and with revocation or rotation of the key. API keys."""

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db import OperationalError, connection

from leases import api_keys, execution, leasing
from leases.errors import Conflict, KeyExpired
from leases.models import Lease
from sandboxes.errors import SigningKeyExists
from sandboxes.identity import signing
from sandboxes.models import MintedToken, SigningKey
from tests.conftest import NOW, run_in_threads

pytestmark = pytest.mark.django_db(transaction=True)
REQUEST = {"aud": "did:web:relay.example", "lxm": "com.atproto.sync.subscribeRepos"}


def is_locked_out(act: Callable[[], object]) -> bool:
    """Return whether a lock prevents another connection from doing this now."""
    outcomes: list[bool] = []

    def rival() -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET lock_timeout = '1ms'" if connection.vendor == "postgresql" else "PRAGMA busy_timeout = 1")
        try:
            act()
            outcomes.append(False)
        except OperationalError:
            outcomes.append(True)
        finally:
            connection.close()

    thread = threading.Thread(target=rival)
    thread.start()
    thread.join()
    return outcomes[0]


@pytest.mark.parametrize("rival", ["the lease ends", "the key is revoked", "the key is rotated"])
def test_end_or_revocation_waits_until_the_token_is_recorded(grant, at_checkpoint, rival: str) -> None:
    signing.create_key("did:plc:ada", now=NOW)
    lease: Lease = grant()
    act = {
        "the lease ends": lambda: leasing.end(lease.pk, reason="operator", now=NOW),
        "the key is revoked": lambda: signing.revoke_active_key("did:plc:ada", now=NOW),
        "the key is rotated": lambda: signing.rotate_key("did:plc:ada", now=NOW),
    }[rival]
    waited: list[bool] = []
    at_checkpoint("token minted", lambda: waited.append(is_locked_out(act)))
    execution.mint_service_token(lease.pk, now=NOW, **REQUEST)
    assert waited == [True] and MintedToken.objects.count() == 1
    assert not is_locked_out(act)


def test_eight_concurrent_creates_make_one_key(db: None) -> None:
    with run_in_threads(8) as run:
        results = run(lambda i: signing.create_key("did:plc:ada", now=NOW))
    assert [type(result) for result in results].count(SigningKeyExists) == 7
    assert SigningKey.objects.count() == 1


def test_tokens_are_minted_during_rotations(grant) -> None:
    signing.create_key("did:plc:ada", now=NOW)
    lease = grant()

    def act(index: int) -> object:
        return (
            execution.mint_service_token(lease.pk, now=NOW, **REQUEST)
            if index % 2
            else signing.rotate_key("did:plc:ada", now=NOW)
        )

    with run_in_threads(12) as run:
        results = run(act)
    assert not [result for result in results if isinstance(result, Exception)]
    assert (MintedToken.objects.count(), SigningKey.objects.count()) == (6, 7)
    assert SigningKey.objects.filter(sealed__isnull=False).count() == 1


@pytest.mark.parametrize("overlap", [timedelta(hours=24), timedelta(0)])
def test_concurrent_rotations_of_an_api_key_issue_one_secret(overlap: timedelta) -> None:
    row, _ = api_keys.issue_key(["did:plc:ada"], now=NOW)
    with run_in_threads(4) as together:
        results = together(lambda i: api_keys.rotate_key(row.pk, overlap=overlap, now=NOW))
    issued = [key for key in results if isinstance(key, str)]
    # With no overlap a rotation that begins after another has ended is legal, so the last secret is the valid one.
    assert sum(_is_accepted(key) for key in issued) == 1
    assert overlap == timedelta(0) or len(issued) == 1
    assert all(isinstance(result, str | Conflict) for result in results)


def _is_accepted(key: str) -> bool:
    try:
        return api_keys.find_active_key(key, now=NOW) is not None
    except KeyExpired:
        return False

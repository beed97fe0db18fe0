"""API keys: expiry, rotation and scopes."""

from datetime import timedelta

import pytest

from leases import api_keys
from leases.errors import Conflict, InvalidRequest, KeyExpired
from leases.models import AgentKey
from tests.conftest import MINUTE, NOW

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("hand-written SQL")]
ADA = "did:plc:ada"
HOUR = timedelta(hours=1)


def test_a_key_is_refused_from_its_expiry_on() -> None:
    row, key = api_keys.issue_key([ADA], expires_at=NOW + HOUR, now=NOW)
    assert api_keys.find_active_key(key, now=NOW + HOUR - timedelta(seconds=1)) == row
    with pytest.raises(KeyExpired, match=r"expired at \d{4}-"):
        api_keys.find_active_key(key, now=NOW + HOUR)
    with pytest.raises(Conflict, match="expired"):
        api_keys.rotate_key(row.pk, now=NOW + HOUR)
    with pytest.raises(InvalidRequest) as refused:
        api_keys.issue_key([ADA], expires_at=NOW, now=NOW)
    assert refused.value.extra["field"] == "expires_at"


def test_a_rotated_key_keeps_its_row_and_accepts_the_previous_secret_during_the_overlap() -> None:
    row, old = api_keys.issue_key([ADA], now=NOW)
    new = api_keys.rotate_key(row.pk, now=NOW)
    assert new.startswith(f"lh_{row.prefix}_") and new != old
    day = timedelta(hours=24)
    assert [api_keys.find_active_key(key, now=NOW + day - MINUTE) for key in (old, new)] == [row, row]
    assert api_keys.find_active_key(new, now=NOW + day) == row
    with pytest.raises(KeyExpired, match="replaced"):
        api_keys.find_active_key(old, now=NOW + day)
    assert api_keys.find_active_key(f"{new[:-1]}{'A' if new[-1] != 'A' else 'B'}", now=NOW) is None
    api_keys.revoke_key(row, now=NOW)
    assert [api_keys.find_active_key(key, now=NOW) for key in (old, new)] == [None, None]
    with pytest.raises(Conflict, match="revoked"):
        api_keys.rotate_key(row.pk, now=NOW)


def test_a_second_rotation_waits_for_the_overlap_or_ends_all_earlier_secrets() -> None:
    row, first = api_keys.issue_key([ADA], now=NOW)
    second = api_keys.rotate_key(row.pk, now=NOW)
    with pytest.raises(Conflict, match="previous secret"):
        api_keys.rotate_key(row.pk, now=NOW + HOUR)
    assert api_keys.find_active_key(first, now=NOW + HOUR) == row
    third = api_keys.rotate_key(row.pk, overlap=timedelta(0), now=NOW + HOUR)
    assert api_keys.find_active_key(first, now=NOW + HOUR) is None
    with pytest.raises(KeyExpired):
        api_keys.find_active_key(second, now=NOW + HOUR)
    assert api_keys.find_active_key(third, now=NOW + HOUR) == row


def test_authentication_takes_one_query(django_assert_num_queries) -> None:
    row, old = api_keys.issue_key([ADA], expires_at=NOW + 48 * HOUR, now=NOW)
    new = api_keys.rotate_key(row.pk, now=NOW)
    AgentKey.objects.update(last_used_at=NOW)
    for key in (old, new):
        with django_assert_num_queries(1):
            assert api_keys.find_active_key(key, now=NOW) == row


def test_a_key_has_known_scopes_at_least_one() -> None:
    assert api_keys.issue_key([ADA], now=NOW)[0].scopes == ["leases", "costs"]
    assert api_keys.issue_key([ADA], scopes=["read"], now=NOW)[0].scopes == ["read"]
    for scopes in ([], ["all"]):
        with pytest.raises(InvalidRequest) as refused:
            api_keys.issue_key([ADA], scopes=scopes, now=NOW)
        assert refused.value.extra["field"] == "scopes"

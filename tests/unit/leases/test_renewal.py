"""Renewals by key: one statement for one lease or for many, with the guards of the step-by-step renewal."""

from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from leases import api_keys, leasing, renewal
from leases.models import AgentKey, Lease
from leases.renewal import Renewal
from sandboxes.db import sql
from tests.conftest import MINUTE, NOW
from tests.support.billing import ADA, BOB

HOUR = 60 * MINUTE

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("hand-written SQL")]


def issue(*dids: str, **options) -> str:
    key = api_keys.issue_key(dids or [ADA], now=NOW, **options)[1]
    AgentKey.objects.update(last_used_at=NOW)
    return key


def read_ends(lease: Lease) -> tuple:
    return Lease.objects.values_list("expires_at", "expires_minute", "last_activity_at").get(pk=lease.pk)


@pytest.mark.parametrize(
    "after", [timedelta(0), MINUTE / 7, MINUTE - timedelta(microseconds=1), 30 * MINUTE, 90 * MINUTE], ids=str
)
def test_one_statement_sets_what_the_single_steps_set(grant, after: timedelta) -> None:
    """Beyond max_ttl, at a fraction of a second, in the last one of a minute, and at the same time as the grant."""
    lease, twin = (grant(environment=name, ttl=2 * HOUR, max_ttl=3 * HOUR) for name in ("e1", "e2"))
    key, now = issue(), NOW + after
    AgentKey.objects.update(last_used_at=now)
    with CaptureQueriesContext(connection) as statements:
        until = renewal.renew_with_key(lease.pk, key, now=now)
    assert (until, len(statements)) == (leasing.renew(twin, now=now), 1)
    assert read_ends(lease) == read_ends(twin)


@pytest.mark.parametrize(
    "change",
    [
        {"revoked_at": NOW}, {"expires_at": NOW}, {"digest": "0" * 64}, {"scopes": ["read"]}, {"dids": [BOB]}, {"dids": []},
        {"last_used_at": NOW - 2 * MINUTE}, {"last_used_at": None},
        {"digest": "0" * 64, "previous": True, "previous_valid_until": NOW},
    ],
    ids=["revoked", "expired", "secret", "scope", "agent", "no agent", "use to be noted", "never used", "rotated"],
)  # fmt: skip
def test_a_key_that_may_not_renew_changes_nothing(grant, change) -> None:
    lease, key = grant(ttl=HOUR), issue()
    AgentKey.objects.update(**rotate(change, key))
    before = read_ends(lease)
    assert renewal.renew_with_key(lease.pk, key, now=NOW + MINUTE / 2) is None
    assert read_ends(lease) == before


@pytest.mark.parametrize(
    "change",
    [
        {}, {"dids": [BOB, ADA]}, {"dids": [], "operator": True},
        {"digest": "0" * 64, "previous": True, "previous_valid_until": NOW + HOUR},
    ],
    ids=["plain", "second agent", "operator", "previous secret"],
)  # fmt: skip
def test_a_key_that_may_act_for_the_agent_renews(grant, change) -> None:
    lease, key = grant(ttl=HOUR), issue()
    AgentKey.objects.update(**rotate(change, key))
    assert renewal.renew_with_key(lease.pk, key, now=NOW + MINUTE / 2) == NOW + HOUR + MINUTE / 2


def rotate(change: dict, key: str) -> dict:
    """Replace the mark `previous` by the digest of the key, as that of the secret before the last rotation."""
    changed = dict(change)
    return changed | {"previous_digest": api_keys.hash_key(key)} if changed.pop("previous", False) else changed


def test_an_ended_an_elapsed_and_a_later_renewed_lease_are_left_to_the_single_steps(grant) -> None:
    key, ended, elapsed, later = issue(), *(grant(environment=name, ttl=MINUTE / 2) for name in ("e1", "e2", "e3"))
    leasing.release(ended.pk, now=NOW)
    Lease.objects.filter(pk=later.pk).update(last_activity_at=NOW + MINUTE)
    before = [read_ends(lease) for lease in (ended, elapsed, later)]
    assert renewal.renew_with_key(ended.pk, key, now=NOW + MINUTE / 4) is None
    assert renewal.renew_with_key(elapsed.pk, key, now=NOW + MINUTE / 2) is None
    assert renewal.renew_with_key(later.pk, key, now=NOW + MINUTE / 4) is None
    assert [read_ends(lease) for lease in (ended, elapsed, later)] == before
    assert renewal.renew_with_key(ended.pk, "lh_1", now=NOW) is None


def test_a_batch_renews_in_one_statement_and_reports_each_lease(grant) -> None:
    first, second, short, released, bobs = (
        grant(environment=name, ttl=MINUTE if name == "short" else HOUR, agent=BOB if name == "bobs" else ADA)
        for name in ("first", "second", "short", "released", "bobs")
    )
    leasing.release(released.pk, now=NOW)
    now, unknown = NOW + MINUTE, uuid4()
    with CaptureQueriesContext(connection) as statements:
        assert renewal.renew_many([second.pk, first.pk], [ADA], now=now) == {
            second.pk: Renewal(now + HOUR), first.pk: Renewal(now + HOUR),
        }  # fmt: skip
    assert len(statements) == 1
    outcomes = renewal.renew_many([bobs.pk, short.pk, unknown, released.pk, first.pk], [ADA], now=now)
    assert [*outcomes.items()] == [
        (bobs.pk, Renewal(found=False)), (short.pk, Renewal(end_reason="ttl")), (unknown, Renewal(found=False)),
        (released.pk, Renewal(end_reason="released")), (first.pk, Renewal(now + HOUR)),
    ]  # fmt: skip
    assert read_ends(bobs)[2] == NOW
    assert renewal.renew_many([bobs.pk], [], now=now) == {bobs.pk: Renewal(found=False)}
    assert renewal.renew_many([bobs.pk], None, now=now) == {bobs.pk: Renewal(now + HOUR)}


def test_a_batch_after_a_later_renewal_reports_the_later_end(grant) -> None:
    lease = grant(ttl=HOUR)
    leasing.renew(lease, now=NOW + 10 * MINUTE)
    assert renewal.renew_many([lease.pk], None, now=NOW + MINUTE) == {lease.pk: Renewal(NOW + 70 * MINUTE)}


@pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite has no heap-only updates")
def test_renewals_within_a_minute_write_no_index(grant) -> None:
    """Nor does the lease's activity: no index has a column that changes with every call."""
    lease, now = grant(ttl=HOUR), NOW.replace(second=0)
    leasing.renew(lease, now=now)
    before = count_updates()
    for second in range(1, 6):
        leasing.renew(lease, now=now + second * MINUTE / 60)
    assert [after - earlier for after, earlier in zip(count_updates(), before, strict=True)] == [5, 5]


def count_updates() -> list[int]:
    """Updates of leases in this transaction, and those among them that stayed in their page."""
    query = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_xact_user_tables WHERE relname = 'leases_lease'"
    return list(sql.fetch_all(query)[0])

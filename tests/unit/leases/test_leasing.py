"""Lifecycle of a lease: uniqueness, clocks, renewal, end reasons, and refusal of operations after the end."""

from datetime import datetime, timedelta

import pytest
from django.db import IntegrityError, transaction

from leases import conditions, execution, leasing, sweeps
from leases.errors import Conflict, InvalidRequest, LeaseEnded
from leases.models import EnvironmentType, Lease, LeaseEvent
from sandboxes import destruction, eviction
from sandboxes.models import Pool, Sandbox
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider
from sandboxes.runs.operations import Command
from tests.conftest import MINUTE, NOW
from tests.support.leases import run

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("hand-written SQL")]
HOUR = 60 * MINUTE


def test_acquire_twice_is_the_same_lease(grant) -> None:
    first = grant()
    request = leasing.LeaseRequest(first.agent_did, first.environment_id, "catan", pool=first.pool.name)
    again, is_new = leasing.acquire(request, now=NOW + MINUTE)
    assert (again.pk, is_new) == (first.pk, False)
    with pytest.raises(Conflict):
        grant(environment_type="rpg")


@pytest.mark.parametrize(
    ("of_type", "requested", "chosen"), [(None, "", "default"), ("b", "", "b"), ("b", "a", "a"), (None, "a", "a")]
)
def test_a_lease_goes_to_the_requested_pool_else_to_that_of_its_type(grant, of_type, requested, chosen) -> None:
    pools = {name: Pool.objects.create(name=name) for name in ("a", "b")}
    EnvironmentType.objects.filter(name="catan").update(pool=pools.get(of_type))
    assert grant(pool=requested).pool.name == chosen


def test_a_new_incarnation_is_a_new_row_and_the_old_one_stays(grant) -> None:
    first = grant()
    leasing.release(first.pk, now=NOW + MINUTE)
    second = grant(now=NOW + 2 * MINUTE)
    assert second.pk != first.pk
    first.refresh_from_db()
    assert (first.status, first.end_reason, first.ended_at) == ("expired", "released", NOW + MINUTE)


def test_an_elapsed_lease_can_be_acquired_again_before_a_sweep(grant) -> None:
    first = grant(ttl=MINUTE)
    second = grant(now=NOW + 2 * MINUTE)
    first.refresh_from_db()
    assert (first.end_reason, second.pk != first.pk) == ("ttl", True)


def test_unknown_type_is_refused_and_names_the_known_ones(grant) -> None:
    with pytest.raises(InvalidRequest, match="catan"):
        grant(environment_type="chess")
    assert not Lease.objects.exists()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_ttl": 25 * HOUR}, "max_ttl_seconds"),
        ({"ttl": 2 * HOUR, "max_ttl": HOUR}, "ttl_seconds"),
        ({"pool": "no"}, "pool"),
    ],
    ids=["max_ttl", "ttl", "pool"],
)
def test_a_refused_grant_names_the_invalid_field(grant, fields, field) -> None:
    with pytest.raises(InvalidRequest) as refused:
        grant(**fields)
    assert refused.value.extra == {"field": field}


@pytest.mark.parametrize(
    ("renewed", "ttl", "latest", "ends"),
    [
        (NOW, HOUR, NOW + 24 * HOUR, NOW + HOUR),
        (NOW + 23.5 * HOUR, HOUR, NOW + 24 * HOUR, NOW + 24 * HOUR),
        (NOW, 24 * HOUR, NOW + 24 * HOUR, NOW + 24 * HOUR),
    ],
    ids=["ttl first", "max_ttl first", "both"],
)
def test_a_lease_ends_at_the_earliest_of_its_clocks(renewed, ttl, latest, ends) -> None:
    assert leasing.compute_expires_at(renewed_at=renewed, ttl=ttl, max_expires_at=latest) == ends


def test_renewing_extends_the_end_at_most_to_max_expires_at(grant) -> None:
    lease = grant(ttl=HOUR, max_ttl=2 * HOUR)
    assert leasing.renew(lease, now=NOW + 30 * MINUTE) == NOW + 90 * MINUTE
    assert leasing.renew(lease, now=NOW + 80 * MINUTE) == NOW + 2 * HOUR


def test_a_late_renewal_cannot_shorten_a_newer_one(grant) -> None:
    lease = grant(ttl=HOUR)
    newer = leasing.renew(lease, now=NOW + 10 * MINUTE)
    assert leasing.renew(lease, now=NOW + 5 * MINUTE) == newer
    lease.refresh_from_db()
    assert lease.expires_at == newer


def test_renew_after_expiry_is_refused_even_before_a_sweep(grant) -> None:
    lease = grant(ttl=MINUTE)
    with pytest.raises(LeaseEnded) as refused:
        leasing.renew(lease, now=NOW + MINUTE)
    assert refused.value.extra["end_reason"] == "ttl"


@pytest.mark.parametrize(
    "wrong",
    [{"expires_at": NOW + 25 * HOUR}, {"status": "bogus"}, {"status": "expired", "ended_at": NOW, "end_reason": "bogus"}],
    ids=str,
)
def test_schema_rejects_inconsistent_rows(lease, wrong: dict[str, object]) -> None:
    with pytest.raises(IntegrityError), transaction.atomic():
        Lease.objects.filter(pk=lease.pk).update(**wrong)


def test_release_is_idempotent(lease) -> None:
    first = leasing.release(lease.pk, now=NOW + MINUTE)
    again = leasing.release(lease.pk, now=NOW + 2 * MINUTE)
    assert (first.ended_at, first.end_reason) == (again.ended_at, again.end_reason) == (NOW + MINUTE, "released")
    assert lease.events.filter(kind="ended").count() == 1


def test_a_condition_ends_every_lease_that_lists_it_and_belongs_to_one_of_the_agents(grant) -> None:
    listed, another = grant(agent="did:plc:a"), grant(agent="did:plc:b")
    elsewhere, other = grant(agent="did:plc:c", environment="game-2"), grant(agent="did:plc:d", expiry_conditions=[])
    elapsed = grant(agent="did:plc:e", ttl=MINUTE)
    for agents, ended in ((["did:plc:a"], [listed]), (None, [another]), (None, [])):
        assert conditions.post_condition("game-1", "game.finished", now=NOW + MINUTE, agents=agents) == ended
    assert set(Lease.objects.filter(status="active")) == {elsewhere, other, elapsed}
    listed.refresh_from_db()
    assert listed.end_reason == "condition:game.finished"


def test_expire_due_leases_ends_elapsed_leases_with_their_reason(grant) -> None:
    short = grant(agent="did:plc:a", ttl=MINUTE)
    capped = grant(agent="did:plc:b", max_ttl=MINUTE)
    grant(agent="did:plc:c")
    assert sweeps.expire_due_leases(now=NOW + MINUTE).counts == {"expired": 2}
    assert {lease.pk: lease.end_reason for lease in Lease.objects.exclude(status="active")} == {
        short.pk: "ttl", capped.pk: "max_ttl",
    }  # fmt: skip


def test_a_lease_is_destroyed_only_when_its_sandbox_is_confirmed_gone(lease, memory: MemoryProvider) -> None:
    run(lease)
    leasing.release(lease.pk, now=NOW + MINUTE)
    with memory.fail("destroy", Unavailable("the daemon is away"), times=1):
        failed = sweeps.reclaim(now=NOW + MINUTE)
    lease.refresh_from_db()
    assert (len(failed.failures), lease.status) == (1, "expired")
    sweeps.reclaim(now=NOW + 2 * MINUTE)
    lease.refresh_from_db()
    assert (lease.status, lease.destroyed_at) == ("destroyed", NOW + 2 * MINUTE)
    assert memory.list(str(lease.pool.owner)) == []


def test_a_failed_destroy_is_retried_with_backoff_and_then_quarantined(grant, memory: MemoryProvider, settings) -> None:
    settings.DESTROY_TRIES = 3
    lease = grant()
    run(lease)
    leasing.release(lease.pk, now=NOW + 5 * timedelta(seconds=1))
    moment, attempts = NOW + timedelta(seconds=5), 0
    with memory.fail("destroy", Unavailable("no"), times=99):
        for _ in range(200):
            attempts += len(sweeps.reclaim(now=moment).failures)
            moment += timedelta(seconds=1)
    sandbox = Sandbox.objects.get()
    assert (attempts, sandbox.tries, sandbox.state) == (3, 3, "destroying")
    assert sandbox.quarantined_at and "no" in sandbox.last_error
    assert Pool.objects.get(pk=lease.pool_id).used == 1  # an unconfirmed destroy still counts against capacity
    assert destruction.retry_destroy(sandbox.pk, now=moment)
    assert sweeps.reclaim(now=moment).counts == {"destroyed": 1, "leases closed": 1}
    assert Pool.objects.get(pk=lease.pool_id).used == 0


def test_an_exec_renews_the_lease(grant) -> None:
    lease = grant(ttl=HOUR)
    run(lease, now=NOW + 30 * MINUTE)
    lease.refresh_from_db()
    assert lease.expires_at >= NOW + 90 * MINUTE
    assert lease.last_activity_at >= NOW + 30 * MINUTE


def test_an_ended_lease_cannot_use_its_sandbox(lease, memory: MemoryProvider) -> None:
    leasing.release(lease.pk, now=NOW)
    with pytest.raises(LeaseEnded) as refused:
        run(lease)
    assert refused.value.extra["end_reason"] == "released"
    assert not Sandbox.objects.exists() and not memory.calls


def test_a_lost_sandbox_ends_its_lease_as_lost(lease, memory: MemoryProvider) -> None:
    run(lease)
    memory.vanish(Sandbox.objects.get().ref)
    with pytest.raises(LeaseEnded) as refused:
        run(lease, now=NOW + MINUTE)
    lease.refresh_from_db()
    assert (refused.value.extra["end_reason"], lease.end_reason) == ("lost", "lost")
    sandbox = Sandbox.objects.get()
    assert sandbox.lost_at and sandbox.last_error.startswith("Lost: ")


def test_a_workspace_over_its_limit_is_warned_about_once_a_day(grant, pool: Pool) -> None:
    Pool.objects.filter(pk=pool.pk).update(workspace_limit_mib=1)
    full, emptied, ended, slept, small = (grant(environment=f"game-{n}") for n in range(5))
    for lease in (full, emptied, ended, slept, small):
        script = "true" if lease == small else "head -c 3000000 /dev/zero >big"
        run(lease, "sh", "-c", script)
    assert eviction.evict(Sandbox.objects.get(holder=slept.pk).pk, now=NOW, reason="test")  # measures, too
    leasing.release(ended.pk, now=NOW)

    def list_warned(now: datetime) -> list[str]:
        sweeps.measure_workspaces(now=now)
        warnings = LeaseEvent.objects.filter(kind=sweeps.WORKSPACE_OVER_LIMIT_EVENT, at=now)
        assert {(event.actor, event.reason) for event in warnings} <= {("sweep", "/workspace uses 2 MiB of 1 MiB.")}
        return sorted(warnings.values_list("lease__environment_id", flat=True))

    assert list_warned(NOW + MINUTE) == ["game-0", "game-1", "game-3"]
    remove = Command(argv=["delete", "big"], timeout=MINUTE, kind="file")
    execution.call_in_sandbox(emptied.pk, remove, lambda p, s: p.remove_file(s.ref, "/workspace/big"), now=NOW + MINUTE)
    run(emptied, now=NOW + MINUTE)
    assert list_warned(NOW + 23 * HOUR) == []
    assert list_warned(NOW + 25 * HOUR + MINUTE) == ["game-0", "game-3"]

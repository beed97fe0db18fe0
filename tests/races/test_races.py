"""Races by construction: a rival runs in the middle of a step, or threads start together."""

from datetime import timedelta

import pytest
from django.db import transaction

from leases import acting, leasing, sweeps
from leases.errors import LeaseEnded
from leases.models import Lease
from sandboxes.errors import CapacityExhausted
from sandboxes.models import Pool, Run, Sandbox
from sandboxes.providers.memory import MemoryProvider
from sandboxes.runs import Command
from tests.conftest import MINUTE, NOW, threads

pytestmark = pytest.mark.django_db(transaction=True)


def true() -> Command:
    return Command(argv=["true"], timeout=MINUTE)


def test_sixteen_acquires_at_once_grant_one_lease(pool: Pool) -> None:
    ask = leasing.Ask("did:plc:ada", "game-1", "catan", pool=pool.name)
    with threads(16) as run:
        answers = run(lambda i: leasing.acquire(ask, now=NOW))
    assert len({lease.pk for lease, _ in answers}) == 1
    assert [is_new for _, is_new in answers].count(True) == 1


def test_sixteen_acquires_of_an_elapsed_lease_grant_one_new_lease(pool: Pool, grant) -> None:
    old = grant(ttl=MINUTE)
    ask = leasing.Ask("did:plc:ada", "game-1", "catan", pool=pool.name)
    with threads(16) as run:
        answers = run(lambda i: leasing.acquire(ask, now=NOW + 5 * MINUTE))
    assert len({lease.pk for lease, _ in answers} - {old.pk}) == 1
    assert old.events.filter(kind="ended").count() == 1


def test_eight_first_execs_at_once_start_one_sandbox(grant, memory: MemoryProvider) -> None:
    lease: Lease = grant()
    with threads(8) as run:
        answers = run(lambda i: acting.exec_in(lease.pk, true(), now=NOW)[1].exit_code)
    assert answers == [0] * 8
    assert Sandbox.objects.count() == 1 and memory.calls.count(("create", Sandbox.objects.get().ref)) == 1
    sandbox = Sandbox.objects.get()
    assert (sandbox.state, sandbox.open_runs, Run.objects.count()) == ("waiting", 0, 8)


def test_thirty_two_starts_at_a_capacity_of_ten_take_ten_places(pool: Pool, grant, memory: MemoryProvider) -> None:
    Pool.objects.filter(pk=pool.pk).update(capacity=10)
    leases = [grant(agent=f"did:plc:a{i}") for i in range(32)]
    with threads(32) as run:
        answers = run(lambda i: acting.exec_in(leases[i].pk, true(), now=NOW)[1].exit_code)
    assert answers.count(0) == 10
    assert sum(isinstance(answer, CapacityExhausted) for answer in answers) == 22
    assert len(memory.list(str(pool.owner))) == Pool.objects.get(pk=pool.pk).used == 10


def test_a_release_between_the_check_and_the_place_starts_nothing(grant, memory: MemoryProvider) -> None:
    lease: Lease = grant()
    want = acting.want_for(lease, now=NOW)
    leasing.release(lease.pk, now=NOW)
    with pytest.raises(LeaseEnded), transaction.atomic():
        want.fence()
    assert memory.calls == []


def test_a_release_while_the_sandbox_starts_wins(grant, pool: Pool, memory: MemoryProvider, at_step) -> None:
    lease: Lease = grant()
    at_step("created", lambda: leasing.release(lease.pk, now=NOW))
    with pytest.raises(LeaseEnded):
        acting.exec_in(lease.pk, true(), now=NOW)
    assert sweeps.reclaim(now=NOW).counts == {"destroyed": 1, "leases closed": 1}
    assert memory.list(str(pool.owner)) == []


def test_a_release_during_a_run_ends_it_and_the_late_answer_is_refused(grant, at_step) -> None:
    lease: Lease = grant()
    at_step("run opened", lambda: leasing.release(lease.pk, now=NOW))
    with pytest.raises(LeaseEnded):
        acting.exec_in(lease.pk, true(), now=NOW)
    run = Run.objects.get()
    assert (run.outcome, Sandbox.objects.get().state) == ("lost", "destroying")


def test_a_renewal_between_look_and_act_keeps_the_lease(grant, monkeypatch) -> None:
    lease: Lease = grant(ttl=MINUTE)
    monkeypatch.setattr(leasing, "why_elapsed", _renewing_first(lease, leasing.why_elapsed))
    assert sweeps.expire_due(now=NOW + MINUTE).counts == {"lost race": 1}
    lease.refresh_from_db()
    assert lease.status == "active"


def _renewing_first(lease: Lease, why_elapsed):  # type: ignore[no-untyped-def]
    def rival(seen: Lease, now):  # type: ignore[no-untyped-def]
        reason = why_elapsed(seen, now)
        leasing.renew(lease, now=now - timedelta(seconds=1))
        return reason

    return rival


def test_two_sweeps_at_once_destroy_each_sandbox_once(grant, pool: Pool) -> None:
    for i in range(8):
        lease = grant(agent=f"did:plc:a{i}")
        acting.exec_in(lease.pk, true(), now=NOW)
        leasing.release(lease.pk, now=NOW)
    with threads(4) as run:
        answers = run(lambda i: sweeps.reclaim(now=NOW).counts.get("destroyed", 0))
    assert sum(answers) == 8
    assert Pool.objects.get(pk=pool.pk).used == 0

"""A pool's capacity on the real engine: it holds at every moment, and what is left agrees with the rows."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from leases import execution, leasing, sweeps
from leases.models import Lease
from sandboxes import providers, reconciliation
from sandboxes import sweeps as below
from sandboxes.errors import CapacityExhausted
from sandboxes.lifecycle import CHECKPOINT_HOOKS
from sandboxes.models import Pool, Run, Sandbox
from sandboxes.providers.base import ProviderSandbox
from sandboxes.runs import Command
from tests.conftest import MINUTE, NOW, run_in_threads
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.django_db(transaction=True)]
CAPACITY, AGENTS = 20, 64


class Place:
    """A pool of CAPACITY on the engine, a lease for each of AGENTS, and how many containers each create has found."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.counts: list[int] = []
        self.leases = [self._lease(f"did:plc:a{i}") for i in range(AGENTS)]

    def _lease(self, did: str) -> Lease:
        return leasing.acquire(leasing.LeaseRequest(did, "race", "coding", pool=self.pool.name), now=NOW)[0]

    def listed(self) -> list[ProviderSandbox]:
        return providers.get_provider("docker").list(str(self.pool.owner))

    def watch(self, reached: str, subject: Any) -> None:
        if reached == "created":
            self.counts.append(len(self.listed()))

    def run(self, act: Callable[[int], Any]) -> list[Any]:
        with run_in_threads(AGENTS) as together:
            return together(act)

    def exec(self, i: int, *argv: str) -> int:
        return execution.exec_command(self.leases[i].pk, Command(argv=argv, timeout=5 * MINUTE), now=NOW)[1].exit_code

    def names(self) -> set[str]:
        """What the rows say should be there."""
        return {one.name for one in Sandbox.objects.filter(pool=self.pool).exclude(state__in=("cold", "destroyed"))}

    def check(self) -> None:
        """Never one too many; rows, counter and engine agree; and after the releases nothing is left."""
        assert max(self.counts) <= CAPACITY
        assert self.names() == {found.name for found in self.listed()}
        assert Sandbox.objects.filter(pool=self.pool).exclude(state="destroyed").count() == self._used() <= CAPACITY
        swept = reconciliation.reconcile(now=NOW + timedelta(days=3650), grace=MINUTE)  # whatever the engine's clock says
        assert set(swept.counts) <= {"kept"}
        assert swept.failures == []
        assert below.recount(now=NOW).failures == []
        for lease in self.leases:
            leasing.release(lease.pk, now=NOW)
        while sweeps.reclaim(now=NOW).counts.get("destroyed"):
            pass
        assert (self.listed(), self._used(), Sandbox.objects.exclude(state="destroyed").count()) == ([], 0, 0)

    def _used(self) -> int:
        return Pool.objects.get(pk=self.pool.pk).used


@pytest.fixture
def place(docker_pool: Pool) -> Iterator[Place]:
    Pool.objects.filter(pk=docker_pool.pk).update(capacity=CAPACITY)
    place = Place(docker_pool)
    CHECKPOINT_HOOKS.append(place.watch)
    yield place
    CHECKPOINT_HOOKS.remove(place.watch)


def test_sixty_four_first_execs_at_a_capacity_of_twenty(place: Place) -> None:
    answers = place.run(lambda i: place.exec(i, "true"))
    assert [a for a in answers if a != 0 and not isinstance(a, CapacityExhausted)] == []
    served = {lease.pk for lease, answer in zip(place.leases, answers, strict=True) if answer == 0}
    assert set(Run.objects.filter(outcome="ok").values_list("holder", flat=True)) == served
    there = Sandbox.objects.filter(pool=place.pool)
    assert set(there.exclude(state="destroyed").values_list("holder", flat=True)) <= served  # some were evicted since
    print(f"{len(served)} of {AGENTS} served, {len(place.counts)} containers made, at most {max(place.counts)} at once")
    place.check()


def test_twenty_that_run_are_twenty_and_the_others_are_refused(place: Place) -> None:
    refused: list[CapacityExhausted] = []
    answers: list[Any] = []

    def act(i: int) -> int:
        try:
            return place.exec(i, "sh", "-c", "until [ -e go ]; do sleep 0.1; done")
        except CapacityExhausted as full:
            refused.append(full)
            raise

    crowd = threading.Thread(target=lambda: answers.extend(place.run(act)))
    crowd.start()
    try:
        running = Sandbox.objects.filter(pool=place.pool, state="running")
        wait_until(lambda: running.count() == CAPACITY, f"{CAPACITY} run", within=300)
        wait_until(lambda: len(refused) == AGENTS - CAPACITY, "all others are refused", within=300)
        assert {found.name for found in place.listed() if found.running} == place.names()
        assert len(place.names()) == CAPACITY
    finally:
        for name in place.names():
            providers.get_provider("docker").write_file(name, "/workspace/go", b"")
        crowd.join(300)
    assert answers.count(0) == CAPACITY
    place.check()

"""Capacity of a pool on a Docker Engine: never exceeded, and rows, counter and engine agree afterwards."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from leases import execution, leasing, sweeps
from leases.models import Lease
from sandboxes import providers
from sandboxes.errors import CapacityExhausted
from sandboxes.lifecycle import CHECKPOINT_HOOKS
from sandboxes.models import Pool, Run, Sandbox
from sandboxes.providers.base import ProviderSandbox
from sandboxes.runs.operations import Command
from sandboxes.sweeps import passes, reconciliation
from tests.conftest import MINUTE, NOW, run_in_threads
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.docker,
    pytest.mark.django_db(transaction=True),
    pytest.mark.matrix("test_races.py has the capacity on the memory provider"),
]
CAPACITY, AGENTS = 10, 32


class CapacityScenario:
    """A pool of CAPACITY on the engine, a lease for each of AGENTS, and the number of containers after each create."""

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
        with run_in_threads(AGENTS) as run:
            return run(act)

    def exec(self, i: int, *argv: str) -> int:
        return execution.exec_command(self.leases[i].pk, Command(argv=argv, timeout=5 * MINUTE), now=NOW)[1].exit_code

    def names(self) -> set[str]:
        """Names of the sandboxes that exist according to the rows."""
        return {each.name for each in Sandbox.objects.filter(pool=self.pool).exclude(state__in=("cold", "destroyed"))}

    def check(self) -> None:
        """Check that the capacity was never exceeded, that rows, counter and engine agree, and that releases leave nothing."""
        assert max(self.counts) <= CAPACITY
        assert self.names() == {each.name for each in self.listed()}
        assert Sandbox.objects.filter(pool=self.pool).exclude(state="destroyed").count() == self._used() <= CAPACITY
        result = reconciliation.reconcile(now=NOW + timedelta(days=3650), grace=MINUTE)  # later than the engine's clock
        assert set(result.counts) <= {"kept"}
        assert result.failures == []
        assert passes.recount(now=NOW).failures == []
        for lease in self.leases:
            leasing.release(lease.pk, now=NOW)
        while sweeps.reclaim(now=NOW).counts.get("destroyed"):
            pass
        assert (self.listed(), self._used(), Sandbox.objects.exclude(state="destroyed").count()) == ([], 0, 0)

    def _used(self) -> int:
        return Pool.objects.get(pk=self.pool.pk).used


@pytest.fixture
def scenario(docker_pool: Pool) -> Iterator[CapacityScenario]:
    Pool.objects.filter(pk=docker_pool.pk).update(capacity=CAPACITY)
    scenario = CapacityScenario(docker_pool)
    CHECKPOINT_HOOKS.append(scenario.watch)
    yield scenario
    CHECKPOINT_HOOKS.remove(scenario.watch)


def test_concurrent_first_execs_of_more_agents_than_places_never_exceed_the_capacity(scenario: CapacityScenario) -> None:
    results = scenario.run(lambda i: scenario.exec(i, "true"))
    assert [result for result in results if result != 0 and not isinstance(result, CapacityExhausted)] == []
    served = {lease.pk for lease, result_code in zip(scenario.leases, results, strict=True) if result_code == 0}
    assert set(Run.objects.filter(outcome="ok").values_list("holder", flat=True)) == served
    sandboxes = Sandbox.objects.filter(pool=scenario.pool)
    assert set(sandboxes.exclude(state="destroyed").values_list("holder", flat=True)) <= served  # others were evicted
    print(f"{len(served)} of {AGENTS} served, {len(scenario.counts)} containers made, at most {max(scenario.counts)} at once")
    scenario.check()


def test_running_sandboxes_fill_the_pool_and_other_execs_are_refused(scenario: CapacityScenario) -> None:
    refused: list[CapacityExhausted] = []
    results: list[Any] = []

    def act(i: int) -> int:
        try:
            return scenario.exec(i, "sh", "-c", "until [ -e go ]; do sleep 0.1; done")
        except CapacityExhausted as error:
            refused.append(error)
            raise

    runs = threading.Thread(target=lambda: results.extend(scenario.run(act)))
    runs.start()
    try:
        running = Sandbox.objects.filter(pool=scenario.pool, state="running")
        wait_until(lambda: running.count() == CAPACITY, f"{CAPACITY} run", within=300)
        wait_until(lambda: len(refused) == AGENTS - CAPACITY, "all others are refused", within=300)
        assert {each.name for each in scenario.listed() if each.running} == scenario.names()
        assert len(scenario.names()) == CAPACITY
    finally:
        for name in scenario.names():
            providers.get_provider("docker").write_file(name, "/workspace/go", b"")
        runs.join(300)
    assert results.count(0) == CAPACITY
    scenario.check()

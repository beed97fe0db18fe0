"""Passes of a sweep that run at the same time: the sandboxes of one agent do not take all of them.

A concurrent pass is a call within a hook of the provider, at which the first pass waits."""

from collections.abc import Callable
from datetime import timedelta

import pytest

from leases import leasing
from leases.models import Lease
from sandboxes import agent_shares
from sandboxes.models import Sandbox
from sandboxes.providers.memory import MemoryProvider
from sandboxes.queue_threads import MAX_THREADS_PER_NAME
from sandboxes.sweep_log import SweepResult
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW
from tests.support.leases import write

pytestmark = pytest.mark.django_db
HOUR = timedelta(hours=1)
SLOW_AGENT, OTHER_AGENT = "did:plc:slow", "did:plc:other"


def test_an_agent_has_at_most_half_of_the_passes() -> None:
    assert 2 * agent_shares.MAX_PASSES_PER_AGENT <= MAX_THREADS_PER_NAME


@pytest.fixture
def lease_all(grant: Callable[..., Lease]) -> Callable[[], list[Lease]]:
    """Return a function that grants six leases of one agent and then one of another, with state to store."""

    def grant_all() -> list[Lease]:
        leases = [grant(SLOW_AGENT, f"game-{n}", max_ttl=24 * HOUR, ttl=24 * HOUR) for n in range(6)]
        leases.append(grant(OTHER_AGENT, "game", max_ttl=24 * HOUR, ttl=24 * HOUR))
        for lease in leases:
            write(lease)
        return leases

    return grant_all


def run_passes(memory: MemoryProvider, verb: str, sweep: Callable[[], SweepResult], *, count: int) -> list[dict[str, int]]:
    """Run passes that begin while earlier ones call for a sandbox of SLOW_AGENT. Return their counts, last first."""
    counts: list[dict[str, int]] = []
    begun = [0]

    def run_next(ref: str) -> None:
        if Sandbox.objects.get(ref=ref).agent_did == SLOW_AGENT and begun[0] < count:
            run()

    def run() -> None:
        begun[0] += 1
        counts.append(sweep().counts)

    with memory.before(verb, run_next):
        run()
    return counts


def test_a_pass_beyond_the_share_of_an_agent_destroys_the_sandboxes_of_others(lease_all, memory: MemoryProvider) -> None:
    for n, lease in enumerate(lease_all()):
        leasing.release(lease.pk, now=NOW + n * MINUTE)
    last, *_ = run_passes(memory, "destroy", lambda: passes.destroy_due(now=NOW + HOUR), count=3)
    assert last == {"left for others of the agent": 6 - agent_shares.MAX_PASSES_PER_AGENT, "destroyed": 1}
    assert not Sandbox.objects.exclude(state="destroyed").exists()


def test_a_pass_looks_again_for_what_another_has_left_to_it(grant: Callable[..., Lease], memory: MemoryProvider) -> None:
    """The sandboxes that become due during its call to the engine are in no list of a pass that goes on."""
    leases = [grant(SLOW_AGENT, f"game-{n}") for n in range(2 + agent_shares.MAX_PASSES_PER_AGENT)]
    for lease in leases:
        write(lease)
    first, *others = [lease.pk for lease in leases]
    leasing.release(first, now=NOW)
    counts: list[dict[str, int]] = []

    def release_others(ref: str) -> None:
        if others:
            leasing.release(others.pop(), now=NOW)
            counts.append(passes.destroy_due(now=NOW).counts)

    with memory.before("destroy", release_others):
        counts.append(passes.destroy_due(now=NOW).counts)
    assert {"left for others of the agent": 1} in counts
    assert not Sandbox.objects.exclude(state="destroyed").exists()


def test_agents_take_turns_within_the_limit_of_a_pass(lease_all, memory: MemoryProvider) -> None:
    for n, lease in enumerate(lease_all()):
        leasing.release(lease.pk, now=NOW + n * MINUTE)
    passes.destroy_due(now=NOW + HOUR, limit=2)
    destroyed = Sandbox.objects.filter(state="destroyed")
    assert sorted(destroyed.values_list("agent_did", flat=True)) == [OTHER_AGENT, SLOW_AGENT]


def test_a_pass_beyond_the_share_of_an_agent_evicts_the_sandboxes_of_others(lease_all, memory: MemoryProvider) -> None:
    for n, lease in enumerate(lease_all()):
        Sandbox.objects.filter(holder=lease.pk).update(idle_at=NOW + n * MINUTE)
    sweep = lambda: passes.evict_idle(now=NOW + HOUR, batch_size=1)  # noqa: E731
    last, *_ = run_passes(memory, "destroy", sweep, count=3)
    assert last == {"put to sleep": 1}
    assert not Sandbox.objects.exclude(state="cold").exists()

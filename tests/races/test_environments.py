"""Environments: concurrent first leases, and conditions that end the last leases at once."""

from collections.abc import Callable
from datetime import timedelta

import pytest

from leases import conditions
from leases.environments import lifecycle
from leases.environments.models import Environment
from leases.errors import EnvironmentEnded
from leases.models import Lease
from tests.conftest import NOW, run_in_threads

pytestmark = pytest.mark.django_db(transaction=True)
THREADS = 4


def test_concurrent_first_leases_write_one_environment(grant: Callable[..., Lease]) -> None:
    with run_in_threads(THREADS) as run:
        leases = run(lambda index: grant(f"did:plc:a{index}"))
    assert {lease.environment_id for lease in leases} == {"game-1"}
    assert Environment.objects.get().status == "open"


def test_conditions_that_end_the_last_leases_at_once_end_the_environment(grant: Callable[..., Lease]) -> None:
    for index in range(THREADS):
        grant(f"did:plc:a{index}", expiry_conditions=["agent.death"])
    with run_in_threads(THREADS) as run:
        ended = run(lambda index: conditions.post_condition("game-1", "agent.death", now=NOW, agents=[f"did:plc:a{index}"]))
    assert [len(leases) for leases in ended] == [1] * THREADS
    assert Environment.objects.get().end_reason == "condition:agent.death"


def test_leases_granted_while_the_environment_ends_end_with_it(grant: Callable[..., Lease]) -> None:
    grant("did:plc:first")

    def act(index: int) -> object:
        later = NOW + timedelta(seconds=1)
        return lifecycle.end("game-1", now=later) if index % 2 else grant(f"did:plc:a{index}", now=later)

    with run_in_threads(THREADS) as run:
        results = run(act)
    assert not [result for result in results if isinstance(result, Exception) and not isinstance(result, EnvironmentEnded)]
    assert not Lease.objects.filter(status="active").exists()

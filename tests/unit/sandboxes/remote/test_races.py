"""Races of requests on remote sandboxes: threads start at a barrier, or a rival acts at a checkpoint."""

from collections.abc import Callable

import pytest

from leases import leasing
from leases.errors import LeaseEnded
from leases.models import Lease
from sandboxes import eviction
from sandboxes.models import Sandbox
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW, run_in_threads
from tests.support.leases import get_sandbox, read, run, update_pool, write
from tests.unit.sandboxes.remote.conftest import Account

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.parametrize("vendor", ["daytona", "runloop"])]
AtCheckpoint = Callable[..., None]
COUNT = "echo line >>/data/lines; wc -l </data/lines"


def test_concurrent_first_commands_start_one_sandbox_and_run_once_each(account: Account, grant: Callable[..., Lease]) -> None:
    lease = grant()
    with run_in_threads(4) as together:
        results = together(lambda number: run(lease, "sh", "-c", COUNT).exit_code)
    assert results == [0] * 4
    assert run(lease, "sh", "-c", COUNT).stdout == b"5\n"
    assert Sandbox.objects.filter(pool=account.pool).count() == 1
    account.assert_converged()


def test_concurrent_starts_never_exceed_the_capacity(account: Account, grant: Callable[..., Lease]) -> None:
    update_pool(account.pool, capacity=2)
    leases = [grant(f"did:plc:agent-{number}") for number in range(4)]
    with run_in_threads(4) as together:
        together(lambda number: run(leases[number]))
        assert len(account.find_existing()) <= 2
    account.sweep(NOW + 60 * MINUTE)
    account.assert_converged()


def test_command_and_eviction_at_once_lose_nothing(account: Account, grant: Callable[..., Lease]) -> None:
    lease = grant()
    write(lease)
    sandbox = get_sandbox(lease)
    with run_in_threads(3) as together:
        results = together(lambda number: read(lease) if number else eviction.evict(sandbox.pk, now=NOW, reason="test"))
    assert results[1:] == ["kept", "kept"]
    assert results[0] in (True, False)
    assert read(lease) == "kept"
    account.assert_converged()


def test_release_during_a_start_leaves_no_sandbox(
    account: Account, grant: Callable[..., Lease], at_checkpoint: AtCheckpoint
) -> None:
    lease = grant()
    at_checkpoint("created", lambda: leasing.release(lease.pk, now=NOW))
    with pytest.raises(LeaseEnded):
        run(lease)
    account.sweep(NOW + 60 * MINUTE)
    account.assert_converged()
    assert account.find_existing() == set()


def test_concurrent_sweeps_destroy_each_sandbox_once(account: Account, grant: Callable[..., Lease]) -> None:
    leases = [grant(f"did:plc:agent-{number}") for number in range(2)]
    for lease in leases:
        write(lease)
        leasing.release(lease.pk, now=NOW)
    with run_in_threads(3) as together:
        results = together(lambda number: passes.destroy_due(now=NOW + MINUTE))
    assert [result for result in results if isinstance(result, Exception)] == []
    account.sweep(NOW + 60 * MINUTE)
    account.assert_converged()
    assert account.find_existing() == set()

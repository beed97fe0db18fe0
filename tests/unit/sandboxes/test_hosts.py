"""Several hosts with one database: each engine's sandboxes are touched only by processes that reach this engine."""

from datetime import timedelta
from typing import Any

import pytest

from leases import leasing
from leases import sweeps as lease_sweeps
from leases.models import Lease, LeaseStatus
from sandboxes.errors import WrongHost
from sandboxes.models import Sandbox, SandboxState
from sandboxes.providers.memory import MemoryProvider
from tests.conftest import MINUTE, NOW
from tests.support.leases import get_sandbox, read, run, write

pytestmark = pytest.mark.django_db
A, B = "engine-a", "engine-b"
LATER = NOW + timedelta(minutes=10)


@pytest.fixture
def lease(grant: Any, memory: MemoryProvider) -> Lease:
    """Lease whose sandbox runs on the engine A, with a file that is stored nowhere."""
    with memory.on_engine(A):
        lease = grant()
        write(lease, "kept")
    return lease


def sweep_all(now: Any = LATER) -> None:
    """Run the sweeps that call providers."""
    for sweep in (lease_sweeps.recover_stalled, lease_sweeps.reclaim, lease_sweeps.destroy_cold):
        sweep(now=now)
    lease_sweeps.reconcile(now=now, grace=MINUTE)


def test_another_hosts_request_and_sweeps_do_not_end_a_lease(lease: Lease, memory: MemoryProvider) -> None:
    with memory.on_engine(B):
        with pytest.raises(WrongHost):
            run(lease)
        sweep_all()
    lease.refresh_from_db()
    assert lease.status == LeaseStatus.ACTIVE
    with memory.on_engine(A):
        assert read(lease) == "kept"


def test_another_host_does_not_confirm_a_destroy_and_the_slot_stays_taken(lease: Lease, memory: MemoryProvider) -> None:
    sandbox = get_sandbox(lease)
    with memory.on_engine(B):
        leasing.release(lease.pk, now=NOW)
        sweep_all()
    sandbox.refresh_from_db()
    assert (sandbox.state, sandbox.slot is None) == (SandboxState.DESTROYING, False)
    with memory.on_engine(A):
        lease_sweeps.reclaim(now=LATER)
        assert memory.list(str(sandbox.pool.owner)) == []
    assert Sandbox.objects.get(pk=sandbox.pk).state == SandboxState.DESTROYED

"""Failures and crashes around a stored state. A change that a run has acknowledged survives every one of them."""

from datetime import timedelta

import pytest

from leases import execution
from leases import sweeps as lease_sweeps
from sandboxes import eviction, sweeps
from sandboxes.models import Sandbox
from sandboxes.providers.base import Unavailable
from sandboxes.runs import Command
from sandboxes.storage.base import StoreError
from sandboxes.storage.memory import MemoryStore
from tests.conftest import MINUTE, NOW, SimulatedCrash

pytestmark = pytest.mark.django_db
HOUR = timedelta(hours=1)
DISK_FULL = StoreError("memory", "upload", "disk full")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """Store of this test. The cache of get_store is cleared before each test."""
    store = MemoryStore()
    monkeypatch.setattr("sandboxes.storage.FilesystemStore", lambda root: store)
    return store


def sh(lease, line: str, now) -> bytes:
    _, result = execution.exec_command(lease.pk, Command(argv=["sh", "-c", line], timeout=MINUTE), now=now)
    return result.stdout


def get_sandbox(lease) -> Sandbox:
    return Sandbox.objects.get(holder=lease.pk)


def test_a_failed_delete_of_an_old_snapshot_does_not_fail_the_eviction(grant, store) -> None:
    lease, now = grant(ttl=24 * HOUR), NOW
    for number in range(5):
        sh(lease, f"echo {number} >f", now)
        with store.fail("remove", StoreError("memory", "remove", "access denied")):
            assert eviction.evict(get_sandbox(lease).pk, now=now + MINUTE)
        now += 20 * MINUTE
    assert sh(lease, "cat f", now) == b"4\n"


def test_a_snapshot_counts_only_if_no_run_began_after_it(grant, store, memory) -> None:
    """The state is stored, the sandbox returns to use, and is evicted again."""
    lease = grant()
    sh(lease, "echo old >f", NOW)
    with memory.fail("destroy", Unavailable("engine"), times=1):
        assert not eviction.evict(get_sandbox(lease).pk, now=NOW + MINUTE)
    sandbox = get_sandbox(lease)
    assert (sandbox.state, sandbox.persisted) == ("evicting", True)
    Sandbox.objects.filter(pk=sandbox.pk).update(state="waiting", claim=None, deadline_at=None, tries=0)
    sh(lease, "echo new >f", NOW + 2 * MINUTE)
    assert eviction.evict(sandbox.pk, now=NOW + 3 * MINUTE)
    assert sh(lease, "cat f", NOW + HOUR) == b"new\n"


def test_a_sandbox_whose_state_is_not_stored_is_never_destroyed_as_stalled(grant, store, at_checkpoint) -> None:
    """Hours of failed stores, then the death of the worker in the next eviction."""
    lease, now = grant(ttl=24 * HOUR), NOW
    sh(lease, "echo precious >f", now)
    with store.fail("upload", DISK_FULL):
        for _ in range(9):
            now += HOUR
            assert sweeps.evict_idle(now=now).failures
    assert get_sandbox(lease).persist_failures == 9

    def die() -> None:
        raise SimulatedCrash

    at_checkpoint("eviction claimed", die)
    with pytest.raises(SimulatedCrash):
        sweeps.evict_idle(now=now + HOUR)
    lease_sweeps.recover_stalled(now=now + 2 * HOUR)
    assert sh(lease, "cat f", now + 2 * HOUR) == b"precious\n"


def test_a_run_resets_the_count_of_failed_stores(grant, store) -> None:
    lease = grant()
    sh(lease, "echo 1 >f", NOW)
    with store.fail("upload", DISK_FULL):
        sweeps.evict_idle(now=NOW + HOUR)
    assert get_sandbox(lease).persist_failures == 1
    sh(lease, "true", NOW + HOUR)
    assert get_sandbox(lease).persist_failures == 0

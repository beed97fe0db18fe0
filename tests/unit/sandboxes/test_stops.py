"""Stops of a sandbox during and between operations: its lease, its files and what its agent is told."""

from collections.abc import Callable
from datetime import datetime, timedelta

import pytest

from leases import execution
from leases.models import Lease, LeaseEvent
from sandboxes import eviction
from sandboxes.errors import ProviderCallFailed
from sandboxes.models import Run
from sandboxes.providers.base import Provider
from sandboxes.providers.errors import NoSuchFile, Stopped
from sandboxes.providers.memory import ProgramCall, ProgramResult
from sandboxes.runs.operations import Command
from tests.conftest import MINUTE, NOW
from tests.support.leases import get_sandbox, run
from tests.support.storage.tars import pack

pytestmark = pytest.mark.django_db
HOUR = timedelta(hours=1)
FILE_OPERATIONS: dict[str, Callable[[Provider, str], object]] = {
    "read_file": lambda provider, ref: provider.read_file(ref, "/workspace/f", limit=100),
    "write_file": lambda provider, ref: provider.write_file(ref, "/workspace/g", b"x"),
    "get_files": lambda provider, ref: b"".join(provider.get_files(ref, "/workspace")),
    "put_files": lambda provider, ref: provider.put_files(ref, "/workspace", pack()),
}


def sh(lease: Lease, line: str, now: datetime) -> bytes:
    return run(lease, "sh", "-c", line, now=now).stdout


def test_sandbox_that_stops_during_a_command_keeps_its_lease_and_files(grant, memory_store, memory) -> None:
    def stop(call: ProgramCall) -> ProgramResult:
        memory.stop(get_sandbox(lease).ref)
        return ProgramResult()

    lease = grant()
    sh(lease, "echo precious >f", NOW)
    memory.programs["work"] = stop
    with pytest.raises(ProviderCallFailed, match="Its files are kept"):
        run(lease, "work")
    ended, sandbox = Run.objects.get(argv=["work"]), get_sandbox(lease)
    assert (ended.outcome, ended.exit_code) == ("error", None)
    assert (sandbox.state, sandbox.lost_at, sandbox.open_runs) == ("waiting", None, 0)
    assert ("kill", sandbox.ref) not in memory.calls  # a stopped sandbox has no processes, and a kill would start it
    assert sh(lease, "cat f", NOW + MINUTE) == b"precious\n"


@pytest.mark.parametrize(("verb", "act"), FILE_OPERATIONS.items())
def test_sandbox_that_stops_during_a_file_operation_keeps_its_lease_and_files(
    grant, memory_store, memory, verb: str, act: Callable[[Provider, str], object]
) -> None:
    lease = grant()
    sh(lease, "echo precious >f", NOW)
    memory.fail(verb, Stopped("stopped during the operation"), times=1)
    command = Command(argv=[verb], timeout=MINUTE, kind="file")
    with pytest.raises(ProviderCallFailed, match="Its files are kept"):
        execution.call_in_sandbox(lease.pk, command, lambda provider, sandbox: act(provider, sandbox.ref), now=NOW)
    assert (Run.objects.get(kind="file").outcome, get_sandbox(lease).lost_at) == ("error", None)
    assert sh(lease, "cat f", NOW + MINUTE) == b"precious\n"


@pytest.mark.parametrize("method", ["get_files", "manifest"])
def test_sandbox_that_stops_while_its_state_is_stored_is_stored_later(grant, memory_store, memory, method: str) -> None:
    """By the sync of /data after a command, or by an eviction."""
    lease = grant()
    sh(lease, "echo precious >f; echo precious >/data/f", NOW)
    memory.fail(method, Stopped("stopped during the operation"), times=1)
    assert not eviction.evict(get_sandbox(lease).pk, now=NOW)
    assert (get_sandbox(lease).state, get_sandbox(lease).lost_at) == ("waiting", None)
    assert eviction.evict(get_sandbox(lease).pk, now=NOW + HOUR)
    assert sh(lease, "cat f /data/f", NOW + HOUR) == b"precious\nprecious\n"


def test_next_command_says_once_that_the_sandbox_was_restarted(grant, memory_store, memory) -> None:
    lease = grant()
    sh(lease, "true", NOW)
    memory.stop(get_sandbox(lease).ref)
    for seconds in (1, 2):
        sh(lease, "true", NOW + timedelta(seconds=seconds))
    first, second, third = Run.objects.order_by("started_at")
    assert (first.note, third.note) == ("", "")
    assert second.note.startswith("The sandbox was restarted. /workspace and /data are kept")
    event = LeaseEvent.objects.get(lease=lease, kind="recovered")
    assert (event.reason, event.actor) == (second.note, "provider")


def test_failed_operation_that_has_started_its_sandbox_leaves_an_event(grant, memory_store, memory) -> None:
    lease = grant()
    sh(lease, "true", NOW)
    memory.stop(get_sandbox(lease).ref)
    command = Command(argv=["read"], timeout=MINUTE, kind="file")
    with pytest.raises(NoSuchFile):
        execution.call_in_sandbox(
            lease.pk, command, lambda provider, sandbox: provider.read_file(sandbox.ref, "/workspace/none", limit=1), now=NOW
        )
    assert LeaseEvent.objects.filter(lease=lease, kind="recovered").count() == 1

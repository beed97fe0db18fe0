"""Agents' /data in tests: shell commands in sandboxes, crashes, and the objects of the store afterwards."""

from datetime import datetime, timedelta

from leases import execution
from leases.models import Lease
from sandboxes.models import OutputObject, Run, Sandbox, Snapshot
from sandboxes.models.state import DataFile, DataObject
from sandboxes.runs.operations import Command
from sandboxes.state import pruning
from sandboxes.storage import get_store
from tests.conftest import NOW

LATER = NOW + timedelta(hours=1)  # every deadline has passed, no lease has


def run_sh(lease: Lease, line: str, *arguments: str, now: datetime = NOW, seconds: float = 60) -> tuple[Run, str]:
    """Run a shell command in the lease's sandbox. Return (run, output). The arguments are $0, $1 and so on."""
    command = Command(argv=["sh", "-c", line, *arguments], timeout=timedelta(seconds=seconds))
    run, result = execution.exec_command(lease.pk, command, now=now)
    return run, (result.stdout + result.stderr).decode().strip()


def sh(lease: Lease, line: str, *arguments: str, now: datetime = NOW, seconds: float = 60) -> str:
    return run_sh(lease, line, *arguments, now=now, seconds=seconds)[1]


def sandbox_of(lease: Lease) -> Sandbox:
    return Sandbox.objects.filter(holder=lease.pk).latest("created_at")


def assert_nothing_left() -> None:
    """Require that after a prune the store contains exactly the objects that rows point to, and that no run is open."""
    assert pruning.remove_orphans(now=LATER + timedelta(days=1), grace=timedelta(0)).failures == []
    assert {*get_store().list("agents/")} == {*DataObject.objects.values_list("key", flat=True)}
    referenced = DataFile.objects.filter(removed=False, kind="file").values_list("stored_in", flat=True)
    assert {*DataObject.objects.values_list("pk", flat=True)} == {*referenced}
    snapshots = Snapshot.objects.filter(forgotten_at=None)
    assert {*get_store().list("snapshots/")} == {f"{snapshot.key}/workspace" for snapshot in snapshots}
    assert {*get_store().list("outputs/")} == {*OutputObject.objects.values_list("key", flat=True)}
    assert not Run.objects.filter(ended_at=None).exists()

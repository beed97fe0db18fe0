"""Commands and evictions in the sandbox of a lease, and settings and the state of its pool."""

from datetime import datetime
from typing import Any

from leases import execution
from leases.models import Lease
from sandboxes import eviction
from sandboxes.models import GONE_STATES, Pool, Run, Sandbox
from sandboxes.pool import allocation
from sandboxes.providers.command_results import ExecResult
from sandboxes.providers.memory import MemoryProvider
from sandboxes.runs.operations import Command
from tests.conftest import MINUTE, NOW


def run(lease: Lease, *argv: str, now: datetime = NOW, **fields: Any) -> ExecResult:
    """Execute a command, by default `true`, with a timeout of a minute."""
    return execution.exec_command(lease.pk, Command(argv=argv or ("true",), timeout=MINUTE, **fields), now=now)[1]


def write(lease: Lease, text: str = "kept", *, now: datetime = NOW) -> Sandbox:
    """Write a line to the file `f` of the workspace. Return the sandbox."""
    assert run(lease, "sh", "-c", f"echo {text} >f", now=now).exit_code == 0
    return get_sandbox(lease)


def read(lease: Lease, *, now: datetime = NOW) -> str:
    """Return the line in the file `f` of the workspace."""
    result = run(lease, "cat", "f", now=now)
    assert result.exit_code == 0, result
    return result.stdout.decode().strip()


def get_sandbox(lease: Lease) -> Sandbox:
    sandbox = allocation.find_by_holder(lease.pk)
    assert sandbox
    return sandbox


def evict(lease: Lease, *, now: datetime = NOW) -> None:
    assert eviction.evict(get_sandbox(lease).pk, now=now, reason="test")


def update_pool(pool: Pool, **fields: object) -> None:
    Pool.objects.filter(pk=pool.pk).update(**fields)
    pool.refresh_from_db()


def assert_converged(pool: Pool, memory: MemoryProvider) -> None:
    """Assert that rows, provider and the pool's counter agree, and that no run is open."""
    rows = Sandbox.objects.filter(pool=pool).exclude(state__in=(*GONE_STATES, "cold"))
    assert {each.name for each in memory.list(str(pool.owner))} == {sandbox.name for sandbox in rows}
    assert Pool.objects.get(pk=pool.pk).used == Sandbox.objects.filter(pool=pool).exclude(state="destroyed").count()
    assert not Run.objects.filter(ended_at__isnull=True).exists()

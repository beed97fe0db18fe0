"""Size limit of /workspace: measured after runs that may have exceeded it, and checked before the next command."""

import time
from datetime import datetime

import structlog

from sandboxes.db.connection_errors import CONNECTION_ERRORS
from sandboxes.errors import WorkspaceFull
from sandboxes.models import Sandbox
from sandboxes.providers.base import WORKSPACE, Provider
from sandboxes.providers.errors import ProviderError

log = structlog.get_logger(__name__)
MAX_WRITE_BYTES_PER_SECOND = 1 << 30  # assumed growth of a workspace, to decide whether a run may have exceeded the limit
MEASURE_INTERVAL_FACTOR = 20  # interval between measurements, in durations of the last one: at most 5 % of the time


def require_workspace_space(provider: Provider, sandbox: Sandbox, *, now: datetime) -> None:
    """Raise WorkspaceFull if the workspace exceeded its limit at the last measurement and exceeds it at a new one."""
    limit = sandbox.pool.workspace_limit_mib << 20
    if (sandbox.workspace_bytes or 0) > limit and (size := measure_workspace(provider, sandbox, now=now)) > limit:
        raise WorkspaceFull(
            f"/workspace holds {size >> 20} MiB, and its limit is {limit >> 20} MiB. "
            "Delete files through the files API, then try again.",
            workspace_bytes=size,
            limit_bytes=limit,
        )


def warn_if_workspace_full(provider: Provider, sandbox: Sandbox, *, now: datetime) -> str:
    """Measure the workspace after a run that may have exceeded its limit. Returns "", or a warning that the limit is exceeded.

    The measurement is skipped if the workspace cannot have reached its limit since the last measurement at
    MAX_WRITE_BYTES_PER_SECOND, or if the last measurement is less than MEASURE_INTERVAL_FACTOR times its duration ago. The
    `measure` sweep repeats a failed measurement."""
    limit = sandbox.pool.workspace_limit_mib << 20
    elapsed = (now - (sandbox.measured_at or sandbox.created_at)).total_seconds()
    may_exceed = (sandbox.workspace_bytes or 0) + elapsed * MAX_WRITE_BYTES_PER_SECOND > limit
    if not may_exceed or elapsed < MEASURE_INTERVAL_FACTOR * sandbox.measure_seconds:
        return ""
    try:
        size = measure_workspace(provider, sandbox, now=now)
    except (ProviderError, *CONNECTION_ERRORS) as failed:  # the result of the command is in hand, and must be recorded
        log.warning("workspace not measured", sandbox=str(sandbox.pk), error=str(failed))
        return ""
    if size <= limit:
        return ""
    return f"/workspace holds {size >> 20} MiB, and its limit is {limit >> 20} MiB: the next command is refused."


def measure_workspace(provider: Provider, sandbox: Sandbox, *, now: datetime) -> int:
    """Measure /workspace and store its size in the sandbox's row. Returns bytes. Raises the errors of Provider.size."""
    started = time.monotonic()
    size = provider.size(sandbox.ref, WORKSPACE)
    sandbox.workspace_bytes, sandbox.measured_at, sandbox.measure_seconds = size, now, time.monotonic() - started
    Sandbox.objects.filter(pk=sandbox.pk).update(workspace_bytes=size, measured_at=now, measure_seconds=sandbox.measure_seconds)
    return size

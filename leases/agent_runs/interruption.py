"""Interruption of agent runs: a request in the row, and the kill of the command."""

import uuid
from datetime import datetime

import structlog
from django.core.exceptions import ImproperlyConfigured

from leases.agent_runs.models import AgentRun
from sandboxes.errors import SandboxError
from sandboxes.hosts import registry
from sandboxes.models import GONE_STATES, Run
from sandboxes.providers.errors import ProviderError

log = structlog.get_logger(__name__)


def interrupt(agent_run: AgentRun, *, now: datetime) -> None:
    """Interrupt an agent run. Idempotent; without effect once the run has ended.

    If the sandbox is on another host or does not respond, the recorder of the run kills the command within seconds."""
    interrupt_by_id(agent_run.pk, now=now)
    agent_run.refresh_from_db()


def interrupt_by_id(pk: uuid.UUID, *, now: datetime) -> bool:
    """Like `interrupt`. Without effect if there is no such row. Return whether this call was the first."""
    open_row = AgentRun.objects.filter(pk=pk, ended_at__isnull=True)
    is_first = bool(open_row.filter(interrupted_at__isnull=True).update(interrupted_at=now))
    if open_row.exists():
        kill_command(pk)
    return is_first


def kill_command(run_id: uuid.UUID) -> None:
    """Kill the command of an open Run, with its descendants. The process that waits for the command closes the Run."""
    run = Run.objects.select_related("sandbox__host").filter(pk=run_id, ended_at__isnull=True).first()
    if run is None or run.sandbox.state in GONE_STATES or run.sandbox.incarnation != run.incarnation:
        return
    try:
        registry.require_local(run.sandbox)
        registry.get_sandbox_provider(run.sandbox).kill(run.sandbox.ref, str(run_id))
    except (ProviderError, SandboxError, ImproperlyConfigured) as error:
        log.warning("command not killed", run=str(run_id), error=str(error))

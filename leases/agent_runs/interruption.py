"""Interruption of agent runs: a request in the row, and the kill of the command."""

import uuid
from datetime import datetime

import structlog
from django.core.exceptions import ImproperlyConfigured

from leases.agent_runs.models import AgentRun
from sandboxes.errors import SandboxError
from sandboxes.models import StopReason
from sandboxes.providers.errors import ProviderError
from sandboxes.runs import stops

log = structlog.get_logger(__name__)


def interrupt(agent_run: AgentRun, *, now: datetime) -> None:
    """Interrupt an agent run. Idempotent; without effect once the run has ended.

    If the sandbox is on another host or does not respond, the recorder of the run kills the command within seconds."""
    interrupt_by_id(agent_run.pk, now=now)
    agent_run.refresh_from_db()


def interrupt_by_id(pk: uuid.UUID, *, now: datetime) -> bool:
    """Like `interrupt`. Without effect if there is no such row. Return whether this call was the first."""
    is_first = request_interruption(pk, now=now)
    if AgentRun.objects.filter(pk=pk, ended_at__isnull=True).exists():
        kill_command(pk)
    return is_first


def request_interruption(pk: uuid.UUID, *, now: datetime) -> bool:
    """Record the request to interrupt an open agent run. Return whether it is the first. The command goes on."""
    return bool(AgentRun.objects.filter(pk=pk, ended_at__isnull=True, interrupted_at__isnull=True).update(interrupted_at=now))


def kill_command(run_id: uuid.UUID, reason: StopReason = StopReason.INTERRUPTED) -> None:
    """Kill the command of an open Run, with its descendants. A failure is logged: the process that waits for the command
    kills it within seconds."""
    try:
        stops.stop_command(run_id, reason)
    except (ProviderError, SandboxError, ImproperlyConfigured) as error:
        log.warning("command not killed", run=str(run_id), error=str(error))

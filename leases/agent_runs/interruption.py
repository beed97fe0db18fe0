"""Interruption of agent runs: a request in the row, and the kill of the command."""

import uuid
from contextlib import suppress
from datetime import datetime

import structlog
from django.core.exceptions import ImproperlyConfigured

from leases.agent_runs.models import AgentRun
from sandboxes.errors import SandboxError
from sandboxes.hosts import registry
from sandboxes.models import GONE_STATES, Run
from sandboxes.providers.errors import Missing, ProviderError

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


def kill_command(run_id: uuid.UUID) -> None:
    """Kill the command of an open Run, with its descendants. A failure is logged: another process kills the command later."""
    try:
        kill(run_id)
    except (ProviderError, SandboxError, ImproperlyConfigured) as error:
        log.warning("command not killed", run=str(run_id), error=str(error))


def kill(run_id: uuid.UUID) -> bool:
    """Kill the command of an open Run. The process that waits for the command closes the Run. Return False if none is open.

    Raise WrongHost, ProviderError and ImproperlyConfigured."""
    run = Run.objects.select_related("sandbox__host").filter(pk=run_id, ended_at__isnull=True).first()
    if run is None or run.sandbox.state in GONE_STATES or run.sandbox.incarnation != run.incarnation:
        return False
    registry.require_local(run.sandbox)
    with suppress(Missing):  # `reconcile` handles the missing sandbox
        registry.get_sandbox_provider(run.sandbox).kill(run.sandbox.ref, str(run_id))
    return True

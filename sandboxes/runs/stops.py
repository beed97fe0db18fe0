"""Requests to stop the command of a Run."""

import threading
import uuid
from contextlib import suppress

import structlog
from django.db import connections

from sandboxes.hosts import registry
from sandboxes.models import GONE_STATES, Run, StopReason
from sandboxes.providers.base import Provider
from sandboxes.providers.errors import Missing, ProviderError

log = structlog.get_logger(__name__)


def request_stop(run_id: uuid.UUID, reason: StopReason) -> bool:
    """Record the request to stop the command of an open Run, unless there is an earlier one. Return whether it is the first.

    The command goes on. The process that waits for the command kills it, also if it begins after this request."""
    return bool(Run.objects.filter(pk=run_id, ended_at__isnull=True, stop_reason="").update(stop_reason=reason))


def stop_command(run_id: uuid.UUID, reason: StopReason) -> bool:
    """Request the stop of the command of an open Run, and kill the command. Return False if no Run is open.

    The process that waits for the command closes the Run. Raise WrongHost, ProviderError and ImproperlyConfigured: the request
    remains then."""
    run = Run.objects.select_related("sandbox__host").filter(pk=run_id, ended_at__isnull=True).first()
    if run is None or run.sandbox.state in GONE_STATES or run.sandbox.incarnation != run.incarnation:
        return False
    request_stop(run_id, reason)
    registry.require_local(run.sandbox)
    with suppress(Missing):  # `reconcile` handles the missing sandbox
        registry.get_sandbox_provider(run.sandbox).kill(run.sandbox.ref, str(run_id))
    return True


class KillThread(threading.Thread):
    """Thread that kills the command of a Run once, in the process that waits for the command."""

    def __init__(self, provider: Provider, ref: str, mark: str) -> None:
        super().__init__(name=f"kill-run-{mark}", daemon=True)
        self._provider, self._ref, self._mark, self.done = provider, ref, mark, False

    def run(self) -> None:
        try:
            self._provider.kill(self._ref, self._mark)
        except ProviderError as error:  # tried again while the command runs; a missing sandbox has no command
            log.warning("command not killed", run=self._mark, error=str(error))
        finally:
            self.done = True
            connections.close_all()

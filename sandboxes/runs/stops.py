"""Requests to stop the command of a Run."""

import uuid
from contextlib import suppress

from sandboxes.hosts import registry
from sandboxes.models import GONE_STATES, Run, StopReason
from sandboxes.providers.errors import Missing


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

"""Failures of operations, the commands that may still run after one, and recoveries from a stop of the sandbox."""

from collections.abc import Sequence

from sandboxes.db.connection_errors import CONNECTION_ERRORS
from sandboxes.errors import ProviderCallFailed, StoreUnavailable
from sandboxes.models import Run
from sandboxes.providers.base import Provider
from sandboxes.providers.errors import Missing, NoSuchFile, OutOfSpace, ProviderError, Rejected, Stopped
from sandboxes.providers.recoveries import Recovery
from sandboxes.storage.base import StoreError

RECOVERED_NOTE = "/workspace and /data are kept; processes, and files elsewhere such as in /tmp, are gone."
STOPPED_ADVICE = "Its files are kept, and the next use starts it. Check the effects of the operation before you repeat it."


def translate_error(failed: Exception) -> Exception:
    """Return the error to raise for a failed call of the provider or the store. Return any other error unchanged."""
    if isinstance(failed, (NoSuchFile, OutOfSpace, Rejected)):
        return failed
    if isinstance(failed, Stopped):
        return ProviderCallFailed(f"{failed} {STOPPED_ADVICE}")
    if isinstance(failed, ProviderError):
        return ProviderCallFailed(f"The provider failed: {failed}")
    if isinstance(failed, StoreError):
        return StoreUnavailable(f"The store did not respond, so nothing was run: {failed}")
    return failed


def describe_recovery(recoveries: Sequence[Recovery]) -> str:
    """Return the note of a Run whose calls of the provider have found the sandbox stopped, "" without a recovery."""
    if not recoveries:
        return ""
    recovery = Recovery.RECREATED if Recovery.RECREATED in recoveries else Recovery.STARTED
    return f"The sandbox was {recovery}. {RECOVERED_NOTE}"


def may_run_on(run: Run, provider: Provider, failed: Exception) -> bool:
    """Kill the command of a Run whose execution failed. Return whether the command may still be running.

    A sandbox that has stopped has no processes any more. A lost connection to the database does not end the command: a sweep
    closes the Run with the result that the sandbox retains."""
    if isinstance(failed, CONNECTION_ERRORS):
        return True
    if isinstance(failed, Stopped):
        return False
    try:
        provider.kill(run.sandbox.ref, str(run.pk))
    except Missing:
        return False
    except ProviderError:
        return True
    return False


def abandon_run(run: Run, note: str) -> None:
    """Leave the Run open for `close_abandoned_run`, so that the sandbox stays `running` until its command is killed."""
    Run.objects.filter(pk=run.pk, claim=run.claim, ended_at__isnull=True).update(released=True, note=note[:500])

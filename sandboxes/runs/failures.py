"""Failures of operations, the commands that may still run after one, and recoveries from a stop of the sandbox."""

import re
import shlex
from collections.abc import Sequence

from sandboxes.db.connection_errors import CONNECTION_ERRORS
from sandboxes.errors import ProviderCallFailed, SandboxDiskFull, StoreUnavailable
from sandboxes.models import Run
from sandboxes.providers.base import Provider
from sandboxes.providers.command_results import ExecResult
from sandboxes.providers.errors import Missing, NoSuchFile, OutOfSpace, ProviderError, Rejected, Stopped
from sandboxes.providers.recoveries import Recovery
from sandboxes.storage.base import StoreError

NOT_EXECUTABLE = 126  # exit code, as of a shell
MAX_REASON_BYTES = 1000
RECOVERED_NOTE = "/workspace and /data are kept; processes, and files elsewhere such as in /tmp, are gone."
STOPPED_ADVICE = "Its files are kept, and the next use starts it. Check the effects of the operation before you repeat it."


def translate_error(failed: Exception) -> Exception:
    """Return the error to raise for a failed call of the provider or the store. Return any other error unchanged."""
    if isinstance(failed, (NoSuchFile, Rejected)):
        return failed
    if isinstance(failed, OutOfSpace):
        return SandboxDiskFull()
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


def describe_unusable_directory(run: Run, result: ExecResult | None) -> str:
    """Return the note of a command that was not executed because its working directory may not be entered. "" for others."""
    directory = run.cwd.rstrip("/")
    if result is None or result.exit_code != NOT_EXECUTABLE or not directory:
        return ""
    # The engine, the agent and the runner each have a text of their own, with the directory and not a path below it.
    named = rf"(?<![\w./-]){re.escape(directory)}/?(?![\w./-])"
    reason = result.stderr[:MAX_REASON_BYTES].decode(errors="replace")
    if "permission denied" not in reason.lower() or not re.search(named, reason):
        return ""
    return (
        f"The working directory {run.cwd} may not be entered, so the command was not executed. Restore its permissions with a "
        f"command whose `cwd` is another directory, such as /tmp: chmod u+rwx {shlex.quote(run.cwd)}"
    )


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
    Run.objects.filter(pk=run.pk, claim=run.claim, ended_at__isnull=True).update(released=True, note=note)

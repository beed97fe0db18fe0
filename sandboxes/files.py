"""Files of a holder, looked at: in its sandbox while that is alive, in what is stored while it sleeps."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime
from typing import TypeVar

import structlog

from sandboxes import runs, snapshots
from sandboxes.errors import StoreUnavailable
from sandboxes.models import ALIVE_STATES
from sandboxes.pool import SandboxRequest
from sandboxes.providers.base import WORKSPACE
from sandboxes.runs import Command
from sandboxes.state import file_reader
from sandboxes.state.file_reader import FileTree, LiveFiles, Unreadable
from sandboxes.storage.base import StoreError

log = structlog.get_logger(__name__)
T = TypeVar("T")
SOURCE_SANDBOX, SOURCE_SNAPSHOT = "sandbox", "snapshot"  # where an answer may come from


def read_files(
    request: SandboxRequest, root: str, command: Command, act: Callable[[FileTree], T], *, now: datetime, actor: str = ""
) -> tuple[T, str]:
    """What `act` finds below /workspace or /data, and where: in the sandbox, which is a Run, or in what is stored.

    Nothing is woken, or started, but for a stored copy that cannot be read, and for data that is not in the store but
    mounted. Whatever a run raises; StoreFailed."""
    sandbox = snapshots.wait_until_settled(request.holder, now=now)
    if not (sandbox and sandbox.state in ALIVE_STATES):
        try:
            with _open_stored_files(request, root, now=now) as files:
                return act(files), SOURCE_SNAPSHOT
        except Unreadable as why:
            log.info("woken to be read", agent=request.agent_did, holder=str(request.holder), reason=str(why))
        except StoreError as failed:
            raise StoreUnavailable(f"What is stored cannot be read now: {failed}") from failed
    with runs.operation(request, command, now=now, actor=actor) as opened:
        return act(LiveFiles(opened.provider, opened.sandbox.ref, root)), SOURCE_SANDBOX


def _open_stored_files(request: SandboxRequest, root: str, *, now: datetime) -> AbstractContextManager[FileTree]:
    if root == WORKSPACE:
        return file_reader.open_workspace(request.holder, request.files, now=now)
    return file_reader.open_data(request.agent_did, now=now)

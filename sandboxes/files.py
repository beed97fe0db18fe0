"""Read access to a holder's files: in the sandbox if it is alive, otherwise in the stored copy."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime
from typing import TypeVar

import structlog
from django.conf import settings

from sandboxes import snapshots
from sandboxes.db.clock import clock_from
from sandboxes.errors import StoreUnavailable
from sandboxes.models import ALIVE_STATES
from sandboxes.pool.allocation import SandboxRequest
from sandboxes.providers.base import WORKSPACE
from sandboxes.runs import operations
from sandboxes.runs.operations import Command
from sandboxes.state import file_tree, workspace
from sandboxes.state.file_tree import FileTree, LiveFiles, Unreadable
from sandboxes.storage.base import StoreError

log = structlog.get_logger(__name__)
T = TypeVar("T")
SOURCE_SANDBOX, SOURCE_SNAPSHOT = "sandbox", "snapshot"  # source of a result of read_files


def read_files(
    request: SandboxRequest, root: str, command: Command, act: Callable[[FileTree], T], *, now: datetime, actor: str = ""
) -> tuple[T, str]:
    """Call `act` with the file tree below `root` (/workspace or /data). Returns its result and the source.

    An alive sandbox is read in a Run of `command`. The files of a cold one are read from the stored copy. If the stored copy is
    not readable, or /data is mounted instead of stored, the sandbox is woken and `act` is called again in it. Raises
    StoreUnavailable and the errors of `operations.operation`."""
    clock = clock_from(now)
    sandbox = snapshots.wait_until_settled(request.holder, now=now)
    if not (sandbox and sandbox.state in ALIVE_STATES):
        try:
            with _open_stored_files(request, root, now=clock()) as files:
                return act(files), SOURCE_SNAPSHOT
        except Unreadable as unreadable:
            log.info("woken to read files", agent=request.agent_did, holder=str(request.holder), reason=str(unreadable))
        except StoreError as failed:
            raise StoreUnavailable(f"The stored copy cannot be read: {failed}") from failed
    with operations.operation(request, command, now=clock(), actor=actor) as opened:
        limit = request.pool.workspace_limit_mib << 20 if root == WORKSPACE else settings.DATA_MOST_BYTES
        max_tar_bytes = workspace.compute_max_tar_bytes(limit)
        return act(LiveFiles(opened.provider, opened.sandbox.ref, root, max_tar_bytes=max_tar_bytes)), SOURCE_SANDBOX


def _open_stored_files(request: SandboxRequest, root: str, *, now: datetime) -> AbstractContextManager[FileTree]:
    if root == WORKSPACE:
        return file_tree.open_workspace(request.holder, request.files, now=now)
    return file_tree.open_data(request.agent_did, now=now)

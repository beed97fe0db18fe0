"""Files of a holder, looked at: in its sandbox while that is alive, in what is stored while it sleeps."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime
from typing import TypeVar

import structlog

from sandboxes import runs, snapshots
from sandboxes.errors import StoreUnavailable
from sandboxes.models import ALIVE_STATES, Sandbox
from sandboxes.pool import SandboxRequest
from sandboxes.providers.base import WORKSPACE, Provider
from sandboxes.runs import Command
from sandboxes.state import file_tree
from sandboxes.state.file_tree import FileTree, LiveFiles, Unreadable
from sandboxes.storage.base import StoreError

log = structlog.get_logger(__name__)
T = TypeVar("T")
SOURCE_SANDBOX, SOURCE_SNAPSHOT = "sandbox", "snapshot"  # where an answer may come from


def read_files(
    want: SandboxRequest, root: str, command: Command, act: Callable[[FileTree], T], *, now: datetime, actor: str = ""
) -> tuple[T, str]:
    """What `act` finds below /workspace or /data, and where: in the sandbox, which is a Run, or in what is stored.

    Nothing is woken, or started, but for a stored copy that cannot be read, and for data that is not in the store but
    mounted. Whatever a run raises; StoreFailed."""
    sandbox = snapshots.wait_until_settled(want.holder, now=now)
    if not (sandbox and sandbox.state in ALIVE_STATES):
        try:
            with _open_stored_files(want, root, now=now) as files:
                return act(files), SOURCE_SNAPSHOT
        except Unreadable as why:
            log.info("woken to be read", agent=want.agent_did, holder=str(want.holder), reason=str(why))
        except StoreError as failed:
            raise StoreUnavailable(f"What is stored cannot be read now: {failed}") from failed

    def alive(provider: Provider, sandbox: Sandbox) -> T:
        return act(LiveFiles(provider, sandbox.ref, root))

    _, found = runs.run_operation(want, command, alive, now=now, actor=actor)
    return found, SOURCE_SANDBOX


def _open_stored_files(want: SandboxRequest, root: str, *, now: datetime) -> AbstractContextManager[FileTree]:
    if root == WORKSPACE:
        return file_tree.open_workspace(want.holder, want.files, now=now)
    return file_tree.open_data(want.agent_did, now=now)

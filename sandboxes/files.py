"""Files of a holder, looked at: in its sandbox while that is alive, in what is stored while it sleeps."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime
from typing import TypeVar

import structlog

from sandboxes import runs, snapshots
from sandboxes.errors import StoreFailed
from sandboxes.models import ALIVE, Sandbox
from sandboxes.pool import Want
from sandboxes.providers.base import WORKSPACE, Provider
from sandboxes.runs import Command
from sandboxes.state import file_reader
from sandboxes.state.file_reader import Alive, Files, Unreadable
from sandboxes.storage.base import StoreError

log = structlog.get_logger(__name__)
T = TypeVar("T")
SANDBOX, SNAPSHOT = "sandbox", "snapshot"  # where an answer may come from


def look(
    want: Want, root: str, command: Command, act: Callable[[Files], T], *, now: datetime, actor: str = ""
) -> tuple[T, str]:
    """What `act` finds below /workspace or /data, and where: in the sandbox, which is a Run, or in what is stored.

    Nothing is woken, or started, but for a stored copy that cannot be read, and for data that is not in the store but
    mounted. Whatever a run raises; StoreFailed."""
    sandbox = snapshots.settled(want.holder, now=now)
    if not (sandbox and sandbox.state in ALIVE):
        try:
            with _stored(want, root, now=now) as files:
                return act(files), SNAPSHOT
        except Unreadable as why:
            log.info("woken to be read", agent=want.agent_did, holder=str(want.holder), reason=str(why))
        except StoreError as failed:
            raise StoreFailed(f"What is stored cannot be read now: {failed}") from failed

    def alive(provider: Provider, sandbox: Sandbox) -> T:
        return act(Alive(provider, sandbox.ref, root))

    _, found = runs.act_in(want, command, alive, now=now, actor=actor)
    return found, SANDBOX


def _stored(want: Want, root: str, *, now: datetime) -> AbstractContextManager[Files]:
    if root == WORKSPACE:
        return file_reader.workspace_of(want.holder, want.files, now=now)
    return file_reader.data_of(want.agent_did, now=now)

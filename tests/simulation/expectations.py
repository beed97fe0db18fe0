"""Expected content of sandboxes and stores, derived only from what clients were told."""

import io
import tarfile
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import UUID

from sandboxes.providers.base import DATA, WORKSPACE

if TYPE_CHECKING:
    from tests.simulation.ports import SimulatedStore


@dataclass
class LeaseExpectation:
    """Files that an acknowledged operation has written and that no later operation was asked to remove."""

    agent: str
    workspace: dict[str, str] = field(default_factory=dict)  # path -> content
    data: dict[str, str] = field(default_factory=dict)
    unstored: set[str] = field(default_factory=set)  # paths of `data` whose run had a note: stored nowhere yet
    discarded: bool = False  # an operator has destroyed the state
    losses: int = 0  # sandboxes of this lease that the engine has lost
    vanished: bool = False  # the engine has lost the sandbox since the last acknowledged command

    def add(self, path: str, content: str, *, stored: bool) -> None:
        if path.startswith(WORKSPACE):
            self.workspace[path] = content
            return
        self.data[path] = content
        if stored:
            self.unstored.clear()
        else:
            self.unstored.add(path)

    def remove(self, path: str) -> None:
        self.workspace.pop(path, None)
        self.data.pop(path, None)
        self.unstored.discard(path)

    def find_missing(self, seen: dict[str, str]) -> dict[str, str]:
        """Return the expected files that differ from those that a command has seen."""
        return {path: text for path, text in (self.workspace | self.data).items() if seen.get(path) != text}


class Expectations:
    """Expectations by lease, and the lease that wrote each content."""

    def __init__(self) -> None:
        self.leases: dict[UUID, LeaseExpectation] = {}
        self.operations: dict[str, int] = defaultdict(int)  # name of a client's operation -> executions of its program

    def get(self, lease: UUID, agent: str = "") -> LeaseExpectation:
        return self.leases.setdefault(lease, LeaseExpectation(agent))


def read_snapshot(store: "SimulatedStore", key: str) -> dict[str, str] | None:
    """Return the simulated program's files in a stored workspace, or None if the object is missing."""
    content = store.values.get(f"{key}/workspace")
    if content is None:
        return None
    files = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        for member in tar:
            name = f"{WORKSPACE}/{member.name}"
            source = tar.extractfile(member) if member.isfile() and name.startswith(f"{WORKSPACE}/f") else None
            if source:
                files[name] = source.read().decode()
    return files


__all__ = ["DATA", "Expectations", "LeaseExpectation", "read_snapshot"]

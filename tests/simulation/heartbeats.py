"""Heartbeats of claims, the locks of claims and work of the queue, as actors in place of real threads."""

from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from django.db import Error as DatabaseError

from sandboxes import claims, queue_threads
from sandboxes.errors import SandboxError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.simulation.world import Process, World

HEARTBEAT_SECONDS = 5.0


class ProcessHeartbeats:
    """Claims by process. Each process has a heartbeat actor while it has claims."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.held: dict[Process, list[Any]] = {}

    def add(self, progress: Any) -> None:
        if process := self.world.current_process:
            if not self.held.get(process):
                self.held[process] = []
                self.world.spawn(process, "heartbeat", lambda: self._run(process))
            self.held[process].append(progress)

    def remove(self, progress: Any) -> None:
        process = self.world.current_process
        if process and progress in self.held.get(process, []):
            self.held[process].remove(progress)

    def _run(self, process: "Process") -> None:
        while self.held[process]:
            self.world.scheduler.sleep(HEARTBEAT_SECONDS)
            for progress in [*self.held[process]]:
                with suppress(SandboxError, DatabaseError):  # a lost claim, or a database that does not respond
                    progress.beat()


class CooperativeLock:
    """Reentrant lock of an actor. A real one would block the thread that has the baton."""

    def __init__(self, world: "World") -> None:
        self.world, self.owner, self.depth = world, None, 0  # type: World, object, int

    def __enter__(self) -> None:
        actor = self.world.scheduler.current
        while self.owner not in (None, actor):
            self.world.scheduler.sleep(0.01)
        self.owner, self.depth = actor, self.depth + 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1
        if not self.depth:
            self.owner = None


@contextmanager
def replaced(world: "World") -> "Iterator[None]":
    """Replace threads and locks of the product's claims, and run the queue's work in the actor of its task."""
    saved = claims.HEARTBEAT, claims.threading, queue_threads.is_worker_thread
    claims.HEARTBEAT = cast(Any, ProcessHeartbeats(world))
    claims.threading = cast(Any, SimpleNamespace(RLock=lambda: CooperativeLock(world)))
    queue_threads.is_worker_thread = lambda: False
    try:
        yield
    finally:
        claims.HEARTBEAT, claims.threading, queue_threads.is_worker_thread = saved

"""Threads that the product starts besides those of its requests, as actors of the same process, and its waits in virtual time.

A real thread would not hold the baton, and a real wait would keep it from all others."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from leases.agent_runs import lifecycle, recorder
from leases.api import command_threads
from sandboxes.runs import retention, stops
from sandboxes.streams import rows
from sandboxes.streams.registry import StreamSlot

if TYPE_CHECKING:
    from tests.simulation.world import World

JOIN_INTERVAL_SECONDS = 2.0
READY_INTERVAL_SECONDS = 0.2


class CooperativeEvent:
    """Event of an actor, set by another one."""

    def __init__(self, world: "World") -> None:
        self.world, self._is_set = world, False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set

    def wait(self) -> None:
        while not self._is_set:
            self.world.scheduler.sleep(READY_INTERVAL_SECONDS)


class InlineExecutor:
    """Executor that calls functions in the actor that waits for their result."""

    def submit(self, function: Callable[..., Any], *arguments: Any) -> SimpleNamespace:
        return SimpleNamespace(result=lambda: function(*arguments))


class Acknowledgements:
    """Acknowledgements of retained results at their virtual time, unless their process has been killed before."""

    def __init__(self, world: "World") -> None:
        self.world = world

    def put(self, result: retention.RetainedResult) -> None:
        process = self.world.current_process
        assert process
        self.world.scheduler.call_at(result.due, lambda: result.acknowledge() if process.alive else None)


def list_patches(world: "World") -> list[tuple[Any, str, Any]]:
    """Return the replaced attributes, with their values during a history."""
    scheduler = world.scheduler

    def start(thread: Any) -> None:
        process = world.current_process
        assert process
        thread.actor = world.spawn(process, thread.name, thread.run)

    def join(thread: Any) -> None:
        while not thread.actor.done:
            scheduler.sleep(JOIN_INTERVAL_SECONDS)

    kinds: list[type[threading.Thread]] = [command_threads.CommandThread, lifecycle.RecordingThread, stops.KillThread]
    is_started = property(lambda thread: 1 if hasattr(thread, "actor") else None)
    patches: list[tuple[Any, str, Any]] = []
    for kind in kinds:
        patches += [(kind, "start", start), (kind, "join", join), (kind, "ident", is_started)]
    defaults = recorder.Recorder.__init__.__kwdefaults__ or {}
    return [
        *patches,
        (command_threads, "threading", SimpleNamespace(Event=lambda: CooperativeEvent(world))),
        (recorder.Recorder.__init__, "__kwdefaults__", defaults | {"pause": scheduler.poll}),
        (rows, "_thread", InlineExecutor()),
        (retention, "ACKNOWLEDGER", Acknowledgements(world)),
        (StreamSlot, "pause", lambda slot, seconds: scheduler.poll(seconds)),
    ]

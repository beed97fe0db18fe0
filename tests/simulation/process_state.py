"""Module state of the product that each process of the control plane has for itself.

Virtual processes share one interpreter. Without a copy for each of them, a killed process would leave its entries in the state
of the others: its threads never run their `finally` blocks. State that the simulation replaces as a whole has its replacement
in tests.simulation.world and tests.simulation.heartbeats. Other module state is a constant, such as a cached SQL text, or
belongs to a thread, or to streams, gateways and web servers, which no history has."""

from collections.abc import Callable, Sequence
from functools import cached_property
from types import ModuleType
from typing import Any

from leases.api import command_threads
from leases.atproto import accounts
from sandboxes import agent_shares, deferred_writes, installation_marks, sweep_log
from sandboxes.agent_shares import MAX_PASSES_PER_AGENT, AgentShares
from sandboxes.stores import journal
from sandboxes.streams import events
from sandboxes.webhooks import delivery

# Module, name, and function that creates the value of a process that has just started.
OWN_STATE: Sequence[tuple[ModuleType, str, Callable[[], object]]] = (
    (sweep_log, "IN_PROGRESS", sweep_log.SweepsInProgress),
    (installation_marks, "FIRST_CHECK", installation_marks.FirstCheck),
    (agent_shares, "DESTROYS", lambda: AgentShares(MAX_PASSES_PER_AGENT)),
    (agent_shares, "EVICTIONS", lambda: AgentShares(MAX_PASSES_PER_AGENT)),
    (accounts, "_sessions", dict),
    (accounts, "_locks", dict),
    (events, "NEWEST_POSITION", events.NewestPosition),
    (command_threads, "_threads", set),
    (delivery, "RUNNING_PASS", delivery.RunningPass),
    (journal, "WRITER", journal.Writer),
    (deferred_writes, "DEFERRED", deferred_writes.DeferredWrites),
)


class ProcessState:
    """Module state of one virtual process."""

    def install(self) -> None:
        """Make this the state of the modules, until another process runs."""
        for (module, name, _), value in zip(OWN_STATE, self._values, strict=True):
            setattr(module, name, value)

    @cached_property
    def _values(self) -> list[object]:  # created once random identifiers are those of the history
        return [create() for _, _, create in OWN_STATE]


def list_patches() -> list[tuple[Any, str, Any]]:
    """Return the modules, names and present values, which the simulation restores after a history."""
    return [(module, name, getattr(module, name)) for module, name, _ in OWN_STATE]

"""Shares of agents in the threads of this process that destroy and evict sandboxes.

One such call may last as long as a transfer, or until the sandbox is given up. Without shares, the sandboxes of one agent could
take all threads, and those of others would wait. Work that is left alone for a share stays due."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

MAX_PASSES_PER_AGENT = 2  # of the four passes of a sweep that a worker runs at once


class AgentShares:
    """Number of calls in progress for each agent, of which at most `limit` are admitted at once."""

    def __init__(self, limit: int) -> None:
        self._limit, self._lock, self._in_progress = limit, threading.Lock(), Counter[str]()

    @contextmanager
    def entering(self, agent_did: str) -> Iterator[bool]:
        """Yield whether the agent had a part of its share left. A sandbox without an agent has no limit."""
        admitted = self.take(agent_did)
        try:
            yield admitted
        finally:
            if admitted:
                self.give_back(agent_did)

    def take(self, agent_did: str) -> bool:
        with self._lock:
            if agent_did and self._in_progress[agent_did] >= self._limit:
                return False
            self._in_progress[agent_did] += 1
            return True

    def give_back(self, agent_did: str) -> None:
        with self._lock:
            self._in_progress[agent_did] -= 1
            self._in_progress += Counter()  # drops the agents without calls

    def list_exhausted(self) -> list[str]:
        """Return the agents without any part of their share left."""
        with self._lock:
            return [agent for agent, count in self._in_progress.items() if agent and count >= self._limit]


DESTROYS, EVICTIONS = AgentShares(MAX_PASSES_PER_AGENT), AgentShares(MAX_PASSES_PER_AGENT)  # of this process
